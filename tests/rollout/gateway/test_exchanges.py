"""Bodies of the protocols to requests of the session, and answers to bodies, without a server."""

import json

import pytest

from megatron_rl_corr.rollout.gateway import anthropic, openai_messages
from megatron_rl_corr.rollout.gateway.anthropic import MessageExchange
from megatron_rl_corr.rollout.gateway.bodies import MOST_PIECES, Memory, cut, pieces
from megatron_rl_corr.rollout.gateway.openai_chat import ChatExchange
from megatron_rl_corr.rollout.gateway.openai_completions import TextExchange
from megatron_rl_corr.rollout.gateway.openai_responses import ResponseExchange
from megatron_rl_corr.rollout.gateway.types import GatewayError
from tests.rollout.gateway.scripted_session import ARGUMENTS, CALLS, SAMPLING, answer

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}}


@pytest.fixture
def memory():
    return Memory(SAMPLING, ("enable_thinking", "reasoning_effort"))


def chat(memory, **fields):
    return ChatExchange({"model": "m", "messages": [USER], **fields}, memory).request


def refused(make, *given, **fields):
    with pytest.raises(GatewayError) as error:
        make(*given, **fields)
    assert error.value.status == 400
    return error.value.code, error.value.param


@pytest.mark.parametrize(
    "fields, overridden",
    [
        ({"temperature": 0.8, "top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0}, ()),
        ({"temperature": None, "top_k": 0, "logit_bias": {}, "repetition_penalty": 1.0}, ()),
        ({"seed": 0, "temperature": 1, "min_p": 0.1}, ("temperature", "min_p", "seed")),
        ({"top_k": 5, "repetition_penalty": 1.1}, ("top_k", "repetition_penalty")),
        ({"tools": [TOOL]}, ("tools.strict",)),
    ],
)
def test_sampling_when_the_request_differs_from_the_run_then_listed(memory, fields, overridden):
    assert chat(memory, **fields).overridden == overridden


def test_tools_when_strict_then_the_template_does_not_see_it(memory):
    request = chat(memory, tools=[TOOL])
    assert request.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert chat(memory, tools=[]).tools is None


def test_messages_when_a_client_echoes_empty_keys_then_left_out(memory):
    echo = {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": []}
    parsed = [
        {**call, "index": index, "function": {**call["function"], "parsed_arguments": {"a": 1}}}
        for index, call in enumerate(CALLS)
    ]
    echo |= {"function_call": None, "tool_calls": parsed, "reasoning_content": None, "parsed": None}
    request = chat(memory, messages=[USER, echo])
    assert request.messages[1] == {"role": "assistant", "content": "", "tool_calls": CALLS}


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "hi", "extra": 1}, "messages[0].extra"),
        ({"role": "tool", "content": "3"}, "messages[0].tool_call_id"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": {}}}],
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("hi", "messages[0]"),
    ],
)
def test_messages_when_malformed_then_refused_by_place(memory, message, param):
    assert refused(chat, memory, messages=[message])[1] == param


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [3]}, "stop[0]"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"model": None}, "model"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_chat_when_a_field_is_wrong_then_refused_by_its_name(memory, fields, param):
    assert refused(chat, memory, **fields)[1] == param


def test_completions_when_the_prompt_is_a_list_of_one_then_it_is_it(memory):
    def prompt(value):
        return TextExchange({"model": "m", "prompt": value}, memory).request.prompt

    assert prompt(["a"]) == "a" and prompt([[1, 2]]) == [1, 2] and prompt([3]) == [3]
    for value in ("", [], [[1], [2]], [1, "a"], [1.5]):
        assert refused(prompt, value)[1].startswith("prompt")


def test_arguments_when_sent_back_as_a_value_then_the_text_that_was_sampled(memory):
    exchange = MessageExchange({"model": "m", "max_tokens": 1, "messages": [USER]}, memory)
    blocks = exchange.body([answer("a0", "", reason="tool_calls", tool_calls=CALLS)])["content"]
    assert blocks[0]["input"] == json.loads(ARGUMENTS)

    def sent_back(value):
        block = {"type": "tool_use", "id": "call_0", "name": "add", "input": value}
        messages = [USER, {"role": "assistant", "content": [block]}, USER]
        request = MessageExchange({"model": "m", "max_tokens": 1, "messages": messages}, memory).request
        return request.messages[1]["tool_calls"][0]["function"]["arguments"]

    assert sent_back(blocks[0]["input"]) == ARGUMENTS
    assert sent_back({"a": 2}) == '{"a": 2}'


def test_arguments_when_an_id_comes_again_then_each_call_has_the_text_that_it_was_sampled_with(memory):
    """As Kimi-K2 counts its calls: functions.add:0 in each answer."""
    texts = ['{"a":1}', '{"a": 1.0,"b":true}', '{"b":   "2"}']
    body = {"model": "m", "max_tokens": 1, "messages": [USER]}
    history, streamed = [USER], []
    for number, text in enumerate(texts):
        function = {"name": "add", "arguments": text}
        calls = [{"id": "functions.add:0", "type": "function", "function": function}]
        exchange = MessageExchange(body, memory)
        answered = answer(f"a{number}", "", reason="tool_calls", tool_calls=calls)
        (block,) = exchange.body([answered])["content"]
        events = [json.loads(one.partition(b"data: ")[2]) for one in exchange.events([answered])]
        streamed.append("".join(one.get("delta", {}).get("partial_json", "") for one in events))
        history += [{"role": "assistant", "content": [block]}, USER]
    assert streamed == texts
    messages = MessageExchange(body | {"messages": history}, memory).request.messages
    assert [
        one["tool_calls"][0]["function"]["arguments"] for one in messages if one["role"] == "assistant"
    ] == texts
    (block,) = history[1]["content"]
    for value, text in [
        ({"a": 1.0}, texts[0]),
        ({"a": True}, '{"a": true}'),
        ({"b": True, "a": 1}, texts[1]),
    ]:
        changed = [USER, {"role": "assistant", "content": [block | {"input": value}]}, USER]
        request = MessageExchange(body | {"messages": changed}, memory).request
        assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == text


def message_request(memory, **fields):
    body = {"model": "m", "max_tokens": 9, "messages": [USER], **fields}
    return MessageExchange({key: one for key, one in body.items() if one is not None}, memory).request


def test_system_when_a_block_is_the_clients_bill_then_left_out(memory):
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"}
    for rest in ([], [{"type": "text", "text": "Be short."}]):
        made = message_request(memory, system=[bill, *rest]).messages[:-1]
        assert made == [{"role": "system", "content": one["text"]} for one in rest]


def test_context_when_managed_so_that_nothing_changes_then_named_and_else_refused(memory):
    keeps = {"type": "clear_thinking_20251015", "keep": "all"}
    request = message_request(memory, context_management={"edits": [keeps]})
    assert request.overridden == ("context_management",)
    for edits in ([keeps | {"keep": {"type": "thinking_turns", "value": 1}}], [3], [keeps, {"type": "x"}]):
        with pytest.raises(GatewayError, match="left to the caller"):
            message_request(memory, context_management={"edits": edits})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"best": 1}, "best: Extra inputs are not permitted"),
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"thread": {"type": "create"}}, "'thread' is kept nowhere: send all messages."),
    ],
)
def test_errors_when_of_messages_then_in_anthropics_words(memory, fields, words):
    with pytest.raises(GatewayError) as error:
        message_request(memory, **fields)
    made = anthropic.error_body(error.value)["error"]
    assert made["message"] == words and made["type"] == "invalid_request_error"
    told = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert made.get("details") == (told if "thread" in fields else None)


@pytest.mark.parametrize(
    ("has", "effort", "thinking", "variables", "overridden"),
    [
        ((), "none", "disabled", {}, ()),
        ((), "high", "enabled", {}, (True, True)),
        ((), "low", "adaptive", {}, (True, True)),
        (("enable_thinking",), "none", "disabled", {"enable_thinking": False}, (False, True)),
        (("enable_thinking",), "high", "enabled", {"enable_thinking": True}, (False, True)),
        (("reasoning_effort",), "none", "disabled", {"reasoning_effort": "none"}, ()),
    ],
)
def test_thoughts_when_the_template_has_no_variable_for_them_then_ignored_and_named(
    has, effort, thinking, variables, overridden
):
    memory = Memory(SAMPLING, has)
    made = message_request(memory, thinking={"type": thinking}, output_config={"effort": effort})
    assert made.template_kwargs == variables
    named = zip(("thinking", "output_config.effort"), overridden, strict=False)
    assert made.overridden == tuple(name for name, is_named in named if is_named)
    effort_alone = {name: one for name, one in variables.items() if name == "reasoning_effort"}
    for request, name in (
        (chat(memory, reasoning_effort=effort), "reasoning_effort"),
        (
            ResponseExchange({"model": "m", "input": "x", "reasoning": {"effort": effort}}, memory).request,
            "reasoning.effort",
        ),
    ):
        assert request.template_kwargs == effort_alone
        assert request.overridden == (name,) * (len(overridden) == 2 and overridden[1])


def test_blocks_when_results_stand_between_texts_then_messages_in_their_order(memory):
    def text(said):
        return {"type": "text", "text": said}

    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    content = [text("a"), text("b"), result, {**result, "tool_use_id": "d"}, text("e")]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    messages = MessageExchange(body, memory).request.messages
    assert [(one["role"], one["content"]) for one in messages] == [
        ("user", "a\nb"),
        ("tool", "3"),
        ("tool", "3"),
        ("user", "e"),
    ]
    assert messages[2]["tool_call_id"] == "d"


def test_responses_when_not_stored_then_not_found(memory):
    def ask(**fields):
        return ResponseExchange({"model": "m", "input": "hi", **fields}, memory)

    ask(store=False).body([answer("a0", "one")])
    assert memory.responses == {}
    kept = ask(instructions="Be short.").body([answer("a1", "two")])
    after = ask(previous_response_id=kept["id"]).request.messages
    assert after == [USER, {"role": "assistant", "content": "two"}, USER]
    assert refused(ask, previous_response_id="resp_a0")[0] == "previous_response_not_found"
    assert ask(text={"format": None, "verbosity": "low"}).request.messages == [USER]


def test_responses_when_items_of_an_assistant_follow_each_other_then_one_message(memory):
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [USER, thought, said, call, {**call, "call_id": "d"}, said, call]
    messages = ResponseExchange({"model": "m", "input": items}, memory).request.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "assistant"]
    assert [one["id"] for one in messages[1]["tool_calls"]] == ["c", "d"]
    assert messages[1]["reasoning_content"] == "Hm." and "reasoning_content" not in messages[2]
    assert len(messages[2]["tool_calls"]) == 1


def test_responses_when_an_output_stands_between_then_another_message(memory):
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "3"}
    items = [USER, call, output, {**call, "call_id": "d"}, USER, {**call, "call_id": "e"}]
    messages = ResponseExchange({"model": "m", "input": items}, memory).request.messages
    roles = ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in messages] == roles


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_answer_when_it_was_cut_behind_a_call_then_it_is_not_told_as_whole(memory, name):
    cut_short = answer("3", "I add.", reason="length", tool_calls=CALLS)
    bodies = {"messages": [USER], "input": "hi", "max_tokens": 9}
    make, fields = {
        "chat": (ChatExchange, ["messages"]),
        "responses": (ResponseExchange, ["input"]),
        "messages": (MessageExchange, ["messages", "max_tokens"]),
    }[name]
    made = make({"model": "m", **{key: bodies[key] for key in fields}}, memory).body([cut_short])
    told = {
        "chat": lambda: made["choices"][0]["finish_reason"] == "length",
        "responses": lambda: (
            (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        ),
        "messages": lambda: made["stop_reason"] == "max_tokens",
    }
    assert told[name]() and str(made).count(CALLS[1]["id"]) == 1


def test_messages_when_the_runs_own_text_ended_one_then_it_is_no_sequence_of_the_request(memory):
    body = {"model": "m", "max_tokens": 9, "messages": [USER], "stop_sequences": ["end"]}
    exchange = MessageExchange(body, memory)
    for found, told in (("end", ("stop_sequence", "end")), ("HALT", ("end_turn", None))):
        made = exchange.body([answer("3", "x", sampled="x end HALT", stop_text=found)])
        assert (made["stop_reason"], made["stop_sequence"]) == told


def test_pieces_when_joined_then_the_text_and_all_tokens():
    for text, sampled in (
        ("one two three", None),
        ("one two", "one two STOP"),
        ("", ""),
        ("", "<tool_call>"),
        ("kept", "<think> no </think> kept"),
        ("kept, and more of it", "<think> no </think> kept, and more of it"),
        ("a b " * 500, None),
    ):
        made = answer("a0", text, sampled=sampled)
        for by_token in (True, False):
            found = list(pieces(made, by_token))
            assert "".join(piece for piece, *_ in found) == text
            assert found[0][1] == 0 and found[-1][2] == len(made.token_texts)
            assert all(one[2] == other[1] for one, other in zip(found, found[1:], strict=False))
            assert len(found) <= MOST_PIECES
    assert len(cut("x" * 100_000)) <= MOST_PIECES and "".join(cut("x" * 1001)) == "x" * 1001


def test_errors_when_of_each_protocol_then_in_its_form():
    error = GatewayError(400, "context_length_exceeded", "too long", param="messages")
    assert openai_messages.error_body(error) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert anthropic.error_body(GatewayError(413, "request_too_large", "big")) == {
        "type": "error",
        "error": {"type": "request_too_large", "message": "big"},
        "request_id": None,
    }

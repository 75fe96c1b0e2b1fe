"""OpenAI's own client, unmodified, asks the gateway."""

import pytest

from tests.rollout.gateway.agents_environment import all_cases
from tests.rollout.gateway.scripted_session import ARGUMENTS, CALLS, END

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
ASSISTANT = {"role": "assistant", "content": "I add.", "tool_calls": CALLS}
RESULTS = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in CALLS]


@pytest.fixture(scope="module")
def asked():
    return all_cases("openai_client.py")


@pytest.fixture
def printed(asked):
    return asked[0]


def requests(asked, *contents):
    """Those whose last messages are these."""
    count = len(contents)
    return [
        one
        for one in asked[1].requests
        if hasattr(one, "messages")
        and tuple(message["content"] for message in one.messages[-count:]) == contents
    ]


def test_chat_when_asked_then_the_session_gets_messages_of_text(asked, printed):
    (request,) = requests(asked, "two\nparts")
    assert request.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "two\nparts"},
    ]
    assert (request.max_tokens, request.stop, request.n, request.tools) == (7, ("HALT",), 1, None)
    made = printed["plain"]
    assert made["choices"][0]["message"]["content"] == "echo: two\nparts"
    assert made["choices"][0]["finish_reason"] == "stop"
    assert made["id"].startswith("chatcmpl-") and made["model"] == "gpt-any"
    assert made["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert (made["usage"]["completion_tokens"], made["usage"]["total_tokens"]) == (4, 16)


def test_chat_when_it_asks_for_another_policy_then_the_header_says_so(asked, printed):
    assert printed["header"] == "temperature,seed"
    assert printed["no_header"] is None
    assert requests(asked, "hi")[0].overridden == ("temperature", "seed")


def test_chat_when_two_answers_with_logprobs_then_each_token_has_its_own(printed):
    tokens = [["echo:", 0.0, list(b"echo:")], [" hi", -0.25, list(b" hi")], [END, -0.5, list(END.encode())]]
    assert printed["two_with_logprobs"] == [[0, "echo: hi", tokens], [1, "echo: hi", tokens], 6]


def test_chat_when_streamed_then_in_pieces_and_with_logprobs_token_by_token(printed):
    deltas = [chunk["choices"][0]["delta"] for chunk in printed["streamed"]]
    assert deltas[0]["role"] == "assistant"
    assert [delta.get("content") for delta in deltas] == ["", "echo", ": hi", " all", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in printed["streamed"]] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in printed["streamed"])
    assert printed["streamed_two"] == [["echo: hi"] * 2, 18, True]
    assert printed["streamed_logprobs"] == ["echo:", " hi", " all", END]


def test_chat_when_tools_are_called_then_their_results_go_on_from_the_same_message(asked, printed):
    reason, message, second = printed["tools"]
    assert reason == "tool_calls" and message["tool_calls"] == CALLS and second == "echo: 3"
    (request,) = [one for one in requests(asked, "call", "I add.", "3", "3") if len(one.messages) == 4]
    assert request.messages == [{"role": "user", "content": "call"}, ASSISTANT, *RESULTS]
    assert request.tools == TOOLS and request.parses_tools
    seconds = ["echo: helped"] * 3
    assert printed["tools_helper"] == ["tool_calls", "I add.", [ARGUMENTS, "{}"], seconds]
    helped = requests(asked, "call", "I add.", "helped")
    assert [one.messages[1] for one in helped] == [ASSISTANT] * 3
    assert printed["calls_alone"] == [None, 2]


def test_chat_when_tools_are_not_to_be_called_then_all_is_content(printed):
    assert printed["no_tools"] == ["stop", "echo: call"]


def test_chat_when_thoughts_are_apart_then_beside_the_content(asked, printed):
    assert printed["thoughts"] == ["So 4.", "Hm."]
    assert requests(asked, "think")[0].template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert printed["cut"] == "length"


def test_completions_when_asked_then_texts_with_logprobs(asked, printed):
    made = printed["completion"]
    assert [choice["text"] for choice in made["choices"]] == ["echo: once upon"] * 2
    assert made["choices"][0]["logprobs"] == {
        "tokens": ["echo:", " once", " upon", END],
        "token_logprobs": [0.0, -0.25, -0.5, -0.75],
        "top_logprobs": None,
        "text_offset": [0, 5, 10, 15],
    }
    texts = [one for one in asked[1].requests if hasattr(one, "prompt")]
    assert [(one.prompt, one.max_tokens, one.n, one.stop) for one in texts] == [
        ("once upon", 16, 2, ("HALT",)),
        ([5, 6, 7], 3, 1, ()),
        ("cut", 16, 1, ()),
    ]
    assert printed["completion_streamed"] == ["one two", "length", ["one", " two"]]


def test_responses_when_asked_then_an_item_with_the_text(asked, printed):
    text, made, kept = printed["response"]
    assert text == "echo: hi" and kept
    assert made["status"] == "completed" and made["temperature"] == 0.8
    assert [token["token"] for token in made["output"][0]["content"][0]["logprobs"]] == ["echo:", " hi", END]
    assert made["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert requests(asked, "Be short.", "hi")[0].max_tokens == 9
    assert printed["response_cut"] == ["incomplete", "max_output_tokens", "response.incomplete"]


def test_responses_when_followed_then_by_id_and_by_items_the_same_messages(asked, printed):
    assert printed["response_followed"] == ["echo: 3", "echo: 3", True]
    by_id, by_items = requests(asked, "second", "call", "I add.", "3", "3")
    system = [{"role": "system", "content": "second"}, {"role": "user", "content": "call"}]
    assert by_id.messages == by_items.messages == [*system, ASSISTANT, *RESULTS]
    assert by_id.tools == TOOLS


def test_calls_when_they_are_forced_then_the_policy_decides_and_the_header_says_so(printed):
    headers, chats, responses = printed["forced"]
    assert headers == ["tool_choice"] * 4 + [None]
    assert chats == [2, 2] and responses == [["auto", 3], ["auto", 3], ["none", 1]]


def test_responses_when_thoughts_are_sent_back_then_they_belong_to_the_message(asked, printed):
    assert printed["response_thoughts"] == [["reasoning", "message"], "echo: go on"]
    (request,) = requests(asked, "think", "So 4.", "go on")
    assert request.messages[1] == {"role": "assistant", "content": "So 4.", "reasoning_content": "Hm."}


def test_responses_when_streamed_then_each_item_is_added_and_done(printed):
    kinds, text, items, arguments = printed["response_streamed"]
    assert (text, items, arguments) == ("I add.", ["message", "function_call", "function_call"], "{}")
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    events = printed["response_raw_events"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."


REFUSED = {
    "unknown": ("unknown_parameter", "best"),
    "choice": ("unsupported_parameter", "tool_choice"),
    "allowed": ("unsupported_parameter", "tool_choice"),
    "json": ("unsupported_parameter", "response_format"),
    "image": ("unsupported_parameter", "messages[0].content[0].type"),
    "top_logprobs": ("unsupported_parameter", "top_logprobs"),
    "both": ("invalid_value", "max_tokens"),
    "n": ("integer_below_min_value", "n"),
    "type": ("invalid_type", "n"),
    "parallel": ("unsupported_parameter", "parallel_tool_calls"),
    "role": ("invalid_value", "messages[0].role"),
    "empty": ("invalid_value", "messages"),
    "context": ("context_length_exceeded", "messages"),
    "context_streamed": ("context_length_exceeded", "messages"),
    "echo": ("unsupported_parameter", "echo"),
    "suffix": ("unsupported_parameter", "suffix"),
    "best_of": ("unsupported_parameter", "best_of"),
    "prompts": ("unsupported_parameter", "prompt"),
    "previous": ("previous_response_not_found", "previous_response_id"),
    "schema": ("unsupported_parameter", "text.format"),
    "search": ("unsupported_parameter", "tools[0].type"),
    "background": ("unsupported_parameter", "background"),
}


def test_requests_when_refused_then_the_client_raises_by_field(printed):
    found = dict(printed["refusals"])
    others = {
        "late": ("APIError", "context_length_exceeded"),
        "late_response": ("APIError", "context_length_exceeded"),
        "key": ("AuthenticationError", "invalid_api_key"),
        "path": ("NotFoundError", "unknown_url"),
        "fault": ("InternalServerError", "server_error"),
    }
    assert {name: (found[name]["name"], found.pop(name)["code"]) for name in others} == others
    assert {name: (one["code"], one["param"]) for name, one in found.items()} == REFUSED
    assert {(one["name"], one["status"]) for one in found.values()} == {("BadRequestError", 400)}


def test_requests_when_the_run_failed_then_the_client_does_not_ask_again(asked):
    assert len(requests(asked, "fail")) == 1
    assert len(requests(asked, "long")) == 2  # plain and streamed


def test_streams_when_the_policy_is_slow_then_they_are_kept_alive(printed):
    assert printed["kept_alive"] == ["echo: slow", "echo: slow"]


def test_clients_when_many_ask_at_once_then_each_has_its_answer(asked, printed):
    assert printed["at_once"] == [f"echo: number {index}" for index in range(64)]
    assert printed["models"] == ["policy", "any/other"]


def test_clients_when_they_wait_no_longer_then_only_their_own_answers_are_undelivered(asked, printed):
    assert printed["gone"] == ["APITimeoutError"] * 2 and printed["cancelled"] is True
    assert asked[1].cancelled == 5  # two of each that was repeated, and one that was cancelled
    assert len(asked[1].gone) == 1  # the stream that was left

"""Anthropic's own client, unmodified, asks the gateway."""

import json

import pytest

from tests.rollout.gateway.agents_environment import all_cases
from tests.rollout.gateway.scripted_session import ARGUMENTS, CALLS


@pytest.fixture(scope="module")
def asked():
    return all_cases("anthropic_client.py", root=True)


@pytest.fixture
def printed(asked):
    return asked[0]


def request_after(asked, *contents):
    (found,) = [
        one for one in asked[1].requests if tuple(message["content"] for message in one.messages) == contents
    ]
    return found


def test_messages_when_asked_then_the_session_gets_messages_of_text(asked, printed):
    request = request_after(asked, "Be short.", "two\nparts")
    assert [message["role"] for message in request.messages] == ["system", "user"]
    assert (request.max_tokens, request.stop, request.tools) == (9, ("HALT",), None)
    made = printed["plain"]
    assert made["content"] == [{"type": "text", "text": "echo: two\nparts", "citations": None}]
    assert made["model"] == "claude-any" and made["stop_reason"] == "end_turn"
    usage = {"input_tokens": 7, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 0}
    assert made["usage"] == usage | {"output_tokens": 4}
    assert printed["header"] == "temperature,top_k"


def test_messages_when_streamed_then_in_the_order_of_the_official_server(printed):
    events = printed["streamed"]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["delta"]["text"] for event in events[2:5]] == ["echo", ": hi", " all"]
    assert events[-2]["usage"]["output_tokens"] == 4
    text, final = printed["streamed_helper"]
    assert text == "I add." and final["stop_reason"] == "tool_use"
    assert final["content"][1]["input"] == json.loads(ARGUMENTS)


def test_messages_when_tools_are_called_then_arguments_come_back_as_they_were_sampled(asked, printed):
    reason, blocks, second = printed["tools"]
    assert reason == "tool_use" and second == "echo: go on"
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    request = request_after(asked, "call", "I add.", "3", "3", "go on")
    assert request.messages[1] == {"role": "assistant", "content": "I add.", "tool_calls": CALLS}
    results = [{"role": "tool", "content": "3", "tool_call_id": call["id"]} for call in CALLS]
    assert request.messages[2:] == [*results, {"role": "user", "content": "go on"}]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert request.tools == [{"type": "function", "function": function}]


def test_runner_when_it_asks_for_a_thread_then_it_goes_on_with_all_messages(asked, printed):
    assert printed["runner"] == ["echo: added", 2]
    last = next(
        one for one in asked[1].requests if "calls once" in str(one.messages) and len(one.messages) > 1
    )
    assert [one["role"] for one in last.messages] == ["user", "assistant", "tool", "tool"]


def test_calls_when_they_are_forced_then_the_policy_decides_and_the_header_says_so(printed):
    assert printed["forced"] == [["tool_choice", "tool_use"]] * 2


def test_messages_when_thoughts_are_apart_then_they_are_a_block(asked, printed):
    assert printed["thoughts"] == [["thinking", "text"], "echo: go on", True]
    request = request_after(asked, "think", "So 4.", "go on")
    assert request.messages[1]["reasoning_content"] == "Hm."
    assert {"enable_thinking": True} in [one.template_kwargs for one in asked[1].requests]


def test_messages_when_they_end_then_in_the_protocols_words(printed):
    assert printed["ends"] == [
        ["end_turn", None],
        ["max_tokens", None],
        ["stop_sequence", "HALT"],
        ["tool_use", None],
    ]


def test_requests_when_refused_then_the_client_raises_its_error(asked, printed):
    found = {name: (one["name"], one["status"], one["type"]) for name, one in printed["refusals"].items()}
    assert found.pop("late") == ("APIStatusError", 200, "invalid_request_error")
    assert found.pop("key") == ("AuthenticationError", 401, "authentication_error")
    assert found.pop("fault") == ("InternalServerError", 500, "api_error")
    assert found.pop("path") == ("NotFoundError", 404, "not_found_error")
    assert set(found.values()) == {("BadRequestError", 400, "invalid_request_error")}
    assert sorted(found) == ["bash", "begun", "choice", "context", "image", "serial", "unknown"]
    named = {
        "choice": "tool_choice",
        "serial": "disable_parallel_tool_use",
        "image": "content[0]",
        "begun": "messages[1]",
        "bash": "tools[0]",
        "unknown": "best",
    }
    for name, field in named.items():
        assert field in printed["refusals"][name]["text"]
    assert sum(one.messages[-1]["content"] == "fail" for one in asked[1].requests) == 1


def test_models_when_listed_or_asked_for_then_as_anthropic_has_them(printed):
    assert printed["models"] == [[name, "model", name, 1970] for name in ("policy", "any-other")]


def test_tokens_when_counted_then_nothing_is_asked_of_the_policy(asked, printed):
    assert printed["counted"] == [len("Be short.hi")] * 2


def test_clients_when_many_ask_at_once_then_each_has_its_answer(asked, printed):
    assert printed["at_once"] == [f"echo: number {index}" for index in range(64)]
    assert printed["kept_alive"] == "echo: slow"


def test_clients_when_they_wait_no_longer_then_only_their_own_answers_are_undelivered(asked, printed):
    assert printed["gone"] == "APITimeoutError"
    assert asked[1].cancelled == 1 and len(asked[1].gone) == 1

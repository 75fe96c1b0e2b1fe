"""Bodies that are wrong at one place or at several: each is answered, or refused by name, and the episode
goes on as if they had not been.
"""

import asyncio
import copy
import json
import random

import aiohttp
import pytest

from megatron_rl_corr.rollout.gateway.server import Gateway
from tests.rollout.gateway.agents_model import Servers, episode
from tests.rollout.gateway.scripted_session import SAMPLING

DEEP = "[" * 1000 + "]" * 1000
"""Nested so deeply that Python can't walk through it."""
NESTED = DEEP[520:1480]
"""As deeply as is taken."""
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    3,
    2**70,
    0.5,
    1e300,
    "",
    "x",
    "\ud800",
    "<|im_end|>",
    "\U000f0000",
    [],
    [[]],
    ["x"],
    [None],
    [3],
    [{}],
    [{"type": ["x"]}],
    {},
    {"type": "x"},
    {"type": ["x"]},
    {"type": {}},
    {"role": [], "content": {}},
    DEEP,
    NESTED,
    f'{{"a": {DEEP}}}',
    f'{{"a": {NESTED}}}',
]
FUNCTION = {
    "name": "look",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "enum": ["b"]}}},
    "strict": True,
}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [CALL],
            "reasoning_content": "Hm.",
            "refusal": None,
        },
        {"role": "tool", "content": "wet", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_tokens": 5,
    "stop": ["!!"],
    "n": 1,
    "stream": False,
    "logprobs": True,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "chat_template_kwargs": {"enable_thinking": True},
    "temperature": 1.0,
    "logit_bias": {"3": 1},
    "metadata": {},
}
TEXT = {
    "model": "m",
    "prompt": [3, 4],
    "max_tokens": 3,
    "stop": "!!",
    "n": 1,
    "best_of": 1,
    "stream": False,
    "logprobs": 0,
    "echo": False,
    "suffix": "",
    "seed": 3,
}
RESPONSES = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "wet"},
    ],
    "instructions": "s",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_output_tokens": 5,
    "stream": False,
    "store": True,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 0,
    "text": {"format": {"type": "text"}},
    "reasoning": {"summary": "auto"},
    "truncation": "disabled",
    "background": False,
    "metadata": {"a": "b"},
}
MESSAGES = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "wet"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "system": [{"type": "text", "text": "s"}],
    "max_tokens": 5,
    "stop_sequences": ["!!"],
    "stream": False,
    "tools": [
        {
            "name": "look",
            "description": "d",
            "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
            "strict": True,
        }
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"format": None},
    "temperature": 0.5,
    "metadata": {"user_id": "u"},
}
BODIES = {"chat/completions": CHAT, "completions": TEXT, "responses": RESPONSES, "messages": MESSAGES}


def places(value, *before):
    """All paths within a JSON value."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, one in children:
        yield (*before, key)
        yield from places(one, *before, key)


def replaced(body, place, value):
    made = copy.deepcopy(body)
    at = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return made


def cases(path, pick):
    """Wrong at each place in each way; without each place; and at several places at random."""
    body = BODIES[path]
    for place in places(body):
        for value in VALUES:
            yield replaced(body, place, value)
        shorter = copy.deepcopy(body)
        at = shorter
        for key in place[:-1]:
            at = at[key]
        del at[place[-1]]
        yield shorter
        if isinstance(place[-1], str):
            yield replaced(body, (*place[:-1], "more"), pick.choice(VALUES))
    for _ in range(300):
        made = body
        for _ in range(pick.choice([2, 3])):
            made = replaced(made, pick.choice(list(places(made))), pick.choice(VALUES))
        yield made


def as_text(body):
    """JSON, in which DEEP and NESTED are no texts but arrays."""
    return json.dumps(body).replace(json.dumps(DEEP), DEEP).replace(json.dumps(NESTED), NESTED)


def problem(path, body, status, answered):
    """What is wrong with an answer, "" for nothing."""
    if status == 200:
        return ""
    if status not in (400, 404):
        return f"status {status}"
    error = json.loads(answered)["error"]
    if path == "messages":
        form = error["type"] in ("invalid_request_error", "not_found_error") and error["message"]
        names = [name for name in [*body, *MESSAGES] if name in error["message"]]
    else:
        form = error["message"] and error["code"]
        names = [name for name in [*body, *BODIES[path]] if str(error["param"] or "").startswith(name)]
    is_json = error.get("code") == "invalid_json" or "JSON" in error["message"]
    return "" if form and (names or is_json) else f"no field is named: {answered}"


@pytest.mark.parametrize("path", BODIES)
def test_bodies_when_malformed_then_refused_by_name_and_the_episode_is_as_before(path):
    pick = random.Random(path)
    bodies = list(cases(path, pick))

    async def run():
        servers = Servers(draws=lambda *_: ("ok<|im_end|>", "stop"))
        made = episode(servers, "qwen3", max_turns=10**9)
        found, statuses = [], []
        async with Gateway(SAMPLING) as gateway, aiohttp.ClientSession() as http:
            key = gateway.open_episode(made)

            async def post(body, to=path):
                headers = {"x-api-key": key, "Content-Type": "application/json"}
                url = f"{gateway.base_url}/{to}"
                async with http.post(url, data=as_text(body).encode(), headers=headers) as answer:
                    return answer.status, await answer.text()

            assert (await post(BODIES[path]))[0] == 200
            for body in bodies:
                status, answered = await post(body)
                statuses.append(status)
                if wrong := problem(path, body, status, answered):
                    found.append((wrong, as_text(body)[:2000]))
            assert found == [], f"{len(found)} of {len(bodies)}: {sorted(set(found))[:5]}"
            history = [{"role": "user", "content": "and now?"}]
            for _ in range(2):
                status, answered = await post({"model": "m", "messages": history}, to="chat/completions")
                assert status == 200
                history += [json.loads(answered)["choices"][0]["message"], history[0]]
            gateway.close_episode(key)
        branches = await made.finish()
        assert made.tree.check(branches) == []
        assert branches[-1].turn_ids.max() == 1  # the last two requests are one conversation
        assert 0.2 < statuses.count(400) / len(statuses) < 0.95

    asyncio.run(run())

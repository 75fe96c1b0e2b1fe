"""Which tokens each message of a conversation has, by hand and for the templates of real models."""

import asyncio

import pytest
import torch

from megatron_rl_corr.rollout.gateway.types import ChatRequest, TextRequest
from tests.rollout.gateway.agents_model import ENDS, SIMPLE, Servers, episode, ids_of, text_of

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}},
    }
]
SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "how wet is Oslo?"}
RESULT = "very wet: 35"


def played(template, end, requests):
    """The branches of an episode whose answers are a call, one that is cut, and one that ends."""
    call = '<tool_call>{"name": "look", "arguments": {"q": "x"}}</tool_call>'
    servers = Servers((call + end, "stop"), ("cut", "length"), ("fine" + end, "stop"))
    made = episode(servers, template)

    async def all_of_them():
        answers = []
        for request in requests:
            request = request(answers)
            ask = made.text if isinstance(request, TextRequest) else made.chat
            answers += await ask(request)
        return await made.finish()

    return asyncio.run(asyncio.wait_for(all_of_them(), 20))


def texts_of(branch):
    """(role, how it ended, its text) of each message."""
    ids = torch.cat([branch.prompt_ids, branch.output_ids])
    ends = [*(one.start for one in branch.messages[1:]), len(ids)]
    return [
        (one.role, one.ended, text_of(ids[one.start : end]))
        for one, end in zip(branch.messages, ends, strict=True)
    ]


def conversation(*behind):
    """The first request, the call's result, and the same with another question."""

    def result(answers):
        call = {"role": "assistant", "content": answers[0].text, "tool_calls": answers[0].tool_calls}
        tool = {"role": "tool", "content": RESULT, "name": "look"}
        return [call, tool | {"tool_call_id": answers[0].tool_calls[0]["id"]}]

    edited = {"role": "user", "content": "how wet is it?"}
    return [
        lambda _: ChatRequest([SYSTEM, USER], TOOLS),
        lambda answers: ChatRequest([SYSTEM, USER, *result(answers)], TOOLS),
        lambda answers: ChatRequest([SYSTEM, edited, *result(answers)], TOOLS),
    ]


def test_messages_when_an_episode_forks_then_each_has_its_tokens_and_the_fork_its_reason():
    first, second = played(SIMPLE, "<|end|>", conversation())
    assert (first.began, second.began) == ("first", "edited")
    call = '<tool_call>{"name": "look", "arguments": {"q": "x"}}</tool_call>'
    assert texts_of(first) == [
        ("system", "", "look<|system|>be brief<|end|>\n"),
        ("user", "", "<|user|>how wet is Oslo?<|end|>\n"),
        ("assistant", "stop", f"<|assistant|>{call}<|end|>"),
        ("tool", "", f"\n<|tool|>{RESULT}<|end|>\n"),
        ("assistant", "length", "<|assistant|>cut"),
    ]
    assert texts_of(second)[1:] == [
        ("user", "", "<|user|>how wet is it?<|end|>\n"),
        ("assistant", "", '<|assistant|><tool_call>look{"q": "x"}</tool_call><|end|>\n'),
        ("tool", "", f"<|tool|>{RESULT}<|end|>\n"),
        ("assistant", "stop", "<|assistant|>fine<|end|>"),
    ]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "glm_4_5", "kimi", "gpt_oss", "llama_3_1"])
def test_messages_when_real_templates_write_them_then_each_content_is_in_its_own(template):
    first, second = played(template, ENDS[template], conversation())
    contents = ["be brief", "how wet is Oslo?", "", RESULT, "cut"]
    assert [role for role, _, _ in texts_of(first)] == ["system", "user", "assistant", "tool", "assistant"]
    for place, (_, _, text) in enumerate(texts_of(first)):
        others = [one for at, one in enumerate(contents) if one and at != place]
        assert contents[place] in text and not any(one in text for one in others), (place, text)
    found = dict(zip(("system", "user", "call", "tool", "end"), texts_of(second), strict=True))
    assert RESULT in found["tool"][2] and "how wet is it?" in found["user"][2]


def test_messages_when_a_head_has_two_control_tokens_then_it_begins_with_the_first():
    first, _ = played("llama_3_1", "<|eot_id|>", conversation())
    _, (_, _, user), (_, _, call), *_ = texts_of(first)
    head = "<|start_header_id|>{}<|end_header_id|>"
    assert user.startswith(head.format("user")) and user.endswith("how wet is Oslo?<|eot_id|>")
    assert call.startswith(head.format("assistant"))


def test_messages_when_a_turn_is_gone_on_from_twice_then_the_second_branch_says_again():
    more = {"role": "user", "content": "more"}
    first, second = played(
        SIMPLE,
        "<|end|>",
        [
            lambda _: ChatRequest([USER]),
            lambda answers: ChatRequest([USER, {"role": "assistant", "content": answers[0].text}, more]),
            lambda answers: ChatRequest([USER, {"role": "assistant", "content": answers[0].text}, USER]),
        ],
    )
    # The first one is cut, so the second one goes on with the branch.
    assert sorted((one.began, one.messages[-1].ended) for one in (first, second)) == [
        ("earlier", "length"),
        ("first", "stop"),
    ]
    assert [role for role, _, _ in texts_of(second)] == ["user", "assistant", "user", "assistant"]


def test_messages_when_a_prompt_is_raw_then_it_is_a_text():
    (branch, *_) = played(SIMPLE, "<|end|>", [lambda _: TextRequest("wet and <|user|> so")])
    assert texts_of(branch)[0] == ("text", "", "wet and <|user|> so")
    assert branch.messages[1].start == len(ids_of("wet and <|user|> so"))

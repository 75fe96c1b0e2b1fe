"""A session whose answers follow from the last message of a request, in the place of an episode of a run."""

import asyncio
import itertools
import re

import torch

from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, GatewayError

SAMPLING = SamplingParams(max_new_tokens=64, temperature=0.8)
END = "<|im_end|>"
ARGUMENTS = '{"a":1, "b": [2, "\u4e2d"]}'
CALLS = [
    {"id": f"call_{index}", "type": "function", "function": {"name": "add", "arguments": arguments}}
    for index, arguments in enumerate((ARGUMENTS, "{}"))
]


def answer(label, text, *, sampled=None, reason="stop", **fields):
    """An Answer; each word with the space before it is a token."""
    texts = re.findall(r"\s*\S+|\s+$", text if sampled is None else sampled) + [END] * (reason != "length")
    return Answer(
        id=label,
        text=text,
        finish_reason=reason,
        prompt_tokens=12,
        cached_tokens=5,
        output_ids=torch.arange(len(texts)),
        spelled=lambda: texts,
        logprobs=-torch.arange(len(texts), dtype=torch.float32) / 4,
        **fields,
    )


class ScriptedSession:
    """Answers by the first word of the last message; what it does not know is echoed.

    Attributes:
        requests: all that were asked.
        gone: ids of undelivered answers.
        cancelled: calls that were.
        asked: set at each request.
        release: a request "wait" waits for it.
    """

    variables = ("enable_thinking", "reasoning_effort")

    def __init__(self):
        self.requests, self.gone, self.cancelled = [], [], 0
        self.asked, self.release = asyncio.Event(), asyncio.Event()
        self._labels = itertools.count()

    async def chat(self, request):
        return await self._answers(request, request.messages[-1]["content"])

    async def text(self, request):
        return await self._answers(request, request.prompt if isinstance(request.prompt, str) else "ids")

    async def count(self, request):
        return sum(len(one["content"]) for one in request.messages)

    def undelivered(self, answers):
        self.gone += [one.id for one in answers]

    async def _answers(self, request, text):
        self.requests.append(request)
        self.asked.set()
        word = text.split()[0] if text.split() else ""
        if word == "wait":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if word == "slow":
            await asyncio.sleep(0.4)
        if word == "long":
            raise GatewayError(
                400,
                "context_length_exceeded",
                "This model's maximum context length is 12 tokens.",
                param="messages",
            )
        if word == "again" and len(self.requests) % 2:
            raise GatewayError(503, "server_error", "ask again")
        if word == "late":
            await asyncio.sleep(0.4)
            raise GatewayError(400, "context_length_exceeded", "too late")
        if word == "fail":
            raise RuntimeError("no server is left")
        return [self._answer(request, word, text) for _ in range(request.n)]

    def _answer(self, request, word, text):
        label = f"a{next(self._labels)}"
        if word == "call" and isinstance(request, ChatRequest) and request.parses_tools:
            sampled = "I add. <tool_call> add </tool_call>"
            return answer(label, "I add.", sampled=sampled, reason="tool_calls", tool_calls=CALLS)
        if word == "calls":
            return answer(
                label, "", sampled="<tool_call> </tool_call>", reason="tool_calls", tool_calls=CALLS
            )
        if word == "think":
            return answer(label, "So 4.", sampled="<think> Hm. </think> So 4.", reasoning="Hm.")
        if word == "cut":
            return answer(label, "one two", reason="length")
        if word == "stop":
            return answer(label, "one", sampled="one HALT", stop_text="HALT")
        if word == "some":
            return answer(label, "word " * 8_000, sampled="less than a kernel buffers by default")
        if word == "big":
            return answer(label, "word " * 4_000_000, sampled="more than a kernel buffers")
        return answer(label, f"echo: {text}")

"""Pauses and updates while a request runs: judges pause modes, version spans and the cache after an update.

R response tokens.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance, switch_position
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import Answer, Probe, Scores
from megatron_rl_corr.doctor.uninterrupted import uninterrupted
from megatron_rl_corr.doctor.weights import FINAL_NORM, FIRST_NORM, ServerWeights
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.sglang.requests import Request

SETTLE_S = 0.4
"""Time in which a server that is not paused would answer a request of one token."""
ANSWER_S = 20.0
"""Time in which a paused server must have sent back what it aborted."""
COMPANION_TOKENS = 16
VERSION = "doctor"
MARGIN, MARGIN_HALF = FLOAT32_MAX, 0.1
"""Nats by which the reported switch must fit worse than the best one before it is called wrong."""


class Running:
    """A request that samples until it is stopped."""

    def __init__(self, probe: Probe, tokens: int):
        self.rid, self._probe = f"doctor-{uuid.uuid4().hex}", probe
        self.task = asyncio.create_task(probe.generate(probe.fresh_prompt(), tokens, rid=self.rid))
        self.new: asyncio.Task | None = None

    async def ask_new(self) -> bool:
        """Whether a new request of one token is answered within SETTLE_S."""
        self.new = asyncio.create_task(self._probe.generate(self._probe.fresh_prompt(), 1))
        await asyncio.wait([self.new], timeout=SETTLE_S)
        return self.new.done()

    async def sample_on(self) -> None:
        """Returns when it has sampled for some more tokens: as long as a short request beside it takes."""
        await self._probe.generate(self._probe.fresh_prompt(), COMPANION_TOKENS)

    async def stop(self) -> Answer:
        """What it has sampled so far."""
        if not self.task.done():
            await self._probe.control(Request("POST", "/abort_request", {"rid": self.rid}))
        return await self.task

    async def end(self) -> None:
        """Let the server sample on, and leave nothing running."""
        try:
            await self._probe.control(requests.continue_generation())
            await self._probe.control(Request("POST", "/abort_request", {"rid": self.rid}))
        finally:
            tasks = [task for task in (self.task, self.new) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@asynccontextmanager
async def running(probe: Probe, tokens: int) -> AsyncIterator[Running]:
    """A request in the middle of its tokens. At the end the server samples on and the request is gone."""
    request = Running(probe, tokens)
    try:
        await request.sample_on()
        yield request
    finally:
        await uninterrupted(request.end())


async def ask_pause(probe: Probe, mode: str, tokens: int, half: bool) -> Row:
    """Whether a running request does what the mode says, new ones wait, and the log-probs stay the model's."""
    check = f"pause {mode}"
    async with running(probe, tokens) as request:
        if request.task.done():
            return _too_short(check, tokens)
        try:
            await probe.control(requests.pause_generation(mode))
        except RolloutServerError as error:
            if error.status is None:
                raise
            return found(check, "pause_mode_broken", f"refused: {error.detail}", status=error.status)
        sampled = await request.ask_new()
        if mode == "abort":
            await asyncio.wait([request.task], timeout=ANSWER_S)
        ended = request.task.done()
        await probe.control(requests.continue_generation())
        await request.new
        if not ended:
            await request.sample_on()
        answer = await request.stop()
    retractions = answer.meta.get("num_retractions", 0)
    did = f"the running request {'ended' if ended else 'waited and went on'} ({retractions} retractions)"
    if sampled or ended != (mode == "abort") or not answer.output or (mode == "retract" and not retractions):
        said = f"{did}, a new one {'was answered during the pause' if sampled else 'waited'}"
        return found(check, "pause_mode_broken", said, tokens=len(answer.output))
    far = distance(answer.logprobs, (await probe.score(answer.prompt, answer.output)).logprobs)
    if not far.is_rounding(half):
        return found(check, "pause_mode_broken", f"{did}, its log-probs are not the model's: {far}", **far.numbers())
    return Row(check, "ok", f"{did}; {far}", far.numbers())


async def ask_spans(probe: Probe, weights: ServerWeights, mode: str, tokens: int, half: bool) -> Row:
    """Whether the spans of an answer that saw an update tell which token was sampled with which weights.

    The update scales the final norm, so the keys and values of either side are the same, and a prefill under
    each of the weights tells the log-probs that each token would have had with them.
    """
    check = f"version spans, {mode}"
    async with running(probe, tokens) as request:
        if request.task.done():
            return _too_short(check, tokens)
        await probe.control(requests.pause_generation(mode))
        # Nothing is flushed while a request waits on its keys and values.
        async with weights.scaled(FINAL_NORM, 4.0, VERSION, flush=False):
            await probe.control(requests.continue_generation())
            await request.sample_on()
            answer = await request.stop()
            if not answer.output:
                return Row(check, "note", "cannot be told: the running request had no token yet")
            after = await probe.score(answer.prompt, answer.output)
        before = await probe.score(answer.prompt, answer.output)
    return judge_spans(check, answer, before.logprobs, after.logprobs, answer.meta.get("weight_versions"), half)


def judge_spans(
    check: str, answer: Answer, before: np.ndarray, after: np.ndarray, spans: Sequence[Mapping] | None, half: bool
) -> Row:
    """Compares the reported first token of the new weights with the one that the log-probs show.

    before, after [R]: log-probs of the sampled tokens under the old and the new weights.
    """
    true, costs = switch_position(answer.logprobs, before, after)
    numbers = {"tokens": len(answer.output), "true": true, "spans": spans}
    if not 0 < true < len(answer.output):
        return Row(check, "note", f"no switch of weights among the {len(answer.output)} tokens", numbers)
    if spans is None or len(spans) != 2:
        said = f"{0 if spans is None else len(spans)} spans for {len(answer.output)} tokens of two weights"
        return found(check, "version_spans_wrong", said, **numbers)
    reported = int(spans[1]["start"])
    worse = float(costs[reported] - costs[true]) if 0 <= reported < len(costs) else float("inf")
    said = f"reported switch at token {reported}, log-probs switch at {true} of {len(answer.output)}"
    if not worse <= (MARGIN_HALF if half else MARGIN):
        return found(check, "version_spans_wrong", said, reported=reported, worse=worse, **numbers)
    return Row(check, "ok", said, numbers | {"reported": reported})


async def ask_update(probe: Probe, weights: ServerWeights, half: bool) -> Row:
    """Whether an update as a push of ours makes it takes effect, and leaves no prefix of the old weights."""
    prompt, tail = probe.fresh_prompt(), probe.fresh_prompt()[:8]
    await probe.score(prompt, tail)
    before = await probe.score(prompt, tail, cached=True)
    try:
        await probe.control(requests.pause_generation("retract"))
        async with weights.scaled(FIRST_NORM, 4.0, VERSION):
            await probe.control(requests.continue_generation())
            cached = await probe.score(prompt, tail, cached=True)
            fresh = await probe.score(prompt, tail)
    finally:
        await uninterrupted(_resume(probe))
    return judge_update(before, cached, fresh, half)


def judge_update(before: Scores, cached: Scores, fresh: Scores, half: bool) -> Row:
    """before: under the old weights; cached, fresh: under the new ones, on what the cache holds and on nothing."""
    effect, stale = distance(before.logprobs, fresh.logprobs), distance(cached.logprobs, fresh.logprobs)
    numbers = {"effect": effect.numbers(), "stale": stale.numbers(), "cached_tokens": cached.cached_tokens}
    if effect.is_rounding(half):
        return found("update", "update_without_effect", f"log-probs moved by {effect}", **numbers)
    if not stale.is_rounding(half):
        said = f"after update and flush {cached.cached_tokens} old tokens are still used: {stale}"
        return found("update", "stale_prefix_cache", said, **numbers)
    said = f"log-probs moved by {effect.mean:.2f} nats in the mean; {cached.cached_tokens} tokens were cached after it"
    return Row("update", "ok", said, numbers)


async def _resume(probe: Probe) -> None:
    await probe.control(requests.continue_generation())


def _too_short(check: str, tokens: int) -> Row:
    return Row(check, "note", f"cannot be told: {tokens} tokens were sampled before the pause")

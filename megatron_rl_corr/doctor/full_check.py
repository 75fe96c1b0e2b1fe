"""`doctor --full`: pauses a server, changes its weights for a moment and puts everything back.

Judges pause modes, version spans, and the cache after an update. R response tokens.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance, switch_position
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import PROMPT_TOKENS, Probe, known, unsupported
from megatron_rl_corr.doctor.questions import Facts
from megatron_rl_corr.doctor.weight_change import (
    FINAL_NORM,
    FIRST_NORM,
    TemporaryWeights,
    read_tensors,
    uninterrupted,
)
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores
from megatron_rl_corr.engines.types import UnsupportedByEngine

PAUSE_MODES = ("abort", "in_place", "retract")
MOST_TOKENS = 2000
SETTLE_S = 0.4
"""Seconds in which a server that is not paused answers a request of one token."""
ANSWER_S = 20.0
"""Seconds in which a server must return the requests that a pause aborts."""
COMPANION_TOKENS = 16
VERSION = "doctor"
MARGIN, MARGIN_HALF = FLOAT32_MAX, 0.1
"""Nats by which the reported switch may fit worse than the best one."""


async def ask_full(
    probe: Probe, facts: Facts, directory: str | None, say: Callable[[str], None], rows: list[Row]
) -> None:
    """Check pause modes; then version spans, cache and restoration around weight updates.

    What the engine does not support ends the check with a failed row.

    Args:
        probe: of the server.
        facts: from `ask_quick`.
        directory: Hugging Face folder with the weights that the server was started with; None: its own.
        say: called with the next question.
        rows: each result is appended as soon as it is known.

    Raises:
        RolloutError: the server could not be asked, or not be restored.
    """
    try:
        tokens = await _room(probe)
        await _ask_pauses(probe, tokens, known(facts.half), say, rows)
        await _ask_updates(probe, facts, directory, tokens, say, rows)
    except UnsupportedByEngine as error:
        rows.append(unsupported("pauses and updates", error))


async def _ask_pauses(probe: Probe, tokens: int, half: bool, say: Callable[[str], None], rows: list[Row]) -> None:
    for mode in PAUSE_MODES:
        if mode not in probe.engine.limits.pause_modes:
            rows.append(Row(f"pause {mode}", "note", f"not supported by {probe.engine.name}"))
            continue
        say(f"pausing ({mode})")
        rows.append(await ask_pause(probe, mode, tokens, half))


async def _ask_updates(
    probe: Probe, facts: Facts, directory: str | None, tokens: int, say: Callable[[str], None], rows: list[Row]
) -> None:
    model, half = known(facts.model), known(facts.half)
    weights = await _weights(probe, facts, directory or model.path)
    if isinstance(weights, Row):
        rows.append(weights)
        return
    say("computing the checksum of the weights")
    before = await weights.checksum()
    for mode in PAUSE_MODES:
        if mode == "abort" or mode not in probe.engine.limits.pause_modes:  # an aborted response has no later token
            continue
        say(f"updating weights under a running request ({mode})")
        rows.append(await ask_spans(probe, weights, mode, tokens, half))
    say("updating weights and flushing the cache")
    rows.append(await ask_update(probe, weights, half))
    say("comparing the checksum of the weights")
    rows.append(await _restored(probe, weights, before, model.weight_version))


async def _room(probe: Probe) -> int:
    """The longest response that fits the model's context after a prompt."""
    listed = await probe.control(probe.engine.list_models())
    return min(MOST_TOKENS, probe.engine.context_length(probe.url, listed) - PROMPT_TOKENS - 8)


async def _weights(probe: Probe, facts: Facts, directory: str) -> TemporaryWeights | Row:
    """The weights to change, or a row with the reason why they could not be restored."""
    model = known(facts.model)
    if not model.is_initial:
        version = model.weight_version
        message = f"not asked: weights {version!r} were pushed, and cannot be read back; ask before training"
        return Row("update", "note", message)
    if not Path(directory).is_dir():
        return Row("update", "note", f"not asked: no such folder here: {directory}; give --model HF_DIR")
    try:
        originals = read_tensors(directory, [FINAL_NORM, FIRST_NORM])
    except (ValueError, OSError) as error:
        return Row("update", "note", f"not asked: {error}")
    try:
        ranks = probe.engine.ranks(probe.url, known(facts.info)).tensor
    except RolloutProtocolError as error:  # several replicas behind one address, each with weights of its own
        return Row("update", "note", f"not asked: {error.detail}")
    return TemporaryWeights(probe, originals, ranks=ranks, version=model.weight_version)


async def _restored(probe: Probe, weights: TemporaryWeights, before: list, version: str) -> Row:
    now, named = await weights.checksum(), (await probe.served_model()).weight_version
    changed = [name for old, new in zip(before, now, strict=True) for name in old if old[name] != new.get(name)]
    if changed or named != version:
        message = f"weights {named!r} differ from before in {', '.join(changed) or 'their name'}"
        return found("restored", "state_not_restored", message, changed=changed, version=named)
    return Row("restored", "ok", f"checksums of {sum(map(len, now))} weights and the version {named!r} are as before")


class Running:
    """A request that samples until it is stopped."""

    def __init__(self, probe: Probe, tokens: int):
        self.request_id, self._probe = f"doctor-{uuid.uuid4().hex}", probe
        sample = probe.generate(probe.fresh_prompt(), tokens, request_id=self.request_id)
        self.task = asyncio.create_task(sample)
        self.new: asyncio.Task | None = None

    async def ask_new(self) -> bool:
        """Whether a new request of one token is answered within SETTLE_S."""
        self.new = asyncio.create_task(self._probe.generate(self._probe.fresh_prompt(), 1))
        await asyncio.wait([self.new], timeout=SETTLE_S)
        return self.new.done()

    async def sample_on(self) -> None:
        """Let it sample some more tokens: wait for a short request beside it."""
        await self._probe.generate(self._probe.fresh_prompt(), COMPANION_TOKENS)

    async def stop(self) -> DetailedSample:
        """End it; returns the tokens so far."""
        if not self.task.done():
            await self._probe.control(self._probe.engine.abort_request(self.request_id))
        return await self.task

    async def end(self) -> None:
        """Resume the server and end all requests."""
        try:
            await self._probe.continue_generation()
            await self._probe.control(self._probe.engine.abort_request(self.request_id))
        finally:
            tasks = [task for task in (self.task, self.new) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@asynccontextmanager
async def running(probe: Probe, tokens: int) -> AsyncIterator[Running]:
    """A request in the middle of its tokens. After the block the server samples and the request is gone."""
    request = Running(probe, tokens)
    try:
        await request.sample_on()
        yield request
    finally:
        await uninterrupted(request.end())


async def ask_pause(probe: Probe, mode: str, tokens: int, half: bool) -> Row:
    """Check that a running request does what the mode says, that new ones wait, and that log-probs stay the model's."""
    check = f"pause {mode}"
    async with running(probe, tokens) as request:
        if request.task.done():
            return _too_short(check, tokens)
        try:
            await probe.pause_generation(mode)
        except RolloutServerError as error:
            if error.status is None:
                raise
            return found(check, "pause_mode_broken", f"refused: {error.detail}", status=error.status)
        sampled = await request.ask_new()
        if mode == "abort":
            await asyncio.wait([request.task], timeout=ANSWER_S)
        ended = request.task.done()
        await probe.continue_generation()
        await request.new
        if not ended:
            await request.sample_on()
        answer = await request.stop()
    retractions = answer.retractions
    did = f"the running request {'ended' if ended else 'waited and went on'} ({retractions} retractions)"
    if sampled or ended != (mode == "abort") or not answer.output or (mode == "retract" and not retractions):
        message = f"{did}, a new one {'was answered during the pause' if sampled else 'waited'}"
        return found(check, "pause_mode_broken", message, tokens=len(answer.output))
    far = distance(answer.logprobs, (await probe.score(answer.prompt, answer.output)).logprobs)
    if not far.is_rounding(half):
        return found(check, "pause_mode_broken", f"{did}, its log-probs are not the model's: {far}", **far.numbers())
    return Row(check, "ok", f"{did}; {far}", far.numbers())


async def ask_spans(probe: Probe, weights: TemporaryWeights, mode: str, tokens: int, half: bool) -> Row:
    """Check the version spans of an answer during which the weights changed.

    The update scales the final norm, so keys and values are those of both versions, and a prefill under each version
    gives the log-probs that each token would have had with it.
    """
    check = f"version spans, {mode}"
    async with running(probe, tokens) as request:
        if request.task.done():
            return _too_short(check, tokens)
        await probe.pause_generation(mode)
        # Not flushed: a request waits with its keys and values.
        async with weights.scaled(FINAL_NORM, 4.0, VERSION, flush=False):
            await probe.continue_generation()
            await request.sample_on()
            answer = await request.stop()
            if not answer.output:
                return Row(check, "note", "unknown: the running request had no token yet")
            after = await probe.score(answer.prompt, answer.output)
        before = await probe.score(answer.prompt, answer.output)
    return judge_spans(check, answer, before.logprobs, after.logprobs, half)


def judge_spans(check: str, answer: DetailedSample, before: np.ndarray, after: np.ndarray, half: bool) -> Row:
    """Compare the reported first token of the new weights with the one that the log-probs show.

    Args:
        check: name of the row.
        answer: R tokens, sampled across the update, with the spans that the server reports.
        before: [R] log-probs of its tokens under the old weights.
        after: [R] log-probs of its tokens under the new weights.
        half: the server computes in 16 bits.
    """
    true, costs = switch_position(answer.logprobs, before, after)
    spans = answer.version_spans
    reported_spans = None if spans is None else [asdict(span) for span in spans]
    numbers = {"tokens": len(answer.output), "true": true, "spans": reported_spans}
    if not 0 < true < len(answer.output):
        return Row(check, "note", f"no switch of weights among the {len(answer.output)} tokens", numbers)
    if spans is None or len(spans) != 2:
        message = f"{0 if spans is None else len(spans)} spans for {len(answer.output)} tokens of two weights"
        return found(check, "version_spans_wrong", message, **numbers)
    reported = spans[1].start
    worse = float(costs[reported] - costs[true]) if 0 <= reported < len(costs) else float("inf")
    message = f"reported switch at token {reported}, log-probs switch at {true} of {len(answer.output)}"
    if not worse <= (MARGIN_HALF if half else MARGIN):
        return found(check, "version_spans_wrong", message, reported=reported, worse=worse, **numbers)
    return Row(check, "ok", message, numbers | {"reported": reported})


async def ask_update(probe: Probe, weights: TemporaryWeights, half: bool) -> Row:
    """Check that an update, made as a push makes it, takes effect and leaves no prefix of the old weights."""
    prompt, tail = probe.fresh_prompt(), probe.fresh_prompt()[:8]
    await probe.score(prompt, tail)
    before = await probe.score(prompt, tail, cached=True)
    try:
        await probe.pause_generation("retract")
        async with weights.scaled(FIRST_NORM, 4.0, VERSION):
            await probe.continue_generation()
            cached = await probe.score(prompt, tail, cached=True)
            fresh = await probe.score(prompt, tail)
    finally:
        await uninterrupted(_resume(probe))
    return judge_update(before, cached, fresh, half)


def judge_update(before: TokenScores, cached: TokenScores, fresh: TokenScores, half: bool) -> Row:
    """Compare scores under the old weights, and under the new ones with the cache and without it."""
    effect, stale = distance(before.logprobs, fresh.logprobs), distance(cached.logprobs, fresh.logprobs)
    numbers = {"effect": effect.numbers(), "stale": stale.numbers(), "cached_tokens": cached.cached_tokens}
    if effect.is_rounding(half):
        return found("update", "update_without_effect", f"log-probs moved by {effect}", **numbers)
    if not stale.is_rounding(half):
        message = f"after update and flush {cached.cached_tokens} old tokens are still used: {stale}"
        return found("update", "stale_prefix_cache", message, **numbers)
    message = f"log-probs moved by {effect.mean:.2f} nats on average; then {cached.cached_tokens} tokens were cached"
    return Row("update", "ok", message, numbers)


async def _resume(probe: Probe) -> None:
    await probe.continue_generation()


def _too_short(check: str, tokens: int) -> Row:
    return Row(check, "note", f"unknown: {tokens} tokens were sampled before the pause")

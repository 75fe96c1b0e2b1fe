"""`doctor --full`: pauses a server, changes its weights for a moment and puts everything back.

Judges pause modes, version spans, and the cache after an update. R response tokens.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from megatron_rl_corr.commands.doctor.update_judgements import judge_spans, judge_update
from megatron_rl_corr.commands.doctor.weight_change import (
    FINAL_NORM,
    FIRST_NORM,
    TemporaryWeights,
    read_tensors,
    uninterrupted,
)
from megatron_rl_corr.doctor.distances import distance
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import PROMPT_TOKENS, Probe, known, unsupported
from megatron_rl_corr.doctor.questions import CACHED_TOKENS, Facts
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


async def _ask_pauses(
    probe: Probe, tokens: int, half: bool, say: Callable[[str], None], rows: list[Row]
) -> None:
    for mode in PAUSE_MODES:
        if mode not in probe.engine.limits.pause_modes:
            rows.append(Row(f"pause {mode}", "note", f"not supported by {probe.engine.name}"))
            continue
        say(f"pausing ({mode})")
        rows.append(await ask_pause(probe, mode, tokens, half))


async def _ask_updates(
    probe: Probe,
    facts: Facts,
    directory: str | None,
    tokens: int,
    say: Callable[[str], None],
    rows: list[Row],
) -> None:
    model, half = known(facts.model), known(facts.half)
    weights = await _weights(probe, facts, directory or model.path)
    if isinstance(weights, Row):
        rows.append(weights)
        return
    say("computing the checksum of the weights")
    before, was = await weights.checksum(), await _fixed_scores(probe)
    for mode in PAUSE_MODES:
        # an aborted response has no later token
        if mode == "abort" or mode not in probe.engine.limits.pause_modes:
            continue
        say(f"updating weights under a running request ({mode})")
        rows.append(await ask_spans(probe, weights, mode, tokens, half))
    say("updating weights and flushing the cache")
    rows.append(await ask_update(probe, weights, half))
    say("comparing the checksum of the weights")
    rows.append(await _restored(probe, weights, before, model.weight_version, was, half))


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


async def _fixed_scores(probe: Probe) -> TokenScores:
    """Scores of a text that is always the same."""
    prompt = probe.fixed_prompt()
    return await probe.score(prompt, prompt)


async def _restored(
    probe: Probe, weights: TemporaryWeights, before: list, version: str, was: TokenScores, half: bool
) -> Row:
    """Are weights, version and log-probs what they were before the check?"""
    now, named = await weights.checksum(), (await probe.served_model()).weight_version
    changed = [
        name for old, new in zip(before, now, strict=True) for name in old if old[name] != new.get(name)
    ]
    if changed or named != version:
        message = f"weights {named!r} differ from before in {', '.join(changed) or 'their name'}"
        return found("restored", "state_not_restored", message, changed=changed, version=named)
    far = distance((await _fixed_scores(probe)).logprobs, was.logprobs)
    if not far.is_rounding(half):
        return found(
            "restored", "state_not_restored", f"log-probs differ from before: {far}", **far.numbers()
        )
    return Row(
        "restored", "ok", f"checksums of {sum(map(len, now))} weights and the version {named!r} are as before"
    )


class Running:
    """A request that samples until it is stopped."""

    def __init__(self, probe: Probe, tokens: int):
        self.request_id, self._probe = f"doctor-{uuid.uuid4().hex}", probe
        sample = probe.generate(probe.fresh_prompt(), tokens, request_id=self.request_id)
        self.task = asyncio.create_task(sample)
        self.new: asyncio.Task | None = None

    async def ask_new(self) -> bool:
        """True if a new request of one token is answered within SETTLE_S."""
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
    """Check that a running request does what the mode says, that new ones wait, and that log-probs
    stay the model's.
    """
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
    times = "" if retractions is None else f" ({retractions} retractions)"
    did = f"the running request {'ended' if ended else 'waited and went on'}{times}"
    if sampled or ended != (mode == "abort") or not answer.output or (mode == "retract" and retractions == 0):
        message = f"{did}, a new one {'was answered during the pause' if sampled else 'waited'}"
        return found(check, "pause_mode_broken", message, tokens=len(answer.output))
    far = distance(answer.logprobs, (await probe.score(answer.prompt, answer.output)).logprobs)
    if not far.is_rounding(half):
        return found(
            check, "pause_mode_broken", f"{did}, its log-probs are not the model's: {far}", **far.numbers()
        )
    return Row(check, "ok", f"{did}; {far}", far.numbers())


async def ask_spans(probe: Probe, weights: TemporaryWeights, mode: str, tokens: int, half: bool) -> Row:
    """Check the version spans of an answer during which the weights changed.

    The update scales the final norm, so keys and values are those of both versions, and a prefill under
    each version gives the log-probs that each token would have had with it.
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


async def ask_update(probe: Probe, weights: TemporaryWeights, half: bool) -> Row:
    """Check that an update, made as a push makes it, takes effect and leaves no prefix of the old weights."""
    prompt = probe.fresh_prompt(await probe.cacheable())
    sample = await probe.generate(prompt, CACHED_TOKENS, temperature=0.0)  # leaves the prompt in the cache
    before = await probe.score(prompt, sample.output)
    try:
        await probe.pause_generation("retract")
        async with weights.scaled(FIRST_NORM, 4.0, VERSION):
            await probe.continue_generation()
            # First: scores read no cache, but vLLM's leave the prompt in it, computed anew.
            cached = await probe.generate(prompt, CACHED_TOKENS, temperature=0.0)
            fresh = await probe.score(prompt, cached.output)
            after = await probe.score(prompt, sample.output)
    finally:
        await uninterrupted(_resume(probe))
    return judge_update(before, after, cached, fresh, half)


async def _resume(probe: Probe) -> None:
    await probe.continue_generation()


def _too_short(check: str, tokens: int) -> Row:
    return Row(check, "note", f"unknown: {tokens} tokens were sampled before the pause")

"""Requests one sample until it is whole: from another server after a failure, a continuation after an abort.

P prompt tokens, R response tokens.
"""

import asyncio
import logging
import uuid
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    StaleWeightsError,
)
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import PAUSES_S, WAIT_S, LocalFault
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory, concatenated
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.blame import failure_of_sample, may_retry
from megatron_rl_corr.rollout.health import ServerHealth
from megatron_rl_corr.rollout.ingest.answer import Ingest, IngestHere, ParsedAnswer
from megatron_rl_corr.rollout.seeds import Draw
from megatron_rl_corr.rollout.server_pool import Counts, Server, ServerPool
from megatron_rl_corr.rollout.stop_texts import Decode, cut_at_stop
from megatron_rl_corr.rollout.trace import CURRENT, RequestTrace, clock
from megatron_rl_corr.rollout.versions import step_back

logger = logging.getLogger(__name__)

CUT_S = 3.0
"""Longest wait, in seconds, for the end of a request that nobody waits for any more."""
CUT_POLL_S = 0.2
"""Seconds after which it is ended again: a server does not know a request that is still on its way to it."""

MOST_LOST = 5
"""Times that this host may lose a request that has gone out, or its answer, before that ends the run. The
requests beside it may be lost each time too: that others are in flight is no sign that it gets better.
"""


def _check_length(part: Trajectory, sampling: SamplingParams, endpoint: str) -> None:
    """RolloutServerError for a response that a server cut silently, before max_new_tokens, at
    its context length.
    """
    tokens = part.output_ids.numel()
    if part.finish_reason == "length" and tokens < sampling.max_new_tokens:
        raise RolloutServerError(
            part.server,
            endpoint,
            200,
            f"a response cut to {tokens} of {sampling.max_new_tokens} tokens, behind "
            f"{part.prompt_ids.numel()} of prompt",
            remedy="its context length has no room for both: start it with a longer one, or use shorter "
            "prompts or a smaller `max_new_tokens`",
        )


SHORTEST_LIMIT_S, LIMIT_PER_TOKEN_S = 3600.0, 1.0
"""Limit of an answer of few tokens, and of each token of a long one. Servers sample 10 tokens a second of one
response at the least, so that a request may still wait for nine others of its length.
"""


def longest_answer_s(sampling: SamplingParams) -> float:
    """How long an answer may take while its server seems to make progress: max(SHORTEST_LIMIT_S,
    LIMIT_PER_TOKEN_S * max_new_tokens), in seconds.

    Example: 1024 tokens may take an hour, 32768 tokens 9.1 hours.
    """
    return max(SHORTEST_LIMIT_S, LIMIT_PER_TOKEN_S * sampling.max_new_tokens)


@dataclass(frozen=True)
class _Refusal:
    """A server has refused a request, and another one is asked."""

    error: RolloutError
    server: Server
    joined: int
    """The server's, when it was asked."""


class Retries:
    """Samples from a pool. A sample has one request in flight at a time, so it can't be answered twice.

    Args:
        fleet: the way to the servers, and what each runs.
        pool: hands out servers.
        health: leaves servers out that fail, and knows the expected weight version.
        counts: counts samples, tokens and retries.
        max_retries: failed requests of a sample after which it fails.
        max_continuations: times that an aborted sample is continued; 0 returns its tokens so far.
        answer_timeout_s: longest time until an answer, but for weight updates, whatever the server's counters
            say; None: `longest_answer_s` of what is asked for.
        outage_timeout_s: how long this process may be unable to reach anybody while nothing of its
            own is in flight.
        experts: also request routed experts, of a model of this shape.
        keyed_cache: share cached prefixes only between requests for one weight version.
        pushes_retract: weights change in a pause of mode retract.
        decode: ids to text with special tokens, for stop texts.
        ingest: sends the requests and parses their answers; None: in this process.
    """

    def __init__(
        self,
        fleet: Fleet,
        pool: ServerPool,
        health: ServerHealth,
        counts: Counts,
        *,
        max_retries: int,
        max_continuations: int,
        outage_timeout_s: float,
        answer_timeout_s: float | None = None,
        experts: ExpertShape | None = None,
        keyed_cache: bool = False,
        pushes_retract: bool = False,
        decode: Decode | None = None,
        ingest: Ingest | None = None,
    ):
        self._ingest = IngestHere(fleet) if ingest is None else ingest
        self._fleet, self._pool, self._health, self._counts = fleet, pool, health, counts
        self._max_retries, self._max_continuations, self._experts = max_retries, max_continuations, experts
        self._keyed_cache, self._pushes_retract, self._decode = keyed_cache, pushes_retract, decode
        self._outage_timeout_s, self._answer_timeout_s = outage_timeout_s, answer_timeout_s
        self._told_faults: set[str] = set()

    @property
    def cache_key(self) -> str | None:
        """The cache key of requests that are sent now: the weight version that they are meant
        for; None: no key.
        """
        version = self._health.expected_version
        return f"weights:{version}" if self._keyed_cache and version is not None else None

    async def sample(
        self,
        prompt_ids: torch.Tensor,
        sampling: SamplingParams,
        *,
        draw: Draw,
        prompt_index: int,
        sample_index: int,
        vocab_size: int,
        prefer: str | None = None,
        routes_from: int = 0,
    ) -> Trajectory:
        """Return the whole sample.

        Args:
            prompt_ids: [P] int64, each in the vocabulary.
            sampling: how to sample.
            draw: decides the seeds.
            prompt_index, sample_index: go into the trajectory.
            vocab_size: sampled ids must be below it.
            prefer: address of the server that is asked unless it is crowded.
            routes_from: the token from which on routes are requested.

        Raises:
            SampleFailure: this sample failed for good.
            RolloutError: every other sample would fail too.
        """
        names = {
            "prompt_index": prompt_index,
            "sample_index": sample_index,
            "vocab_size": vocab_size,
            "group_number": draw.group,
            "turn": draw.turn,
        }
        try:
            part = await self._part(
                prompt_ids, sampling, draw.seed(0), prefer=prefer, routes_from=routes_from, **names
            )
            parts = [self._through_stop(part, sampling)]
            for _ in range(self._max_continuations):
                sampled = sum(part.output_ids.numel() for part in parts)
                missing = sampling.max_new_tokens - sampled
                if parts[-1].finish_reason != "abort" or not missing:
                    break
                self._counts.continuations += 1
                ids = torch.cat([prompt_ids, *(part.output_ids for part in parts)])
                rest = replace(sampling, max_new_tokens=missing)
                # What was cut before its first token has rows, but no pass whose routes they could be.
                first = ids.numel() - 1 if sampled else routes_from
                parts.append(
                    await self._part(
                        ids, rest, draw.seed(sampled), avoid=parts[-1].server, routes_from=first, **names
                    )
                )
                if sampling.stop:  # a text may begin in one part and end in the next
                    parts = [self._through_stop(concatenated(parts), sampling)]
            whole = concatenated(parts) if len(parts) > 1 else parts[0]
        except RolloutError as failure:
            error = failure_of_sample(failure) or failure
            for note in getattr(failure, "__notes__", ()) if error is not failure else ():
                error.add_note(note)
            error.add_note(
                f"it was sample {sample_index} of prompt {prompt_index} ({prompt_ids.numel()} tokens)"
            )
            if error is failure:
                raise
            raise error from failure
        if whole.finish_reason == "abort" and whole.output_ids.numel() == sampling.max_new_tokens:
            whole = replace(whole, finish_reason="length")  # nothing was cut off
        self._count(whole)
        return whole

    def _through_stop(self, sample: Trajectory, sampling: SamplingParams) -> Trajectory:
        """The sample without what a server has sampled after a stop text that it missed."""
        if not sampling.stop:
            return sample
        cut = cut_at_stop(sample, sampling.stop, self._decode)
        fewer = cut.output_ids.numel() < sample.output_ids.numel()
        self._counts.missed_stops += fewer or cut.finish_reason != sample.finish_reason
        return cut

    async def _part(
        self,
        ids: torch.Tensor,
        sampling: SamplingParams,
        seed: int,
        *,
        avoid: str | None = None,
        prefer: str | None = None,
        routes_from: int,
        group_number: int,
        turn: int,
        **names: int,
    ) -> Trajectory:
        """The answer to one request, by the first server that gives one; every server gets the same seed.

        A server that has failed this request gets it again only where no other is in: one that fails fast
        is the least busy, and would use up the retries. What one server refuses another one is asked once:
        if that answers, it was the server's fault, not the sample's.
        """
        failures, failed, group = 0, set() if avoid is None else {avoid}, CURRENT.get()
        refusal: _Refusal | None = None
        unreached_since: float | None = None
        lost = 0
        while True:
            await self._ingest.ready()
            trace = None if group is None else group.request(names["sample_index"], turn)
            server = await self._pool.take(failed, prefer)
            if trace is not None:
                trace.sent, trace.server = clock(), server.url
            joined = server.joined
            asked = SampleRequest(
                ids,
                sampling,
                uuid.uuid4().hex,
                seed,
                cache_key=self.cache_key,
                experts=self._experts,
                routes_from=routes_from if self._experts is not None else 0,
                pushes_retract=self._pushes_retract,
                timed=trace is not None,
                **names,
            )
            try:
                part = await self._ask(server, asked, trace)
                if trace is not None:
                    trace.tokens = part.output_ids.numel()
                if refusal is not None:
                    self._health.leave_out(refusal.server, refusal.joined, refusal.error)
                return part
            except LocalFault as fault:
                if trace is not None:
                    trace.failure = type(fault).__name__
                unreached_since = clock() if unreached_since is None else unreached_since
                lost += fault.sent
                self._bear(fault, server, since=unreached_since, lost=lost)
                await asyncio.sleep(PAUSES_S[0])
                continue
            except RolloutError as error:
                if trace is not None:
                    trace.failure = type(error).__name__
                if server.removed:  # it may be gone by now, and says nothing about the sample
                    place = {"group": group_number, "sample": names["sample_index"]}
                    EVENTS.tell("request_retried", str(error), server=server.url, **place)
                    self._counts.retries += 1
                    continue
                failed.add(server.url)
                if not may_retry(error):
                    if refusal is not None:
                        raise refusal.error from error
                    if not self._pool.has_other(failed):
                        raise
                    refusal = _Refusal(error, server, joined)
                else:
                    self._health.leave_out(server, joined, error)
                if failures == self._max_retries:
                    error.add_note(f"it was asked {failures + 1} times")
                    raise
                place = {"group": group_number, "sample": names["sample_index"]}
                EVENTS.tell("request_retried", str(error), server=server.url, **place)
            finally:
                if trace is not None and trace.answered is None:
                    trace.answered = clock()
                self._pool.give_back(server)
            failures += 1
            self._counts.retries += 1

    def _bear(self, fault: LocalFault, server: Server, *, since: float, lost: int) -> None:
        """Blame no server, and let the request be sent again: what this process lacks comes
        free as others end.

        Raises:
            LocalFault: it has lasted for outage_timeout_s since `since`, and no request of this
                process is in flight, or this one was `lost` MOST_LOST times.
        """
        server.unreached_until = asyncio.get_running_loop().time() + WAIT_S
        if fault.detail not in self._told_faults:
            self._told_faults.add(fault.detail)
            logger.warning("%s", fault)
        EVENTS.tell("local_fault", str(fault), server=server.url)
        in_flight = self._pool.outstanding - 1 - self._ingest.waiting_here  # without this one
        if clock() - since < self._outage_timeout_s:
            return
        if in_flight <= 0:
            fault.add_note(f"nothing else was in flight, and it went on for {clock() - since:.3g} s")
            raise fault
        if lost >= MOST_LOST:
            fault.add_note(f"the request or its answer was lost {lost} times in {clock() - since:.3g} s")
            raise fault

    async def _ask(self, server: Server, asked: SampleRequest, trace: RequestTrace | None) -> Trajectory:
        versions = self._health.expected_versions
        sent_for = len(versions) - 1
        endpoint = self._fleet.engine_of(server.url).generate_endpoint
        begun, abandoned = asyncio.get_running_loop().time(), False
        limit_s = self._answer_timeout_s or longest_answer_s(asked.sampling)
        sending = asyncio.ensure_future(self._ingest.answer(server.url, asked))
        try:
            async with asyncio.timeout(limit_s) as scope:
                server.scopes[scope] = begun
                if self._pool.held:
                    server.stop_timeouts()
                try:
                    answer = await asyncio.shield(sending)
                finally:
                    del server.scopes[scope]
                    abandoned = scope in server.abandoned
                    server.abandoned.discard(scope)
        except TimeoutError:  # it was abandoned, or is too late
            sending.cancel()
            detail = f"its answer did not come within {limit_s:.6g} s, though it seemed to make progress"
            if abandoned:
                detail = server.silence.detail
            raise RolloutServerError(server.url, endpoint, None, detail) from None
        except asyncio.CancelledError:
            await self._cut(server, asked.request_id, sending)
            raise
        part = answer.part
        server.answers += 1
        seconds = asyncio.get_running_loop().time() - begun
        self._pool.note_speed(server, part.output_ids.numel(), seconds)
        if trace is not None:
            trace.answered, trace.server_times = clock(), answer.server_times
        # The weights may have been updated in flight, also more than once: by this trainer, and
        # not by another one.
        if sent_for >= 0 and part.output_ids.numel():
            other = [span.version for span in part.weight_versions if span.version not in versions[sent_for:]]
            if other:
                raise StaleWeightsError(server.url, endpoint, other[0], versions[-1])
            if (back := step_back(part.weight_versions, versions[sent_for:])) is not None:
                what = f"weight_versions go back from {back[0]!r} to {back[1]!r}, which was pushed before it"
                raise RolloutProtocolError(server.url, endpoint, what)
        _check_length(part, asked.sampling, endpoint)
        server.flaps = 0
        if part.output_ids.numel():
            # What was computed anew after a pause counts as cached.
            self._counts.prefilled += max(0, part.prompt_ids.numel() - part.cached_tokens)
        return part

    async def _cut(self, server: Server, request_id: str, sending: asyncio.Future[ParsedAnswer]) -> None:
        """End a request that nobody waits for; the server would go on with it, also while weights change."""
        self._counts.cut += 1
        abort = self._fleet.engine_of(server.url).abort_request
        try:
            async with asyncio.timeout(CUT_S):
                while not sending.done():
                    await self._fleet.send(server.url, abort(request_id))
                    await asyncio.wait([sending], timeout=CUT_POLL_S)
            self._counts.cut_tokens += sending.result().part.output_ids.numel()
        except (RolloutError, TimeoutError, UnsupportedByEngine):
            pass  # it ends with its connection, where the server notices that
        finally:
            sending.cancel()

    def _count(self, whole: Trajectory) -> None:
        counts = self._counts
        counts.samples += 1
        counts.tokens += whole.output_ids.numel()
        counts.stop += whole.finish_reason == "stop"
        counts.length += whole.finish_reason == "length"
        counts.abort += whole.finish_reason == "abort"
        counts.nonfinite_logprobs += int(np.isnan(whole.rollout_logprobs.numpy()).sum())

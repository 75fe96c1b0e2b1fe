"""Asks for one sample until it is whole: another server after a failure, a continuation after an abort.

P prompt tokens, R response tokens.
"""

import asyncio
import math
from dataclasses import replace
from typing import Any

import torch

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    SampleFailure,
    StaleWeightsError,
)
from megatron_rl_corr.engines.routes import ExpertShape, first_without_routes
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory, join
from megatron_rl_corr.engines.types import Request, Transport
from megatron_rl_corr.rollout.health import ServerHealth
from megatron_rl_corr.rollout.seeds import Draw
from megatron_rl_corr.rollout.server_pool import Counts, Server, ServerPool

OF_THE_SERVER = (301, 302, 303, 307, 308, 401, 403, 404, 405)
"""HTTP statuses of a wrong key or address: every other request would get them too."""


def failure_of_sample(error: RolloutError) -> SampleFailure | None:
    """The error as one of this sample alone; None where every other sample would meet it too."""
    if may_ask_again(error):
        cause = "retries"
    elif isinstance(error, RolloutProtocolError):
        cause = "protocol"
    elif isinstance(error, RolloutServerError) and error.status not in OF_THE_SERVER:
        cause = "refused"
    else:
        return None
    return SampleFailure(cause, str(error), url=error.url, endpoint=error.endpoint)


def may_ask_again(error: RolloutError) -> bool:
    """Whether another server, or this one later, may do better with the same request.

    So after no answer, HTTP 429 and 5xx, and weights that are not the trainer's. Other statuses refuse the request
    itself, and a broken protocol would be broken again.
    """
    if isinstance(error, StaleWeightsError):
        return True
    return isinstance(error, RolloutServerError) and (
        error.status is None or error.status == 429 or error.status >= 500
    )


class Retries:
    """Samples from a pool. A sample has one request in flight at a time, so it can't be answered twice."""

    def __init__(
        self, engine: Engine, pool: ServerPool, members: ServerHealth, transport: Transport, counts: Counts, *,
        max_retries: int, max_continuations: int, experts: ExpertShape | None = None, keyed_cache: bool = False,
    ):  # fmt: skip
        self._engine = engine
        self._pool, self._members, self._transport, self._counts = pool, members, transport, counts
        self._max_retries, self._max_continuations, self._experts = max_retries, max_continuations, experts
        self._keyed_cache = keyed_cache

    @property
    def cache_key(self) -> str | None:
        """What a request's keys and values are kept under: the version whose weights it is meant for."""
        version = self._members.expected_version
        return f"weights:{version}" if self._keyed_cache and version is not None else None

    async def sample(
        self, prompt_ids: torch.Tensor, sampling: SamplingParams, *, draw: Draw, prompt_index: int, sample_index: int,
        vocab_size: int, after: Trajectory | None = None,
    ) -> Trajectory:  # fmt: skip
        """The whole sample. prompt_ids [P] int64, each in the vocabulary. after: the episode that they are the end of.

        Raises SampleFailure where this sample can't be had; RolloutError where no sample can.
        """
        names = {"prompt_index": prompt_index, "sample_index": sample_index, "vocab_size": vocab_size}
        try:
            server = None if after is None else after.server
            whole = await self._part(prompt_ids, sampling, draw.seed(0), prefer=server, so_far=after, **names)
            for _ in range(self._max_continuations):
                missing = sampling.max_new_tokens - whole.output_ids.numel()
                if whole.finish_reason != "abort" or not missing:
                    break
                self._counts.continuations += 1
                ids = torch.cat([whole.prompt_ids, whole.output_ids])
                rest = replace(sampling, max_new_tokens=missing)
                seed = draw.seed(whole.output_ids.numel())
                part = await self._part(ids, rest, seed, avoid=whole.server, so_far=whole, **names)
                whole = join(whole, part)
        except RolloutError as failure:
            error = failure_of_sample(failure) or failure
            for note in getattr(failure, "__notes__", ()) if error is not failure else ():
                error.add_note(note)
            error.add_note(f"it was sample {sample_index} of prompt {prompt_index} ({prompt_ids.numel()} tokens)")
            if error is failure:
                raise
            raise error from failure
        if whole.finish_reason == "abort" and whole.output_ids.numel() == sampling.max_new_tokens:
            whole = replace(whole, finish_reason="length")  # nothing was cut off
        self._count(whole)
        return whole

    async def _part(
        self, ids: torch.Tensor, sampling: SamplingParams, seed: int, *, avoid: str | None = None,
        prefer: str | None = None, so_far: Trajectory | None, **names: int,
    ) -> Trajectory:  # fmt: skip
        """The answer to one request, by the first server that gives one; each is asked with the same seed.

        A server that has failed this request is asked again only where no other is in: one that fails fast is the
        least busy, and would use up the retries.
        so_far: a response whose tokens are the first of ids, so that its routes need no asking.
        """
        routed, known = self._experts is not None, None
        if routed and so_far is not None:
            known = so_far.routed_experts[: first_without_routes(so_far.routed_experts, self._experts.experts)]
        failures, failed = 0, set() if avoid is None else {avoid}
        while True:
            server = await self._pool.take(failed, prefer)
            joined = server.joined
            request = self._engine.generate(  # made for those in flight only
                ids.tolist(), sampling, seed=seed, routed_experts=routed, cache_key=self.cache_key,
                routes_from=0 if known is None else len(known),
            )  # fmt: skip
            try:
                return await self._ask(server, request, ids, sampling, known_routes=known, **names)
            except RolloutError as error:
                if not may_ask_again(error):
                    if isinstance(error, RolloutProtocolError):  # or it would get, and spoil, all that comes
                        self._members.leave_out(server, joined, error)
                    raise
                failed.add(server.url)
                self._members.leave_out(server, joined, error)
                if failures == self._max_retries:
                    error.add_note(f"it was asked {failures + 1} times")
                    raise
            finally:
                self._pool.give_back(server)
            failures += 1
            self._counts.retries += 1

    async def _ask(
        self, server: Server, request: Request, ids: torch.Tensor, sampling: SamplingParams, **names: Any
    ) -> Trajectory:
        versions = self._members.expected_versions
        sent_for = len(versions) - 1
        try:
            async with asyncio.timeout(None) as scope:
                server.scopes[scope] = asyncio.get_running_loop().time()
                try:
                    # As long as the server gets on, however long the answer is: `ServerHealth` watches that.
                    _, body = await self._transport.send(server.url, request, timeout_s=math.inf)
                finally:
                    del server.scopes[scope]
        except TimeoutError:  # it was abandoned
            raise RolloutServerError(server.url, request.endpoint, None, server.silence.detail) from None
        part = self._engine.parse(
            body, prompt_ids=ids, server=server.url, truncated=sampling.truncated, experts=self._experts, **names
        )
        # The weights may have been updated while it was in flight, more than once too: a stale server has none of them.
        if sent_for >= 0 and part.output_ids.numel() and part.oldest_version not in versions[sent_for:]:
            raise StaleWeightsError(server.url, request.endpoint, part.oldest_version, versions[-1])
        server.flaps = 0
        if part.output_ids.numel():
            # What was computed anew after a pause counts as cached once more.
            self._counts.prefilled += max(0, ids.numel() - part.cached_tokens)
        return part

    def _count(self, whole: Trajectory) -> None:
        counts = self._counts
        counts.samples += 1
        counts.tokens += whole.output_ids.numel()
        counts.stop += whole.finish_reason == "stop"
        counts.length += whole.finish_reason == "length"
        counts.abort += whole.finish_reason == "abort"
        counts.nonfinite_logprobs += int(whole.rollout_logprobs.isnan().sum())

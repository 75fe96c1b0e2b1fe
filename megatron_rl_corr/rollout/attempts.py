"""Asks for one sample until it is whole: another server after a failure, a continuation after an abort.

P prompt tokens, R response tokens.
"""

import asyncio
from dataclasses import replace

import torch

from megatron_rl_corr.rollout import requests
from megatron_rl_corr.rollout.counts import Counts
from megatron_rl_corr.rollout.errors import RolloutError, RolloutServerError, StaleWeightsError
from megatron_rl_corr.rollout.pool import Server, ServerPool
from megatron_rl_corr.rollout.readmission import Readmission
from megatron_rl_corr.rollout.requests import Request
from megatron_rl_corr.rollout.responses import parse_generate
from megatron_rl_corr.rollout.routed_experts import ExpertShape
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory, join
from megatron_rl_corr.rollout.transport import Transport


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


class Attempts:
    """Samples from a pool. A sample has one request in flight at a time, so it can't be answered twice."""

    def __init__(
        self, pool: ServerPool, members: Readmission, transport: Transport, counts: Counts, *,
        max_retries: int, max_continuations: int, experts: ExpertShape | None = None,
    ):  # fmt: skip
        self._pool, self._members, self._transport, self._counts = pool, members, transport, counts
        self._max_retries, self._max_continuations, self._experts = max_retries, max_continuations, experts

    async def sample(
        self, prompt_ids: torch.Tensor, sampling: SamplingParams, *, prompt_index: int, sample_index: int,
        vocab_size: int,
    ) -> Trajectory:  # fmt: skip
        """The whole sample. prompt_ids [P] int64, each in the vocabulary."""
        names = {"prompt_index": prompt_index, "sample_index": sample_index, "vocab_size": vocab_size}
        try:
            whole = await self._part(prompt_ids, sampling, **names)
            for _ in range(self._max_continuations):
                missing = sampling.max_new_tokens - whole.output_ids.numel()
                if whole.finish_reason != "abort" or not missing:
                    break
                self._counts.continuations += 1
                so_far = torch.cat([whole.prompt_ids, whole.output_ids])
                rest = replace(sampling, max_new_tokens=missing)
                whole = join(whole, await self._part(so_far, rest, avoid=whole.server, **names))
        except RolloutError as error:
            error.add_note(f"it was sample {sample_index} of prompt {prompt_index} ({prompt_ids.numel()} tokens)")
            raise
        if whole.finish_reason == "abort" and whole.output_ids.numel() == sampling.max_new_tokens:
            whole = replace(whole, finish_reason="length")  # nothing was cut off
        self._count(whole)
        return whole

    async def _part(
        self, ids: torch.Tensor, sampling: SamplingParams, *, avoid: str | None = None, **names: int
    ) -> Trajectory:
        """The answer to one request, by the first server that gives one."""
        failures = 0
        while True:
            server = await self._pool.take(avoid)
            joined = server.joined
            routed = self._experts is not None
            # Made for those in flight only.
            request = requests.generate_request(ids.tolist(), sampling, routed_experts=routed)
            try:
                return await self._ask(server, request, ids, sampling, **names)
            except RolloutError as error:
                if not may_ask_again(error):
                    raise
                self._members.leave_out(server, joined, error)
                if failures == self._max_retries:
                    error.add_note(f"it was asked {failures + 1} times")
                    raise
            finally:
                self._pool.give_back(server)
            failures += 1
            self._counts.retries += 1

    async def _ask(
        self, server: Server, request: Request, ids: torch.Tensor, sampling: SamplingParams, **names: int
    ) -> Trajectory:
        versions = self._members.expected_versions
        sent_for = len(versions) - 1
        try:
            async with asyncio.timeout(None) as scope:
                server.scopes.add(scope)
                try:
                    _, body = await self._transport.send(server.url, request)
                finally:
                    server.scopes.discard(scope)
        except TimeoutError:  # it was abandoned
            detail = "it fell silent, and the request was given up"
            raise RolloutServerError(server.url, request.endpoint, None, detail) from None
        part = parse_generate(
            body, prompt_ids=ids, server=server.url, truncated=sampling.truncated, experts=self._experts, **names
        )
        # The weights may have been updated while it was in flight, more than once too: a stale server has none of them.
        if sent_for >= 0 and part.output_ids.numel() and part.oldest_version not in versions[sent_for:]:
            raise StaleWeightsError(server.url, request.endpoint, part.oldest_version, versions[-1])
        return part

    def _count(self, whole: Trajectory) -> None:
        counts = self._counts
        counts.samples += 1
        counts.tokens += whole.output_ids.numel()
        counts.stop += whole.finish_reason == "stop"
        counts.length += whole.finish_reason == "length"
        counts.abort += whole.finish_reason == "abort"
        counts.nonfinite_logprobs += int(whole.rollout_logprobs.isnan().sum())

"""What servers give the tokens that they have sampled, in one prefill of each sample under the same weights.

S' samples of this replica, T' tokens of them on this context-parallel rank, R tokens of a response, K
likeliest ids of a token, if they are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import all_reduce_results, communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout import versions

IN_FLIGHT = 8
"""Samples that a replica has scored at a time: servers may be sampling for the next batch."""


@dataclass(frozen=True)
class PrefillScores:
    """What one prefill of each sample gives, of T' tokens or of the R of one response."""

    logprobs: Any
    """[T'] float32, NaN where no server of these weights scored the token."""
    top: Any
    """[T', K] float32 log-probs of the likeliest ids; 0 where there are none."""
    top_ids: Any
    """[T', K] int32."""


@dataclass(frozen=True)
class ServerPrefill:
    """Asks the servers that have sampled for one prefill of each sample."""

    source: SampleSource
    layout: Layout
    vocab_size: int
    top: int = 0
    """K, at most the vocabulary's size; 0: none are asked for."""

    def begin(self, samples: Sequence[Trajectory], version: int) -> Future | None:
        """Begin to ask, on a data leader; None on others. version: of the trainer's weights."""
        if not self.layout.is_data_leader:
            return None
        return self.source.loop.submit(self._score_all(samples, version))

    @collective
    def finish(
        self, asked: Future | None, samples: Sequence[Trajectory], part: RolloutBatch
    ) -> PrefillScores:
        """The scores, on the device; none are of weights that servers have no more.

        Every rank calls it. part: the samples' tokens.
        """
        boundaries = part.cu_seqlens

        def laid_out(scores: list[PrefillScores]) -> list[Tensor]:
            whole = self._unknown(int(boundaries[-1]))
            for start, sample, own in zip(boundaries[:-1], samples, scores, strict=True):
                first = start + sample.prompt_ids.numel() - 1
                for name, values in vars(whole).items():
                    values[first : first + sample.output_ids.numel()] = vars(own)[name]
            return [torch.from_numpy(values) for values in vars(whole).values()]

        own = all_reduce_results(asked, laid_out)
        if own is None:
            own = [torch.from_numpy(one) for one in vars(self._unknown(int(boundaries[-1]))).values()]
        values = [one.to(communication_device()) for one in own]
        broadcast_to_replica(values if self.top else values[:1], self.layout)
        (rank, size), device = part.cp, values[0].device
        if size > 1:
            places = zigzag_positions(rank, size, boundaries.tolist(), device)
            values = [one[places] for one in values]
        return PrefillScores(*values)

    def _unknown(self, tokens: int) -> PrefillScores:
        """The scores of so many tokens of which none is known."""
        return PrefillScores(
            np.full(tokens, np.nan, dtype=np.float32),
            np.zeros((tokens, self.top), dtype=np.float32),
            np.zeros((tokens, self.top), dtype=np.int32),
        )

    async def _score_all(self, samples: Sequence[Trajectory], version: int) -> list[PrefillScores]:
        places = asyncio.Semaphore(IN_FLIGHT)
        return await asyncio.gather(*[self._score(sample, version, places) for sample in samples])

    async def _score(self, sample: Trajectory, version: int, places: asyncio.Semaphore) -> PrefillScores:
        """The scores of R tokens; unknown where other weights sampled them, or a server that has left since a
        checkpoint, and where no answer comes.
        """
        lags = versions.token_lags(sample, version).numpy()
        unknown = self._unknown(len(lags))
        if not len(lags) or (lags > 0).all() or sample.server not in self.source.client.base_urls:
            return unknown
        prompt, output = sample.prompt_ids.tolist(), sample.output_ids.tolist()
        client = self.source.client
        try:
            async with places:
                engine = client.engine_of(sample.server)
                request = engine.score(prompt, output, likeliest=self.top or 1)
                answer = await client.ask(sample.server, request)
                scores = engine.parse_scores(
                    answer, server=sample.server, output_ids=output, vocab_size=self.vocab_size
                )
        except (RolloutError, UnsupportedByEngine) as failure:
            EVENTS.tell("sample_not_scored", str(failure), server=sample.server)
            return unknown
        if scores.version is not None and versions.number(scores.version) != version:
            return unknown
        logprobs = np.where(lags > 0, np.nan, scores.logprobs).astype(np.float32)
        if not self.top:
            return replace(unknown, logprobs=logprobs)
        if scores.top_ids.shape[1] < self.top:
            told = f"{scores.top_ids.shape[1]} likeliest ids came where {self.top} were asked for"
            EVENTS.tell("sample_not_scored", told, server=sample.server)
            return unknown
        top = np.where(np.isnan(scores.top), -np.inf, scores.top)  # JSON has no infinity, but null
        return PrefillScores(logprobs, top[:, : self.top], scores.top_ids[:, : self.top])

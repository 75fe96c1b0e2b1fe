"""What servers give the tokens that they have sampled, in one prefill of each sample under the same weights.

S' samples of this replica, T' tokens of them on this context-parallel rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

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
class ServerPrefill:
    """Asks the servers that have sampled for one prefill of each sample."""

    source: SampleSource
    layout: Layout
    vocab_size: int

    def begin(self, samples: Sequence[Trajectory], version: int) -> Future | None:
        """Begin to ask, on a data leader; None on others. version: of the trainer's weights."""
        if not self.layout.is_data_leader:
            return None
        return self.source.loop.submit(self._score_all(samples, version))

    @collective
    def finish(self, asked: Future | None, samples: Sequence[Trajectory], part: RolloutBatch) -> Tensor:
        """[T'] float32: the scores; NaN where there is none, of weights that servers have no more.

        Every rank calls it. part: the samples' tokens.
        """
        boundaries = part.cu_seqlens

        def laid_out(scores: list[np.ndarray]) -> Tensor:
            whole = np.full(boundaries[-1], np.nan, dtype=np.float32)
            for start, sample, logprobs in zip(boundaries[:-1], samples, scores, strict=True):
                first = start + sample.prompt_ids.numel() - 1
                whole[first : first + sample.output_ids.numel()] = logprobs
            return torch.from_numpy(whole)

        own = all_reduce_results(asked, laid_out)
        values = torch.zeros(int(boundaries[-1])) if own is None else own
        values = values.to(communication_device())
        broadcast_to_replica([values], self.layout)
        rank, size = part.cp
        return (
            values[zigzag_positions(rank, size, boundaries.tolist(), values.device)] if size > 1 else values
        )

    async def _score_all(self, samples: Sequence[Trajectory], version: int) -> list[np.ndarray]:
        places = asyncio.Semaphore(IN_FLIGHT)
        return await asyncio.gather(*[self._score(sample, version, places) for sample in samples])

    async def _score(self, sample: Trajectory, version: int, places: asyncio.Semaphore) -> np.ndarray:
        """[R]; NaN of tokens of other weights than the trainer's, and where no answer comes."""
        lags = versions.token_lags(sample, version).numpy()
        unknown = np.full(len(lags), np.nan, dtype=np.float32)
        if not len(lags) or (lags > 0).all():
            return unknown
        prompt, output = sample.prompt_ids.tolist(), sample.output_ids.tolist()
        client = self.source.client
        try:
            async with places:
                engine = client.engine_of(sample.server)
                answer = await client.ask(sample.server, engine.score(prompt, output, likeliest=1))
                scores = engine.parse_scores(
                    answer, server=sample.server, output_ids=output, vocab_size=self.vocab_size
                )
        except (RolloutError, UnsupportedByEngine) as failure:
            EVENTS.tell("sample_not_scored", str(failure), server=sample.server)
            return unknown
        if scores.version is not None and versions.number(scores.version) != version:
            return unknown
        return np.where(lags > 0, np.nan, scores.logprobs).astype(np.float32)

"""Log-probs of a batch's tokens by servers that nothing is pushed to: on the last stage, each rank its own.

T tokens of this rank's batch, K likeliest ids of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.inspection import TokenScores
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_runs
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_results, communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.slices import scatter_slices
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.scorer import Scorer


@dataclass(frozen=True)
class ServedScores:
    """Servers of one policy that score each batch. Raises as `of_batch`."""

    scorer: Scorer
    loop: LoopThread
    """Its event loop."""
    layout: Layout
    flag: str
    """That names the servers."""
    policy: str
    """What they serve, in messages: "reference"."""
    likeliest: int = 0
    """K; 0: the sampled tokens alone."""

    @collective
    def of_batch(self, forward: BatchForward) -> tuple[Tensor, Tensor, Tensor] | None:
        """(log-probs [T], the K likeliest ids [T, K] int32, their log-probs [T, K]) on the last stage, with
        NaN for a response that was not scored; None on others.

        Every rank calls it. A last stage's ranks are sent 4 + 8 K bytes for each of their tokens.

        Raises:
            RolloutError: on a leader none of whose samples were scored.
            StartupError: on a leader whose servers have other weights than at the start.
            PeerFailure: then, on the other ranks.
        """
        layout, boundaries, top = self.layout, forward.batch.cu_seqlens.tolist(), self.likeliest
        scoring = self.loop.submit(self._score(forward.samples)) if layout.is_data_leader else None

        def laid_out(scores: list[TokenScores | None]) -> Tensor:
            # Ids are distinct at each token, whether or not they are known.
            whole = torch.zeros(boundaries[-1], 1 + 2 * top, dtype=torch.int32)
            whole[:, 1 : top + 1] = torch.arange(top)
            for start, sample, own in zip(boundaries[:-1], forward.samples, scores, strict=True):
                first = start + sample.prompt_ids.numel() - 1
                rows = whole[first : first + sample.output_ids.numel()]
                logprobs = np.full(len(rows), np.nan) if own is None else own.logprobs
                rows[:, 0] = _bits(logprobs)
                if own is not None and top:
                    rows[:, 1 : top + 1] = torch.from_numpy(own.top_ids[:, :top].astype(np.int32))
                    # JSON has no infinity, but null.
                    of_top = np.where(np.isnan(own.top), -np.inf, own.top)
                    rows[:, top + 1 :] = _bits(of_top[:, :top])
            return whole

        whole = all_reduce_results(scoring, laid_out)

        def slice_of(_stage: int, rank: int) -> Tensor:
            runs = zigzag_runs(rank, layout.cp_size, boundaries)
            return torch.cat([whole[slice(*run)] for run in runs])

        count = forward.batch.num_tokens
        own = torch.empty(count, 1 + 2 * top, dtype=torch.int32, device=communication_device())
        last = layout.pp_size - 1
        scatter_slices(None if whole is None else slice_of, own, layout, stages={last})
        if not layout.is_last_stage:
            return None
        logprobs, ids, of_top = own.split([1, top, top], dim=1)
        return (
            logprobs.contiguous().view(torch.float32)[:, 0],
            ids.contiguous(),
            of_top.contiguous().view(torch.float32),
        )

    def close(self) -> None:
        """Leave the servers."""
        self.loop.call(self.scorer.close())

    async def _score(self, samples: Sequence[Trajectory]) -> list[TokenScores | None]:
        try:
            scores = await self.scorer.score(samples, likeliest=self.likeliest or 1)
            changed = await self.scorer.changed_weights()
        except RolloutError as error:
            error.add_note(
                f"it is a server of {self.flag}, and none of them scored a sample of this batch; "
                "start it again, and go on from the last checkpoint"
            )
            raise
        if changed is not None:
            url, before, now = changed
            raise StartupError(
                f"{self.flag} {url}: its weights were called {before} at the start and are "
                f"called {now} now, so the samples would be scored by another policy. If it is a server of "
                "--rollout-url under another name, to which the trained weights are pushed, start one of "
                f"its own for the {self.policy}; else start it again with the {self.policy}'s weights, and "
                "go on from the last checkpoint"
            )
        return scores


def _bits(values: np.ndarray) -> Tensor:
    """float32, as the int32 of the same bits."""
    return torch.from_numpy(values.astype(np.float32)).view(torch.int32)

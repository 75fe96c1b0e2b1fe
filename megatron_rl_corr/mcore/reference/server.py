"""The reference policy behind servers of its own: they score the samples, and their distance to the
start is measured.

S samples of this replica, T tokens of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.losses.kl import kl_estimate
from megatron_rl_corr.core.losses.ratio import inside
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.first_step import HALF_KL
from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.mcore.reference.policy import Reference, ReferenceWeights
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_results, communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Mean, Metric
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.scorer import Scorer


class ServedReference(Reference):
    """A reference policy whose servers score each step's samples.

    In the first step after a start the trainer's start weights score the same samples: what the two differ by
    then, the floor, is in `loss/reference_kl` from the first step to the last, whatever is trained.

    Args:
        scorer: of the servers.
        loop: its event loop.
        layout: this rank's process groups.
        start: the weights that the run started from; None: the live ones are those.
    """

    def __init__(self, scorer: Scorer, loop: LoopThread, layout: Layout, *, start: ReferenceWeights | None):
        self._scorer, self._loop, self._layout, self.weights = scorer, loop, layout, start
        self._measured = False

    @collective
    def log_probs(self, forward: BatchForward) -> Tensor | None:
        served = self._share_scores(forward)
        if not self._measured:
            self._measure_floor(forward, served)
            self._measured, self.weights = True, None
        return served if self._layout.is_last_stage else None

    def close(self) -> None:
        self._loop.call(self._scorer.close())

    async def _score(self, samples: Sequence[Trajectory]) -> list[np.ndarray | None]:
        try:
            scores, changed = await self._scorer.score(samples), await self._scorer.changed_weights()
        except RolloutError as error:
            error.add_note(
                "it is a server of --rollout-reference-url, and none of them scored a sample of this batch; "
                "start it again, and go on from the last checkpoint"
            )
            raise
        if changed is not None:
            url, before, now = changed
            raise StartupError(
                f"--rollout-reference-url {url}: its weights were called {before} at the start and are "
                f"called {now} now, so the samples would be scored by another policy. If it is a server of "
                "--rollout-url under another name, to which the trained weights are pushed, start one of "
                "its own for the reference; else start it again with the reference's weights, and go on "
                "from the last checkpoint"
            )
        return scores

    @collective
    def _share_scores(self, forward: BatchForward) -> Tensor:
        """The servers' log-probs of this rank's tokens, [T]; NaN for a response that was not scored.

        Raises:
            RolloutError: on a leader none of whose samples were scored.
            StartupError: on a leader whose servers have other weights than at the start.
            PeerFailure: then, on the other ranks.
        """
        layout, batch = self._layout, forward.batch
        boundaries = batch.cu_seqlens
        scoring = self._loop.submit(self._score(forward.samples)) if layout.is_data_leader else None

        def laid_out(scores: list[np.ndarray | None]) -> Tensor:
            whole = np.zeros(boundaries[-1], dtype=np.float32)
            for start, sample, logprobs in zip(boundaries[:-1], forward.samples, scores, strict=True):
                first = start + sample.prompt_ids.numel() - 1
                whole[first : first + sample.output_ids.numel()] = np.nan if logprobs is None else logprobs
            return torch.from_numpy(whole)

        own = all_reduce_results(scoring, laid_out)
        values = torch.zeros(int(boundaries[-1])) if own is None else own
        values = values.to(communication_device())
        broadcast_to_replica([values], layout)
        if layout.cp_size == 1:
            return values
        return values[zigzag_positions(layout.cp_group.rank(), layout.cp_size, boundaries, values.device)]

    @collective
    def _measure_floor(self, forward: BatchForward, served: Tensor) -> None:
        """Measure the k3 of the start's weights against the servers, and print it on the job's last rank."""
        with forward.gathered():
            if self.weights is None:
                scored = forward.run()
            else:
                with self.weights.in_place():
                    scored = forward.run()
        if scored is None:
            return
        known = forward.batch.loss_mask & served.isfinite() & scored.isfinite()
        k3 = kl_estimate(inside(known, scored - served), "k3")
        floor = Mean(torch.stack([k3.sum(dtype=torch.float64), known.sum(dtype=torch.float64)]))
        self.metrics: dict[str, Metric] = {"reference/floor": floor}
        total = floor.values.clone()
        dist.all_reduce(total, group=self._layout.dp_cp_group)
        if self._layout.is_job_reporter:
            k3 = Mean(total).value()
            meaning = "loss/reference_kl does not fall below it"
            if not k3 <= HALF_KL:
                meaning = (
                    f"rounding explains at most {HALF_KL:g}, so --rollout-reference-url serves another "
                    "policy than --rollout-hf-checkpoint; if it should be the same, end this run and look "
                    "at its checkpoint"
                )
            print(
                f"[rollout] reference servers: k3 of the start's weights against them is {k3:.3g}; {meaning}",
                flush=True,
            )

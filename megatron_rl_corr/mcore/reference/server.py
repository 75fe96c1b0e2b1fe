"""The reference policy behind servers of its own: they score the samples, and their distance to the
start is measured.

T tokens of this rank's batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.losses.kl import kl_estimate
from megatron_rl_corr.core.losses.ratio import inside
from megatron_rl_corr.mcore.first_step import HALF_KL
from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.mcore.reference.policy import Reference, ReferenceWeights
from megatron_rl_corr.mcore.reference.served_scores import ServedScores
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.metrics import Mean, Metric


class ServedReference(Reference):
    """A reference policy whose servers score each step's samples.

    In the first step after a start the trainer's start weights score the same samples: what the two differ by
    then, the floor, is in `loss/reference_kl` from the first step to the last, whatever is trained.

    Args:
        served: what its servers say.
        start: the weights that the run started from; None: the live ones are those.
    """

    def __init__(self, served: ServedScores, *, start: ReferenceWeights | None):
        self._served, self._layout, self.weights = served, served.layout, start
        self._measured = False

    @collective
    def log_probs(self, forward: BatchForward) -> Tensor | None:
        scores = self._served.of_batch(forward)
        served = None if scores is None else scores[0]
        if not self._measured:
            self._measure_floor(forward, served)
            self._measured, self.weights = True, None
        return served

    def close(self) -> None:
        self._served.close()

    @collective
    def _measure_floor(self, forward: BatchForward, served: Tensor | None) -> None:
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

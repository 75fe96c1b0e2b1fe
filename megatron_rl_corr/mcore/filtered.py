"""Measures the mismatch of groups that the filter left out: a few of their samples in one forward
pass, untrained.

Without it a mismatch of easy prompts alone stays unseen: their rewards are all equal, so they never come
into a batch. T tokens of the samples on this context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl_corr.core.mismatch import filtered_metrics
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch import BatchShape, RolloutBatch
from megatron_rl_corr.mcore.batch_collector import BatchCollector
from megatron_rl_corr.mcore.forward import LogprobSettings, compute_log_probs
from megatron_rl_corr.mcore.packs import Packs
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric


@dataclass(frozen=True)
class FilteredMismatch:
    """--rollout-group-filter-measured. Example: 4 samples of each replica a step, of as
    many groups at most.
    """

    samples: int = 0
    """Of each replica; 0: nothing is measured."""

    def all_reduce_measured(
        self,
        number: int,
        collector: BatchCollector,
        model: list,
        optimizer: Any,
        settings: LogprobSettings,
        shape: BatchShape,
        layout: Layout,
        routes: Routes,
    ) -> dict[str, Metric]:
        """The mismatch of the samples that the leaders kept since the last call; every rank calls it.

        One forward-only pass in evaluation mode, under the weights that the batch is trained from, with the
        servers' experts under R3; none where no replica has a sample.

        Args:
            number: of the batch.
            collector: keeps the samples, on leaders.
            model, optimizer: Megatron's.
            settings: of the log-probs.
            shape: sizes of a batch.
            layout: this rank's process groups.
            routes: the step's; it is as it was afterwards.

        Returns:
            This rank's share, on the last stage; {} on others, and where nothing is measured.
        """
        if not self.samples:
            return {}
        samples = collector.take_aside()
        found = torch.tensor(len(samples), device=collector.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if not int(found):  # the same metrics all the same, as ranks exchange them by their order
            none = torch.zeros(0, device=collector.device)
            return filtered_metrics(none, none, none.bool()) if layout.is_last_stage else {}
        # As many on each replica, and what the schedule takes; the others have no token in the mask.
        unit = compat.smallest_schedule(model) * (1 if shape.packing is not None else shape.micro_batch_size)
        count = -(-self.samples // unit) * unit
        samples = [*samples, *[_nothing()] * (count - len(samples))] if layout.is_data_leader else samples
        batch, boundaries = collector.all_reduce_batch_of(samples, count, number)
        packs = Packs.all_reduce(batch, shape, layout)
        experts = [sample.routed_experts for sample in samples] if layout.is_data_leader else None
        with (
            compat.gathered_parameters(model, optimizer),
            compat.attention_logits_kept(model),
            routes.replaying_others(experts, boundaries) as steered,
        ):
            scored = compute_log_probs(model, packs, settings, routes=steered)
        return {} if scored is None else _metrics(scored[0], batch)


def _metrics(logprobs: torch.Tensor, batch: RolloutBatch) -> dict[str, Metric]:
    return filtered_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask)


def _nothing() -> Trajectory:
    """A sample without a response, which adds nothing to a mean."""
    none, span = torch.zeros(0, dtype=torch.int64), VersionSpan("0", 0, 0)
    return Trajectory(0, 0, torch.zeros(1, dtype=torch.int64), none, none.float(), "abort", (span,), 0, "")

"""Measures the mismatch of groups that the filter left out: a few of their samples in one forward
pass, untrained.

Without it a mismatch of easy prompts alone stays unseen: their rewards are all equal, so they never come
into a batch. T tokens of the samples on this context-parallel rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.mismatch import filtered_metrics
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.feature import CorrectedBatch, Feature, RunParts
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.reduce.metrics import Metric
from megatron_rl_corr.rollout.group_filter import measured_samples


class FilteredMismatchFeature(Feature):
    """--rollout-group-filter-measured: with 0.0625 and 64 samples a replica 4 of each replica a step, of as
    many groups at most.
    """

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return bool(options.group_filter_measured)

    def samples_aside(self, rows: int) -> int:
        return measured_samples(self.options.group_filter_measured, rows)

    def open(self, run: RunParts) -> None:
        self._collector, self._shape, self._layout = run.collector, run.shape, run.settings.layout

    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """The mismatch of the samples that the leaders kept since the last batch.

        One forward-only pass in evaluation mode, under the weights that the batch is trained from, with the
        servers' experts under R3; none where no replica has a sample.

        Returns:
            This rank's share, on the last stage; {} on others.
        """
        collector, shape, layout, forward = self._collector, self._shape, self._layout, scored.forward
        samples = collector.take_aside()
        found = torch.tensor(len(samples), device=collector.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        if not int(found):  # the same metrics all the same, as ranks exchange them by their order
            none = torch.zeros(0, device=collector.device)
            return filtered_metrics(none, none, none.bool()) if layout.is_last_stage else {}
        # As many on each replica, and what the schedule takes; the others have no token in the mask.
        unit = compat.smallest_schedule(forward.model)
        unit *= 1 if shape.packing is not None else shape.micro_batch_size
        wanted = self.samples_aside(shape.rows(layout.dp_size))
        count = -(-wanted // unit) * unit
        samples = [*samples, *[_nothing()] * (count - len(samples))] if layout.is_data_leader else samples
        batch, boundaries = collector.lay_out_others(samples, count, scored.number)
        packs = Packs.balanced(batch, shape, layout)
        experts = [sample.routed_experts for sample in samples] if layout.is_data_leader else None
        with (
            forward.gathered(),
            compat.attention_logits_kept(forward.model),
            scored.routes.replaying_others(experts, boundaries) as steered,
        ):
            made = compute_log_probs(forward.model, packs, forward.settings, routes=steered)
        return {} if made is None else filtered_metrics(made[0], batch.rollout_logprobs, batch.loss_mask)


def _nothing() -> Trajectory:
    """A sample without a response, which adds nothing to a mean."""
    none, span = torch.zeros(0, dtype=torch.int64), VersionSpan("0", 0, 0)
    return Trajectory(0, 0, torch.zeros(1, dtype=torch.int64), none, none.float(), "abort", (span,), 0, "")


FEATURE = FilteredMismatchFeature

"""The corrected policy loss as Megatron's schedules want it, in both modes of --calculate-per-token-loss.

b rows of L tokens (of this context-parallel rank), M microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.mcore.batch import Microbatch, TrainingTargets
from megatron_rl_corr.mcore.logprobs import LogprobSettings, label_logprobs
from megatron_rl_corr.parallel.groups import ParallelGroups


@dataclass
class CorrectedLoss:
    """Builds the schedule's loss of each microbatch of one step and keeps the metrics of all."""

    config: RolloutCorrectionConfig
    logprobs: LogprobSettings
    num_microbatches: int
    dp_size: int
    per_token: bool
    """Megatron's calculate_per_token_loss."""
    global_positions: int
    """All positions of the global batch, padding included: global batch size x L."""
    groups: ParallelGroups | None = None
    """For a loss that looks at whole sequences."""
    metrics: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """By microbatch, so that one which Megatron replays counts once."""
    corrections: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """Metrics of the corrections that bypass mode makes here, by microbatch."""

    @property
    def with_entropy(self) -> bool:
        """Whether it needs the entropy of each token's distribution."""
        return self.config.bypass_mode or self.config.entropy_coef > 0

    def __call__(self, micro: Microbatch, output: Tensor) -> tuple:
        """The microbatch's share of the sum over the global batch of coefficient x token loss.

        Off: a 2-tuple; the schedule multiplies it by cp and divides by M, DDP by dp * cp, which leaves
        M * dp to put back. On: a 3-tuple; the gradient is divided by the sum of the returned counts, so all
        positions are counted, and the loss scaled to match: MoE's auxiliary losses, which that division also
        meets, then do not grow where tokens are masked or rejected.
        """
        config, targets, (rows, length) = self.config, micro.targets, micro.labels.shape
        logprobs, entropy = label_logprobs(output, micro, self.logprobs, with_entropy=self.with_entropy)
        seq_ids = row_ids(rows, length, output.device)
        metrics: dict[str, Metric] = {}
        correction = targets.correction
        if config.bypass_mode:
            metrics["entropy"] = mean_entropy(entropy, correction.valid)
            correction = self._correct(targets, logprobs.detach(), seq_ids, rows)
            self.corrections[micro.index] = correction.metrics
        losses = policy_loss(
            config.loss, logprobs, targets.old_logprobs, targets.advantages, correction, config,
            entropy=entropy, metrics=metrics, seq_ids=seq_ids, num_sequences=rows, groups=self.groups,
        )
        self.metrics[micro.index] = metrics
        share = (losses * targets.coefficients).sum()
        if self.per_token:
            # A fill, not torch.tensor: copying a number from the host would wait for the device.
            count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
            return share * self.global_positions, count, {}
        return share * (self.num_microbatches * self.dp_size), {}

    def _correct(self, targets: TrainingTargets, logprobs: Tensor, seq_ids: Tensor, rows: int) -> Correction:
        """Two policies: the current one against pi_rollout, over one microbatch."""
        return compute_correction(
            logprobs, targets.old_logprobs, targets.correction.valid, seq_ids, num_sequences=rows, config=self.config,
            # What the batch has in all is known, and the other replicas may be at another microbatch.
            groups=None if self.groups is None else replace(self.groups, dp_cp=None), advantages=targets.advantages,
            turn_ids=targets.turn_ids, num_turns=targets.num_turns,
        )

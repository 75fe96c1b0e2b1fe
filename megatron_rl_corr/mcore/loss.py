"""The corrected policy loss as Megatron's schedules want it, in both modes of --calculate-per-token-loss.

b rows of L tokens (of this context-parallel rank), M microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.run import UPDATES_PER_BATCH
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.losses.ratio import as_exponent
from megatron_rl_corr.core.metrics import Mean, Metric, Sum
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
    scored: bool
    """A scoring pass has made the batch's correction; else it is made here, microbatch by microbatch."""
    groups: ParallelGroups | None = None
    """For a loss or a correction that looks at whole sequences."""
    updates: int = UPDATES_PER_BATCH
    """Optimizer steps that the batch makes. With one, pi_old is the current policy, taken here: it has the dropout,
    the kernels and the rounding of this very pass, so r = 1 exactly."""
    first_step: bool = False
    """Measure how far the servers' log-probs are from those that are trained, where the weights are the same."""
    metrics: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """By microbatch, so that one which Megatron replays counts once."""
    corrections: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """Metrics of the corrections that are made here, by microbatch."""
    decisions: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """What the step's update depends on, by microbatch: see `_decision`."""

    @property
    def with_entropy(self) -> bool:
        """Whether it needs the entropy of each token's distribution."""
        return not self.scored or self.config.entropy_coef > 0

    def __call__(self, micro: Microbatch, output: Tensor) -> tuple:
        """The microbatch's share of the sum over the global batch of coefficient x token loss.

        Off: a 2-tuple; the schedule multiplies it by cp and divides by M, DDP by dp * cp, which leaves
        M * dp to put back. On: a 3-tuple; the gradient is divided by the sum of the returned counts, so all
        positions are counted, and the loss scaled to match: MoE's auxiliary losses, which that division also
        meets, then do not grow where tokens are masked or rejected.
        """
        config, targets, (rows, length) = self.config, micro.targets, micro.labels.shape
        logprobs, entropy = label_logprobs(output, micro, self.logprobs, with_entropy=self.with_entropy)
        seq_ids, now = row_ids(rows, length, output.device), logprobs.detach()
        metrics: dict[str, Metric] = {}
        correction = targets.correction
        if not self.scored:
            correction = self._correct(targets, now, seq_ids, rows)
            self.corrections[micro.index] = correction.metrics
            metrics["entropy"] = mean_entropy(entropy, correction.valid)
        losses = policy_loss(
            config.loss, logprobs, self._old_logprobs(targets, now), targets.advantages, correction, config,
            entropy=entropy, metrics=metrics, seq_ids=seq_ids, num_sequences=rows, groups=self.groups,
        )
        self.metrics[micro.index] = metrics
        self.decisions[micro.index] = self._decision(targets, correction, now)
        share = (losses * targets.coefficients).sum()
        if self.per_token:
            # A fill, not torch.tensor: copying a number from the host would wait for the device.
            count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
            return share * self.global_positions, count, {}
        return share * (self.num_microbatches * self.dp_size), {}

    def _old_logprobs(self, targets: TrainingTargets, now: Tensor) -> Tensor:
        """Log pi_old of each label [tokens]."""
        if self.config.bypass_mode:
            return targets.rollout_logprobs
        return now if self.updates == 1 else targets.old_logprobs

    def _correct(self, targets: TrainingTargets, now: Tensor, seq_ids: Tensor, rows: int) -> Correction:
        """The current policy against pi_rollout, over one microbatch."""
        return compute_correction(
            now, targets.rollout_logprobs, targets.loss_mask, seq_ids, num_sequences=rows, config=self.config,
            # What the batch has in all is known, and the other replicas may be at another microbatch.
            groups=None if self.groups is None else replace(self.groups, dp_cp=None), advantages=targets.advantages,
            turn_ids=targets.turn_ids, num_turns=targets.num_turns,
        )

    @torch.no_grad()
    def _decision(self, targets: TrainingTargets, correction: Correction, now: Tensor) -> dict[str, Metric]:
        """What decides whether the step updates the weights.

        kept: tokens in the loss. pulling: those of them that have a gradient, as weight x advantage is not 0 (with an
        entropy bonus each has). first_step_kl: mean k3 over the tokens that were sampled by the trainer's own weights.
        """
        pulling = correction.mask
        if not self.config.entropy_coef:
            pulling = pulling & (correction.weights * targets.advantages != 0)
        made: dict[str, Metric] = {
            "kept": Sum(correction.mask.sum(dtype=torch.float64)[None]),
            "pulling": Sum(pulling.sum(dtype=torch.float64)[None]),
        }
        if self.first_step:
            made["first_step_kl"] = mean_k3(now, targets.rollout_logprobs, targets.own_weights)
        return made


def mean_k3(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mean:
    """The mean of e^D - 1 - D over the tokens [T] of the mask that the server gave a log-prob for.

    NaN where one of `logprobs` is not a number, or where no token is left.
    """
    mask = mask & rollout_logprobs.isfinite()
    d = torch.where(mask, logprobs.double() - rollout_logprobs.double(), 0.0)
    k3 = as_exponent(d).expm1() - d
    return Mean(torch.stack([k3.sum(), mask.sum(dtype=torch.float64)]))

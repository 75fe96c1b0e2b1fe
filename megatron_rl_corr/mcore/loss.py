"""The corrected policy loss as Megatron's schedules want it, in both modes of --calculate-per-token-loss.

b rows of L tokens, V/tp vocabulary columns, M microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.mcore.batch import Microbatch, TrainingTargets
from megatron_rl_corr.parallel.groups import ParallelGroups
from megatron_rl_corr.parallel.support import support_logprobs
from megatron_rl_corr.parallel.vocab import vocab_parallel_logprobs


@dataclass(frozen=True)
class LogprobSettings:
    """How logits become log-probs of the same distribution that the server sampled from."""

    tp_group: ProcessGroup | None
    temperature: float
    vocab_size: int


def label_logprobs(
    logits: Tensor, micro: Microbatch, settings: LogprobSettings, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropy) of a microbatch's labels, flat: logits [b, L, V/tp] -> [b * L].

    Over the support that the server sampled from where it is known, else over the whole vocabulary.
    """
    labels = micro.labels
    if micro.support.shape[2]:
        return support_logprobs(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), micro.support.flatten(0, 1),
            tp_group=settings.tp_group, temperature=settings.temperature, with_entropy=with_entropy,
        )
    return vocab_parallel_logprobs(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), tp_group=settings.tp_group,
        temperature=settings.temperature, vocab_size=settings.vocab_size, with_entropy=with_entropy,
    )


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
    metrics: list[dict[str, Metric]] = field(default_factory=list)
    corrections: list[dict[str, Metric]] = field(default_factory=list)
    """Metrics of the corrections that bypass mode makes here."""

    def __call__(self, micro: Microbatch, logits: Tensor) -> tuple:
        """The microbatch's share of the sum over the global batch of coefficient x token loss.

        Off: a 2-tuple; the schedule multiplies it by cp and divides by M, DDP by dp * cp, which leaves
        M * dp to put back. On: a 3-tuple; the gradient is divided by the sum of the returned counts, so all
        positions are counted, and the loss scaled to match: MoE's auxiliary losses, which that division also
        meets, then do not grow where tokens are masked or rejected.
        """
        config, targets, (rows, length) = self.config, micro.targets, micro.labels.shape
        logprobs, entropy = label_logprobs(
            logits, micro, self.logprobs, with_entropy=config.bypass_mode or config.entropy_coef > 0
        )
        seq_ids = row_ids(rows, length, logits.device)
        metrics: dict[str, Metric] = {}
        correction = targets.correction
        if config.bypass_mode:
            metrics["entropy"] = mean_entropy(entropy, correction.valid)
            correction = self._correct(targets, logprobs.detach(), seq_ids, rows)
        losses = policy_loss(
            config.loss, logprobs, targets.old_logprobs, targets.advantages, correction, config,
            entropy=entropy, metrics=metrics, seq_ids=seq_ids, num_sequences=rows, groups=self.groups,
        )
        self.metrics.append(metrics)
        share = (losses * targets.coefficients).sum()
        if self.per_token:
            # A fill, not torch.tensor: copying a number from the host would wait for the device.
            count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)
            return share * self.global_positions, count, {}
        return share * (self.num_microbatches * self.dp_size), {}

    def _correct(self, targets: TrainingTargets, logprobs: Tensor, seq_ids: Tensor, rows: int) -> Correction:
        """Two policies: the current one against pi_rollout, over one microbatch."""
        correction = compute_correction(
            logprobs, targets.old_logprobs, targets.correction.valid, seq_ids, num_sequences=rows, config=self.config,
            # What the batch has in all is known, and the other replicas may be at another microbatch.
            groups=None if self.groups is None else replace(self.groups, dp_cp=None), advantages=targets.advantages,
        )
        self.corrections.append(correction.metrics)
        return correction

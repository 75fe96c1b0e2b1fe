"""Shared parts of the losses: their inputs, the log-ratio to pi_old, and metrics of how far the policy moved.

T tokens, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.ratios import LOG_CLAMP, k3
from megatron_rl_corr.core.segments import constant
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.metrics import Mean, Metric

K3_CLAMP = 10.0
"""Largest k3 of one token in the clamped metrics and the KL penalty (verl's bound too)."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """The inputs of a policy loss: [T] each, and only logprobs carries a gradient."""

    logprobs: Tensor
    """log pi_theta."""
    old_logprobs: Tensor
    """log pi_old."""
    advantages: Tensor
    correction: Correction
    """Weights, and the mask outside of which the loss is 0."""
    seq_ids: Tensor | None = None
    """int64 in [0, num_sequences); there for a loss with LossKind.whole_sequences."""
    num_sequences: int | None = None
    groups: ParallelGroups | None = None
    """The ranks, where sequences are split over cp."""

    @property
    def mask(self) -> Tensor:
        """bool [T]: valid and not rejected."""
        return self.correction.mask


def inside(mask: Tensor, values: Tensor) -> Tensor:
    """The values [T] in float32, 0, without gradient, outside the mask: a select, so that a
    NaN there is gone.
    """
    # With a Python number for 0 it would be filled on the device at every call: one kernel more.
    return torch.where(mask, values.float(), constant(0.0, torch.float32, values.device))


def moved_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi_theta - log pi_old [T] float32; 0, without gradient, outside the mask."""
    return inside(mask, logprobs.float() - old_logprobs.float())


def as_exponent(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20, and without gradient beyond: what exp and expm1 may be taken of."""
    return log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20, and without gradient beyond: what a square may be taken of. At +-20 the
    gradient is there.
    """
    return torch.where(log_ratio.abs() > LOG_CLAMP, as_exponent(log_ratio.detach()), log_ratio)


def record(
    metrics: dict[str, Metric] | None, mask: Tensor, loss: Tensor, moved: Tensor, **fractions: Tensor
) -> None:
    """Add the means over the kept tokens of the loss, of k3 between pi_old and pi_theta, and of masks.

    k3 is there twice, once clamped to 10 a token. All are reduced in one stacked sum.

    Args:
        metrics: what is added to; None: nothing is computed.
        mask: [T] bool, the kept tokens.
        loss: [T], 0 outside the mask.
        moved: [T] log pi_theta - log pi_old, 0 outside the mask.
        fractions: [T] bool each, False outside the mask: what their means are called -> which tokens count.
    """
    if metrics is None:
        return
    kl = k3(moved.detach())
    columns = {"policy": loss.detach(), "old_new_k3_kl": kl, "old_new_k3_kl_clamped": kl.clamp(max=K3_CLAMP)}
    columns |= fractions
    sums = torch.stack([column.float() for column in (*columns.values(), mask)]).sum(
        dim=1, dtype=torch.float64
    )
    pairs = torch.stack([sums[:-1], sums[-1:].expand(len(columns))], dim=1)
    metrics |= {name: Mean(pair) for name, pair in zip(columns, pairs.unbind(), strict=True)}

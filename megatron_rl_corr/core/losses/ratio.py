"""What the losses share: the clamped log-ratio to pi_old, and the record of how far the policy moved.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.metrics import Mean, Metric
from megatron_rl_corr.core.weights import LOG_CLAMP


def moved_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi_theta - log pi_old [T] float32, clamped to +-20; 0, without gradient, outside the mask."""
    moved = torch.where(mask, logprobs.float() - old_logprobs.float(), 0.0)
    return moved.clamp(-LOG_CLAMP, LOG_CLAMP)


def record(
    metrics: dict[str, Metric] | None, mask: Tensor, loss: Tensor, moved: Tensor, **fractions: Tensor
) -> None:
    """Add the means over kept tokens of the loss, of k3 between pi_old and pi_theta, and of the given [T] masks.

    One stacked reduction; a fraction must be False outside the mask.
    """
    if metrics is None:
        return
    moved = moved.detach()
    columns = {"policy": loss.detach(), "old_new_k3_kl": moved.expm1() - moved, **fractions}
    sums = torch.stack([column.float() for column in (*columns.values(), mask)]).sum(dim=1, dtype=torch.float64)
    pairs = torch.stack([sums[:-1], sums[-1:].expand(len(columns))], dim=1)
    metrics |= {name: Mean(pair) for name, pair in zip(columns, pairs.unbind(), strict=True)}

"""Group-relative advantages whose baseline knows which rows were rejected.

N rows (sequences), G groups (prompts).
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, num_groups: int, kind: str, in_baseline: Tensor | None = None
) -> Tensor:
    """group_mean: r - mean of the group; grpo: that over (population std of the group + 1e-6). [N] float32.

    rewards [N]; group_ids [N] int64 in [0, num_groups); in_baseline [N] bool: rows that count in the mean and
    the std (default all). A group without such a row gets advantage 0. Source: GRPO, arXiv:2402.03300, eq. 4.
    """
    if kind not in ("grpo", "group_mean"):
        raise ValueError(f"advantage must be grpo or group_mean, got {kind!r}")
    counted = torch.ones_like(rewards, dtype=torch.float64) if in_baseline is None else in_baseline.double()
    values = rewards.double()

    def group_sum(row_values: Tensor) -> Tensor:
        return row_values.new_zeros(num_groups).index_add_(0, group_ids, row_values)

    count = group_sum(counted)
    size = count.clamp(min=1)
    # Rewards outside the baseline may be anything, NaN too: select, never multiply.
    mean = group_sum(torch.where(counted > 0, values, 0.0)) / size
    centred = values - mean[group_ids]
    if kind == "grpo":
        variance = group_sum(torch.where(counted > 0, centred.square(), 0.0)) / size
        centred = centred / (variance.sqrt() + STD_EPSILON)[group_ids]
    return torch.where(count[group_ids] > 0, centred, 0.0).float()

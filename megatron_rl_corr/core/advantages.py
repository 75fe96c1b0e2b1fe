"""Group-relative advantages whose baseline knows which rows were rejected.

N rows (sequences), G groups (prompts).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-6
KINDS = ("grpo", "group_mean", "rloo", "raw")


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, num_groups: int, kind: str, in_baseline: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Advantage of each row, [N] float32; mean and std are over the rows of its group that count in the baseline.

    group_mean: r - mean. grpo: that over (population std + 1e-6). rloo: r - mean of the other rows; for a row outside
    the baseline all that count are others. raw: r. A row whose group has no row to compare it with gets 0.

    Sources: GRPO, arXiv:2402.03300, eq. 4; Dr.GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740, eq. 8.

    Args:
        rewards: [N] float; those outside the baseline may be NaN.
        group_ids: [N] int64 in [0, num_groups).
        num_groups: G.
        kind: one of KINDS.
        in_baseline: [N] bool, the rows that mean and std count; None: all.
        all_reduce: sums a table [3, G] float64 of the groups over the ranks that have other rows of theirs, where
            groups are parted; None: groups are whole.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"advantage must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "raw":
        return rewards.float()
    counted = torch.ones_like(rewards, dtype=torch.float64) if in_baseline is None else in_baseline.double()
    values = rewards.double()

    def group_sum(row_values: Tensor) -> Tensor:
        return row_values.new_zeros(num_groups).index_add_(0, group_ids, row_values)

    # Rewards outside the baseline may be anything, NaN too: select, never multiply.
    own = torch.where(counted > 0, values, 0.0)
    if all_reduce is None:
        count, total = group_sum(counted)[group_ids], group_sum(own)[group_ids]
    else:
        table = all_reduce(torch.stack([group_sum(counted), group_sum(own), group_sum(own.square())]))
        count, total, squares = table[:, group_ids].unbind()
    if kind == "rloo":
        others = count - counted
        return torch.where(others > 0, values - (total - own) / others.clamp(min=1), 0.0).float()
    size = count.clamp(min=1)
    centred = values - total / size
    if kind == "grpo":
        if all_reduce is None:
            variance = group_sum(torch.where(counted > 0, centred.square(), 0.0))[group_ids] / size
        else:
            variance = (squares / size - (total / size).square()).clamp(min=0)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    return torch.where(count > 0, centred, 0.0).float()

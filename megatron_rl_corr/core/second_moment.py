"""M2PO's mask: drop the tokens with the largest D^2 until the mean of what is left is within a bound.

T tokens, B bins. Source: M2PO, arXiv:2510.01161.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups

BINS = 4096
LOWEST, OCTAVES = -40.0, 50.0
"""Bins are even in log2(D^2) from 2^-40 to 2^10, 82 an octave: the cut is exact to 0.9 % of D^2."""


def bin_of(log_ratio: Tensor) -> Tensor:
    """The bin of each token's D^2, int64 [T]."""
    exponent = log_ratio.square().log2_()
    return ((exponent - LOWEST) * (BINS / OCTAVES)).clamp_(0, BINS - 1).long()


def keep_within_second_moment(
    log_ratio: Tensor, valid: Tensor, bound: float, groups: ParallelGroups | None
) -> Tensor:
    """bool [T]: tokens in the bins up to the last whose running mean of D^2, over the global batch, is within bound.

    log_ratio float64 [T], 0 outside valid. A histogram instead of a sort: it adds over ranks in one collective, and
    every rank cuts at the same place.
    """
    bins = bin_of(log_ratio)
    columns = torch.stack([valid.double(), log_ratio.square()])
    histogram = columns.new_zeros(2, BINS).index_add_(1, bins, columns)
    if groups is not None:
        histogram = groups.all_reduce_dp_cp(histogram)
    count, total = histogram.cumsum(dim=1).unbind()
    # The running mean grows with the bins, so what is within the bound is a prefix.
    return (total <= bound * count).index_select(0, bins)

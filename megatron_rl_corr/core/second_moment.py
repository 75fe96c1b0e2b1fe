"""M2PO's mask: drop the tokens with the largest D^2 until the mean of what is left is within a bound.

T tokens, B bins. Source: M2PO, arXiv:2510.01161.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups

BINS = 4096
LOWEST, OCTAVES = -40.0, 54.0
"""Bins are even in log2(D^2) from 2^-40 to 2^14, |D| = 128, 75 an octave: the cut is exact to 1 % of D^2."""


@lru_cache(maxsize=8)
def bin_edges(device: torch.device) -> Tensor:
    """The upper edges of all bins but the last, float64 [B - 1]."""
    edges = [2.0 ** (LOWEST + i * OCTAVES / BINS) for i in range(1, BINS)]
    return torch.tensor(edges, dtype=torch.float64, device=device)


def keep_within_second_moment(
    counted: Tensor, bound: float, groups: ParallelGroups | None, *, out: Tensor
) -> Tensor:
    """1 in out [T] for tokens in the bins up to the last whose running mean of D^2 over the batch is within bound.

    counted [2, T] float64: D^2 and 1 of each valid token, 0 elsewhere. A histogram instead of a sort: it adds over
    ranks in one collective, and every rank cuts at the same place.
    """
    bins = torch.bucketize(counted[0], bin_edges(counted.device), right=True)
    histogram = counted.new_zeros(2, BINS).index_add_(1, bins, counted)
    if groups is not None:
        histogram = groups.all_reduce_dp_cp(histogram)
    total, count = histogram.cumsum(dim=1).unbind()
    # The running mean grows with the bins, so what is within the bound is a prefix.
    keep = torch.le(total, bound * count, out=torch.empty_like(total))
    return torch.index_select(keep, 0, bins, out=out)

"""M2PO's mask: drop the tokens of largest D^2 until the mean of D^2 over the rest is within a bound.

T tokens, B bins. Source: M2PO, arXiv:2510.01161.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.core.ratios import TokenRatios
from megatron_rl_corr.core.segments import segment_sums

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.collectives import ParallelGroups

BINS = 4096
LOWEST, OCTAVES = -40.0, 54.0
"""Bins are even in log2(D^2) from 2^-40 to 2^14, |D| = 128, 75 an octave: the cut is exact to 1 % of D^2."""


@lru_cache(maxsize=8)
def bin_edges(device: torch.device) -> Tensor:
    """The upper edges of all bins but the last, float64 [B - 1]."""
    edges = [2.0 ** (LOWEST + i * OCTAVES / BINS) for i in range(1, BINS)]
    return torch.tensor(edges, dtype=torch.float64, device=device)


def bins_of(squares: Tensor) -> Tensor:
    """The bin of each D^2, float64 [T] -> int32 [T]."""
    return torch.bucketize(squares, bin_edges(squares.device), right=True, out_int32=True)


def all_reduce_second_moment_mask(ratios: TokenRatios, bound: float, groups: ParallelGroups | None) -> Tensor:
    """bool [T]: the valid tokens in the bins of D^2 up to the last whose running mean over the batch is within bound.

    A histogram instead of a sort: it adds up over ranks in one all-reduce, and every rank cuts at the same place.

    Args:
        ratios: of the tokens.
        bound: largest mean of D^2 over the kept tokens, `rollout_m2_threshold`.
        groups: the ranks that the batch is sharded over; None: this rank has all of it.
    """
    squares = ratios.log_ratio.square()
    bins = bins_of(squares)
    histogram = segment_sums({"squares": lambda: squares, "tokens": lambda: ratios.valid}, bins, BINS)
    if groups is not None:
        histogram = groups.all_reduce_dp_cp(histogram)
    total, count = histogram.cumsum(dim=1).unbind()
    # The running mean grows with the bins, so the bins within the bound come first.
    return (total <= bound * count).index_select(0, bins) & ratios.valid

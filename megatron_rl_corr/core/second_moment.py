"""M2PO's mask: drop the tokens with the largest D^2 until the mean of what is left is within a bound.

T tokens, B bins. Source: M2PO, arXiv:2510.01161.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.core.moments import constant
from megatron_rl_corr.core.tokens import Tokens

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


def bins_of(squares: Tensor) -> Tensor:
    """The bin of each D^2, float64 [T] -> int64 [T]."""
    return torch.bucketize(squares, bin_edges(squares.device), right=True)


def all_reduce_kept_bins(chunks: Iterable[Tokens], bound: float, groups: ParallelGroups | None) -> Tensor:
    """float64 [B]: 1 for the bins up to the last whose running mean of D^2 over the batch is within bound, else 0.

    A histogram instead of a sort: it adds over chunks, and over ranks in one collective, and every rank cuts at the
    same place.
    """
    histogram = None
    for chunk in chunks:
        nothing = constant(0.0, torch.float64, chunk.valid.device)
        # A select, not a product: a NaN outside the mask must leave nothing behind.
        squares = torch.where(chunk.valid, chunk.difference.double(), nothing).square_()
        if histogram is None:
            histogram = squares.new_zeros(2, BINS)
        histogram.index_add_(1, bins_of(squares), torch.stack([squares, chunk.valid]))
    if groups is not None:
        histogram = groups.all_reduce_dp_cp(histogram)
    total, count = histogram.cumsum(dim=1).unbind()
    # The running mean grows with the bins, so what is within the bound is a prefix.
    return torch.le(total, bound * count, out=torch.empty_like(total))

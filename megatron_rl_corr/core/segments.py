"""Packed tokens to per-sequence and per-turn sums and maxima, and back.

T tokens, S sequences or other segments, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sums(columns: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Sum of each column over each segment: [K, T], [T] -> float64 [K, S]; an empty segment sums to 0.

    float64, because on a GPU the order of additions is not fixed: in float32 two tensor-parallel ranks could
    put the same sequence on different sides of a bound.
    """
    out = columns.new_zeros(columns.shape[0], num_segments, dtype=torch.float64)
    return out.index_add_(1, ids, columns.double())


def segment_maxima(columns: Tensor, ids: Tensor, num_segments: int) -> Tensor:
    """Largest entry of each column in each segment, at least 0: [K, T], [T] -> float64 [K, S]."""
    out = columns.new_zeros(columns.shape[0], num_segments, dtype=torch.float64)
    return out.scatter_reduce_(1, ids.expand(columns.shape[0], -1), columns.double(), "amax", include_self=True)


def turn_segments(seq_ids: Tensor, turn_ids: Tensor) -> Tensor:
    """A segment number in [0, T) for each token, the same for tokens of one turn of one sequence: [T] int64.

    Turns may be interrupted, and turn ids be any integers below 2^31. By a stable sort, so that the number of turns
    need not be known: there are never more than T.
    """
    keys = seq_ids * 2**32 + turn_ids
    ordered, order = keys.sort(stable=True)
    begins = torch.zeros_like(keys)
    begins[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(keys).scatter_(0, order, begins.cumsum(0))


def row_ids(rows: int, length: int, device: torch.device) -> Tensor:
    """The row of each token of flattened rows: int64 [rows * length]."""
    return torch.arange(rows, device=device).repeat_interleave(length)


def flatten_padded(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Padded rows as packed tokens: [B, L], [B, L] -> values [B*L], mask [B*L] bool, seq_ids [B*L] int64, B.

    Padding stays in place (mask False), so that no host sync is needed to count it.
    """
    if values.dim() != 2 or values.shape != mask.shape:
        raise ValueError(
            f"flatten_padded takes values and mask of one shape [B, L], got {tuple(values.shape)} and "
            f"{tuple(mask.shape)}"
        )
    rows, length = values.shape
    return values.reshape(-1), mask.reshape(-1).bool(), row_ids(rows, length, values.device), rows

"""Packed tokens to per-sequence and per-turn sums and maxima, and back.

T tokens, S sequences or other segments, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_segment_sums(columns: Tensor, ids: Tensor, out: Tensor) -> None:
    """Add the sum of each column over each segment: [K, T], [T] into float64 [K, S].

    float64, because on a GPU the order of additions is not fixed: in float32 two tensor-parallel ranks could
    put the same sequence on different sides of a bound.
    """
    out.index_add_(1, ids, columns.double())


def take_segment_maxima(columns: Tensor, ids: Tensor, out: Tensor) -> None:
    """Raise out, float64 [K, S], to the largest entry of each column in each segment: [K, T], [T]."""
    out.scatter_reduce_(1, ids.expand(columns.shape[0], -1), columns.double(), "amax", include_self=True)


def turn_segments(seq_ids: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """A number in [0, S * num_turns) for each token, the same for tokens of one turn of one sequence: [T] int64.

    From the pair alone, so that all context-parallel ranks number alike whatever they hold; turn_ids in
    [0, num_turns). Turns may be interrupted.
    """
    return seq_ids * num_turns + turn_ids


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

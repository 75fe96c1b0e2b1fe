"""Packed tokens to per-sequence sums and maxima, and back.

T tokens, S sequences, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sums(columns: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """Sum of each column over each sequence: [K, T], [T] -> float64 [K, S]; an empty sequence sums to 0.

    float64, because on a GPU the order of additions is not fixed: in float32 two tensor-parallel ranks could
    put the same sequence on different sides of a bound.
    """
    out = columns.new_zeros(columns.shape[0], num_sequences, dtype=torch.float64)
    return out.index_add_(1, seq_ids, columns.double())


def sequence_maxima(columns: Tensor, seq_ids: Tensor, num_sequences: int) -> Tensor:
    """Largest entry of each column in each sequence: [K, T], [T] -> float64 [K, S]; an empty sequence has 0.

    The columns must not be negative.
    """
    out = columns.new_zeros(columns.shape[0], num_sequences, dtype=torch.float64)
    index = seq_ids.expand(columns.shape[0], -1)
    return out.scatter_reduce_(1, index, columns.double(), "amax", include_self=True)


def to_tokens(per_sequence: Tensor, seq_ids: Tensor) -> Tensor:
    """Each token gets its sequence's entry: [S], [T] -> [T]."""
    return per_sequence.index_select(0, seq_ids)


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
    seq_ids = torch.arange(rows, device=values.device).repeat_interleave(length)
    return values.reshape(-1), mask.reshape(-1).bool(), seq_ids, rows

"""Packed tokens and the segments (sequences, turns) that they belong to.

T tokens, K columns, S sequences or other segments, B rows of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

Columns = Mapping[str, Callable[[], Tensor]]
"""Name -> function that makes a column [T]. They are called one by one, so that memory does not
grow with columns.
"""


def segment_sums(columns: Columns, ids: Tensor, count: int) -> Tensor:
    """The sum of each column over each segment: float64 [K, count].

    float64, because on a GPU the order of additions is not fixed: in float32 two tensor-parallel ranks could
    put the same sequence on different sides of a bound.

    Args:
        columns: K functions that make a column [T] of any type.
        ids: [T] integers in [0, count), the segment of each token.
        count: segments.
    """
    sums = torch.zeros(len(columns), count, dtype=torch.float64, device=ids.device)
    for row, make in zip(sums.unbind(), columns.values(), strict=True):
        row.index_add_(0, ids, make().double())
    return sums


def sums_of_episodes(values: Tensor, episode_ids: Tensor) -> Tensor:
    """The sum of a value a sequence over each episode, at the episode's number: [S], 0 behind the last one.

    It has S places, so that nobody need know how many episodes there are.

    Args:
        values: [S] float64.
        episode_ids: [S] int64 in [0, S), the episode of each sequence.
    """
    return torch.zeros_like(values).index_add_(0, episode_ids, values)


def turn_segments(seq_ids: Tensor, turn_ids: Tensor, num_turns: int) -> Tensor:
    """A number in [0, S * num_turns) for each token, the same for tokens of one turn of one
    sequence: [T] int64.

    It depends on the pair alone, so that all context-parallel ranks number alike. Tokens of other turns may
    lie between those of one.

    Args:
        seq_ids: [T] int64 in [0, S).
        turn_ids: [T] int64 in [0, num_turns).
        num_turns: of a sequence, at most.
    """
    return seq_ids * num_turns + turn_ids


def row_ids(rows: int, length: int, device: torch.device) -> Tensor:
    """The row of each token of flattened rows: int64 [rows * length]."""
    return torch.arange(rows, device=device).repeat_interleave(length)


def flatten_padded(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Padded rows as packed tokens: [B, L], [B, L] -> values [B*L], mask [B*L] bool, seq_ids [B*L] int64, B.

    Padding stays in place (mask False), so that it need not be counted on the host.

    Raises:
        ValueError: the two are not of one shape [B, L].
    """
    if values.dim() != 2 or values.shape != mask.shape:
        raise ValueError(
            f"flatten_padded takes values and mask of one shape [B, L], got {tuple(values.shape)} and "
            f"{tuple(mask.shape)}"
        )
    rows, length = values.shape
    return values.reshape(-1), mask.reshape(-1).bool(), row_ids(rows, length, values.device), rows


def padded_at(values: Tensor, places: Tensor, padding: int) -> Tensor:
    """The values [T, ...] at places [T'], and `padding` zeros behind them: [T' + padding, ...]."""
    found = values[places]
    return torch.cat([found, found.new_zeros(padding, *found.shape[1:])]) if padding else found


@lru_cache(maxsize=256)
def constant(values: float | tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small constant tensor, copied to the device once: a copy at every step would make the host wait."""
    return torch.tensor(values, dtype=dtype, device=device)

"""Which positions of a row, or of each sequence of a packed one, a context-parallel rank holds."""

from itertools import pairwise

import torch
from torch import Tensor


def positions_of_rank(rank: int, size: int, boundaries: list[int]) -> Tensor:
    """[t] int64: of each sequence, parts rank and 2 size - 1 - rank of its 2 size equal parts.

    Args:
        boundaries: cu_seqlens of the whole row.
    """
    kept = []
    for start, stop in pairwise(boundaries):
        if size == 1:
            kept.append(torch.arange(start, stop))
            continue
        part, left = divmod(stop - start, 2 * size)
        assert not left, (
            f"a sequence of {stop - start} positions is no multiple of 2 x {size} context-parallel ranks"
        )
        for at in (rank, 2 * size - 1 - rank):
            kept.append(torch.arange(start + at * part, start + (at + 1) * part))
    return torch.cat(kept)

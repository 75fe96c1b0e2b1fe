"""Which tokens of a row a context-parallel rank holds, as a pure function of (rank, size).

L tokens of a row, cp context-parallel ranks, t = L / cp tokens of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def zigzag_positions(
    rank: int, size: int, boundaries: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Positions in the row of the tokens that a context-parallel rank holds, in its order: [t] int64.

    Each sequence is cut into 2 * size chunks, of which a rank holds chunks `rank` and 2 * size - 1 - rank: a causal
    mask then costs every rank the same. Source: Megatron-core, get_batch_on_this_cp_rank (whole rows), and Transformer
    Engine, thd_get_partitioned_indices (packed rows).

    Args:
        rank: of this rank in its context-parallel group.
        size: of the group.
        boundaries: cumulative lengths 0, n1, n1 + n2, ..., L of the row's sequences, padding included; (0, L) for a row
            that is cut as a whole.
        device: of the result.

    Raises:
        ValueError: for a sequence whose length is no multiple of 2 * size.
    """
    if size == 1:
        return torch.arange(boundaries[-1], device=device)
    parts = []
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(
                f"a sequence of {end - start} tokens can't be cut for --context-parallel-size {size}: "
                f"pad it to a multiple of {2 * size}"
            )
        for index in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk, device=device))
    return torch.cat(parts)

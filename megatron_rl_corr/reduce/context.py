"""Which tokens of a row a context-parallel rank holds, and running sums over sequences that
several ranks share.

L tokens of a row, cp context-parallel ranks, t = L / cp tokens of one of them. T tokens of S
sequences on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.reduce.collectives import ParallelGroups, collective


def zigzag_runs(rank: int, size: int, boundaries: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) in the row of the neighbouring tokens that a context-parallel rank holds, in its order:
    two runs of each sequence, or one without context parallelism.

    Each sequence is cut into 2 * size chunks, of which a rank holds chunks `rank` and 2 * size - 1 - rank: a
    causal mask then costs every rank the same. Source: Megatron-core, get_batch_on_this_cp_rank (whole rows),
    and Transformer Engine, thd_get_partitioned_indices (packed rows).

    Args:
        rank: of this rank in its context-parallel group.
        size: of the group.
        boundaries: cumulative lengths 0, n1, n1 + n2, ..., L of the row's sequences, padding included; (0, L)
            for a row that is cut as a whole.

    Raises:
        ValueError: for a sequence whose length is no multiple of 2 * size.
    """
    if size == 1:
        return list(pairwise(boundaries))
    runs = []
    for start, end in zip(boundaries[:-1], boundaries[1:], strict=True):
        chunk, rest = divmod(end - start, 2 * size)
        if rest:
            raise ValueError(
                f"a sequence of {end - start} tokens can't be cut for --context-parallel-size {size}: "
                f"pad it to a multiple of {2 * size}"
            )
        runs += [
            (start + index * chunk, start + (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank)
        ]
    return runs


def zigzag_positions(
    rank: int, size: int, boundaries: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """The positions of all `zigzag_runs`, one behind the other: [t] int64 on the device."""
    if size == 1:
        return torch.arange(boundaries[-1], device=device)
    runs = zigzag_runs(rank, size, boundaries)
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in runs])


@dataclass(frozen=True)
class SequenceChunks:
    """The chunks of `zigzag_positions` that this rank's tokens lie in.

    Example: cp 2, a sequence of 8 tokens: rank 1 has positions 2, 3, 4, 5: numbers [1, 1, 2, 2],
    firsts [0, 0, 2, 2].
    """

    numbers: Tensor
    """[T] int64: each token's chunk among those of all sequences, numbered alike on all ranks."""
    firsts: Tensor
    """[T] int64: the place, among the T, of the first token of its chunk."""
    num_sequences: int
    """S."""
    per_sequence: int
    """Chunks of a sequence: 2 * cp, or 1 without context parallelism."""
    longest: int
    """Tokens of the longest chunk of this rank, padding included."""

    @classmethod
    def of(cls, starts: np.ndarray, seq_ids: Tensor, groups: ParallelGroups) -> SequenceChunks:
        """The chunks of sequences that lie one behind the other.

        Args:
            starts: [S + 1] int64 on the host: where each sequence begins among this rank's tokens,
                with its padding.
            seq_ids: [T] int64.
            groups: with the context-parallel ranks, which share each sequence.
        """
        count, size, rank = len(starts) - 1, groups.cp_size, groups.cp_rank
        first = torch.from_numpy(starts[:-1]).to(seq_ids.device, non_blocking=True)[seq_ids]
        longest = int(np.diff(starts).max(initial=0)) // (1 if size == 1 else 2)
        if size == 1:
            return cls(seq_ids, first, count, 1, longest)
        half = torch.from_numpy(np.diff(starts) // 2).to(seq_ids.device, non_blocking=True)[seq_ids]
        in_second = torch.arange(len(seq_ids), device=seq_ids.device) - first >= half
        numbers = seq_ids * (2 * size) + torch.where(in_second, 2 * size - 1 - rank, rank)
        return cls(numbers, torch.where(in_second, first + half, first), count, 2 * size, longest)

    @collective
    def running_sums_of_sequences(self, values: Tensor, groups: ParallelGroups) -> Tensor:
        """Sums of values [K, T] float64 over each token's sequence up to it, it too: [K, T].

        One all-reduce over cp of K numbers a chunk; alone none.
        """
        within = self._running_sums(values)
        if self.per_sequence == 1:
            return within
        totals = values.new_zeros(len(values), self.num_sequences * self.per_sequence)
        totals = groups.all_reduce_cp(totals.index_add_(1, self.numbers, values))
        by_sequence = totals.view(len(values), self.num_sequences, self.per_sequence)
        earlier = by_sequence.cumsum(dim=2).roll(1, dims=2)
        earlier[:, :, 0] = 0
        return within + earlier.view(len(values), -1)[:, self.numbers]

    def _running_sums(self, values: Tensor) -> Tensor:
        """Sums over each token's chunk up to it, it too: [K, T]; log2(longest) passes, each over
        twice as many tokens.

        A sum over all chunks, less what it was at the chunk's first token, would lose what comes behind a
        number that is 1e16 times as large, as the square of a weight without a bound is.
        """
        total, span = values, 1
        place = torch.arange(values.shape[1], device=values.device) - self.firsts
        while span < self.longest:
            before = torch.where(place[span:] >= span, total[:, :-span], 0.0)
            total = torch.cat([total[:, :span], total[:, span:] + before], dim=1)
            span *= 2
        return total

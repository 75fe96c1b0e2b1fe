"""Which positions and chunks a context-parallel rank holds, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl_corr.reduce.context import SequenceChunks, zigzag_positions

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7, 8, 11]), (1, [2, 3, 4, 5, 9, 10])])
def test_positions_when_cut_for_two_ranks_then_the_outer_or_the_inner_chunks(rank, expected):
    # Sequences of 8 and 4 tokens, in chunks of 2 and 1.
    assert zigzag_positions(rank, 2, (0, 8, 12), CPU).tolist() == expected


def test_positions_when_alone_then_all_of_them():
    assert zigzag_positions(0, 1, (0, 3, 5), CPU).tolist() == [0, 1, 2, 3, 4]


def test_positions_when_a_sequence_can_not_be_cut_then_the_multiple_is_named():
    with pytest.raises(ValueError, match="of 6 tokens can't be cut for .*-size 2: pad it to a multiple of 4"):
        zigzag_positions(0, 2, (0, 8, 14), CPU)


def chunks(rank: int, size: int, starts: list[int]) -> SequenceChunks:
    seq_ids = torch.repeat_interleave(torch.arange(len(starts) - 1), torch.tensor(starts).diff())
    return SequenceChunks.of(np.array(starts), seq_ids, SimpleNamespace(cp_size=size, cp_rank=rank))


def test_chunks_when_on_two_ranks_then_numbered_alike_on_both():
    # Of 8 and 4 tokens each rank has 4 and 2: chunks 0 to 3 of the first sequence, 4 to 7 of the second.
    inner, outer = chunks(1, 2, [0, 4, 6]), chunks(0, 2, [0, 4, 6])
    assert inner.numbers.tolist() == [1, 1, 2, 2, 5, 6] and outer.numbers.tolist() == [0, 0, 3, 3, 4, 7]
    assert inner.firsts.tolist() == outer.firsts.tolist() == [0, 0, 2, 2, 4, 5]
    assert (inner.num_sequences, inner.per_sequence, inner.longest) == (2, 4, 2)


def test_chunks_when_alone_then_whole_sequences():
    alone = chunks(0, 1, [0, 4, 6])
    assert alone.numbers.tolist() == [0, 0, 0, 0, 1, 1] and alone.firsts.tolist() == [0, 0, 0, 0, 4, 4]
    assert (alone.per_sequence, alone.longest) == (1, 4)


def test_running_sums_when_two_ranks_share_a_sequence_then_those_of_the_whole():
    # Values 1 to 8: rank 0 has 1, 2, 7, 8 and rank 1 has 3, 4, 5, 6. Its sums go on from 1 + 2 = 3.
    totals = torch.zeros(1, 4, dtype=torch.float64)
    values = {0: [1.0, 2.0, 7.0, 8.0], 1: [3.0, 4.0, 5.0, 6.0]}

    def summed(rank: int, groups) -> list[float]:
        given = torch.tensor([values[rank]], dtype=torch.float64)
        return chunks(rank, 2, [0, 4]).running_sums_of_sequences(given, groups).tolist()[0]

    for rank in (0, 1):
        summed(rank, SimpleNamespace(all_reduce_cp=lambda own: totals.add_(own).clone()))
    whole = SimpleNamespace(all_reduce_cp=lambda own: totals)
    assert summed(0, whole) == [1.0, 3.0, 28.0, 36.0] and summed(1, whole) == [6.0, 10.0, 15.0, 21.0]

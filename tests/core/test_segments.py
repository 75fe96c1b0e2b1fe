"""Per-sequence reductions of packed tokens, whatever the order of the tokens."""

import pytest
import torch

from megatron_rl_corr.core.segments import flatten_padded, segment_sums, turn_segments

# Sequence 0 has tokens 1, 2, 4; sequence 1 none; sequence 2 has 8; sequence 3 has 16, 32. They interleave.
SEQ_IDS = torch.tensor([3, 0, 0, 2, 3, 0])
COLUMNS = torch.tensor([[16.0, 1, 2, 8, 32, 4], [0.5, 0.25, 0.75, 0, 1, 0.5]])


def sums_of(columns: torch.Tensor, ids: torch.Tensor, segments: int) -> torch.Tensor:
    return segment_sums(
        {str(i): lambda column=column: column for i, column in enumerate(columns)}, ids, segments
    )


def test_segment_sums_when_sequences_interleave_and_one_is_empty_then_each_its_own():
    sums = sums_of(COLUMNS, SEQ_IDS, 4)
    assert sums.tolist() == [[7.0, 0.0, 8.0, 48.0], [1.5, 0.0, 0.0, 1.5]]


def test_segment_sums_when_a_small_term_follows_large_ones_then_it_is_not_lost():
    # In float32 16777216 + 1 is 16777216.
    sums = sums_of(torch.tensor([[16777216.0, 1.0, -16777216.0]]), torch.tensor([0, 0, 0]), 1)
    assert sums.tolist() == [[1.0]]


def test_reductions_when_there_are_no_tokens_then_zeros_for_every_sequence():
    none, ids = torch.zeros(2, 0), torch.zeros(0, dtype=torch.int64)
    assert sums_of(none, ids, 3).tolist() == [[0.0] * 3] * 2
    assert sums_of(none, ids, 0).tolist() == [[], []]


def test_turn_segments_when_turns_are_interrupted_then_one_number_each_and_the_same_whatever_else_is_there():
    # Three turns a sequence at most. Sequence 0: turns 1, 0, 1, 2; sequence 1: turns 1, 0, 1.
    seq_ids = torch.tensor([0, 0, 1, 0, 0, 1, 1])
    turn_ids = torch.tensor([1, 0, 1, 1, 2, 0, 1])
    assert turn_segments(seq_ids, turn_ids, 3).tolist() == [1, 0, 4, 1, 2, 3, 4]
    # Another rank holds only two of these tokens.
    assert turn_segments(seq_ids[4:6], turn_ids[4:6], 3).tolist() == [2, 3]


def test_flatten_padded_when_rows_are_of_unlike_length_then_padding_stays_in_place():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, float("nan"), float("nan")]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    flat, kept, seq_ids, count = flatten_padded(values, mask)
    assert flat.tolist()[:4] == [1.0, 2.0, 3.0, 4.0] and flat[4:].isnan().all()
    assert kept.tolist() == [True, False, True, True, False, False] and kept.dtype == torch.bool
    assert seq_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert count == 2


def test_flatten_padded_when_the_shapes_differ_then_both_are_named():
    with pytest.raises(ValueError) as raised:
        flatten_padded(torch.zeros(2, 3), torch.zeros(2, 4))
    assert str(raised.value) == (
        "flatten_padded takes values and mask of one shape [B, L], got (2, 3) and (2, 4)"
    )

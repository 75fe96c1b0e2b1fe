"""Which rows the last layer works on."""

import numpy as np
import pytest
import torch

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1])


def test_rows_when_of_a_mask_then_the_sampled_ones_before_the_others():
    rows = SampledRows.of(MASK)
    assert (len(rows), rows.num_tokens) == (4, 8)
    assert rows.host_counts.tolist() == [0, 0, 1, 2, 2, 3, 3, 3, 4] and rows.host_counts.dtype == np.int64
    assert rows.rows.tolist() == [1, 2, 4, 7] and rows.others.tolist() == [0, 3, 5, 6]


def test_column_major_when_of_two_rows_of_four_then_the_rows_of_the_transposed_mask():
    turned, mask = SampledRows.of(MASK).column_major(2), MASK.reshape(2, 4).T.reshape(-1)
    assert sorted(turned.rows.tolist()) == SampledRows.of(mask).rows.tolist()
    assert sorted(turned.others.tolist()) == SampledRows.of(mask).others.tolist()


def test_column_major_when_by_hand_then_each_token_at_its_new_place():
    # [[0, 1, 1], [0, 1, 0]]: token t of row r and column c is at 2 c + r.
    rows = SampledRows.of(np.array([0, 1, 1, 0, 1, 0]))
    assert rows.order.tolist() == [1, 2, 4, 0, 3, 5]
    assert rows.column_major(2).order.tolist() == [2, 4, 3, 0, 1, 5]
    assert rows.column_major(1) is rows


def test_spread_then_zero_where_nothing_was_sampled():
    assert SampledRows.of(MASK).spread(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [
        [0, 1, 2, 0, 3, 0, 0, 4]
    ]


def test_rows_when_of_another_number_of_tokens_then_refused():
    with pytest.raises(ValueError, match="sampled rows of 8 tokens do not fit labels of 3"):
        vocab_parallel_logprobs(torch.zeros(3, 5), torch.zeros(3).long(), sampled=SampledRows.of(MASK))

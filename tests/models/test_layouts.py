"""Megatron shards to Hugging Face tensors and back, on small tensors whose numbers say where
each row belongs.
"""

import pytest
import torch

from megatron_rl_corr.models.layouts import (
    GatedUp,
    GroupedQKV,
    GroupedSections,
    InterleavedGateUp,
    LessOne,
    Replicated,
    RowsOrWhole,
    Sections,
    Sharded,
    Transposed,
    Vocabulary,
)


def rows(*values: float, columns: int = 2) -> torch.Tensor:
    """A matrix whose row v holds v, v + 0.5, ..."""
    return torch.tensor([[value + 0.5 * c for c in range(columns)] for value in values])


def assert_inverse(layout, tensors: list[torch.Tensor], size: int) -> None:
    shards = [layout.split(tensors, rank, size) for rank in range(size)]
    merged = layout.merge(shards)
    assert len(merged) == len(tensors)
    for back, tensor in zip(merged, tensors, strict=True):
        assert torch.equal(back, tensor)


# 4 query heads in 2 groups, head_dim 2. Query rows are 10 * head + row, key rows 100 + 10 * group + row,
# value rows 200 + 10 * group + row.
QKV = GroupedQKV(heads=4, groups=2, head_dim=2)
Q = rows(0, 1, 10, 11, 20, 21, 30, 31)
K = rows(100, 101, 110, 111)
V = rows(200, 201, 210, 211)


def test_merge_when_the_shards_lie_behind_each_other_then_no_copy_and_else_the_same_values():
    gathered = rows(0, 1, 2, 3, 4, 5).view(3, 2, 2)
    [whole] = Vocabulary(5, 6).merge(gathered.unbind())
    assert whole.data_ptr() == gathered.data_ptr() and torch.equal(whole, rows(0, 1, 2, 3, 4))
    for shards in (gathered.unbind()[::-1], [gathered[0], gathered[2]], [gathered[:, 0], gathered[:, 1]]):
        [whole] = Sharded(0).merge(shards)
        assert torch.equal(whole, torch.cat(list(shards))) and whole.data_ptr() != gathered.data_ptr()
    [columns] = Sharded(1).merge(gathered.unbind())
    assert torch.equal(columns, torch.cat(gathered.unbind(), dim=1))


def test_qkv_when_cut_over_two_ranks_then_each_has_one_groups_queries_key_and_value():
    first, second = (QKV.split([Q, K, V], rank, 2) for rank in range(2))
    assert torch.equal(first, rows(0, 1, 10, 11, 100, 101, 200, 201))
    assert torch.equal(second, rows(20, 21, 30, 31, 110, 111, 210, 211))


def test_qkv_when_merged_then_the_three_of_hugging_face():
    q, k, v = QKV.merge([rows(0, 1, 10, 11, 100, 101, 200, 201), rows(20, 21, 30, 31, 110, 111, 210, 211)])
    assert torch.equal(q, Q) and torch.equal(k, K) and torch.equal(v, V)


def test_qkv_when_a_bias_then_as_its_weight():
    biases = [tensor[:, 0] for tensor in (Q, K, V)]
    assert QKV.split(biases, 1, 2).tolist() == [20, 21, 30, 31, 110, 111, 210, 211]
    assert_inverse(QKV, biases, 2)


def test_qkv_when_more_ranks_than_key_value_heads_then_refused():
    with pytest.raises(ValueError) as raised:
        QKV.split([Q, K, V], 0, 4)
    assert str(raised.value) == (
        "--tensor-model-parallel-size 4 does not divide the model's 2 key-value heads; use a divisor of them"
    )


def test_qkv_with_gates_when_cut_then_each_groups_gates_stand_behind_its_queries():
    # the gate of a query's row is 1000 more, and stands behind its head in the checkpoint
    layout = GroupedQKV(heads=4, groups=2, head_dim=2, gated=True)
    q = rows(0, 1, 1000, 1001, 10, 11, 1010, 1011, 20, 21, 1020, 1021, 30, 31, 1030, 1031)
    first, second = (layout.split([q, K, V], rank, 2) for rank in range(2))
    assert torch.equal(first, rows(0, 1, 10, 11, 1000, 1001, 1010, 1011, 100, 101, 200, 201))
    assert torch.equal(second, rows(20, 21, 30, 31, 1020, 1021, 1030, 1031, 110, 111, 210, 211))
    for size in (1, 2):
        assert_inverse(layout, [q, K, V], size)


def test_sections_when_cut_then_every_section_by_itself():
    layout = Sections(((2, 4), (4,)))
    first = rows(0, 1, 100, 101, 102, 103)
    assert torch.equal(layout.split([first, rows(200, 201, 202, 203)], 0, 2), rows(0, 100, 101, 200, 201))
    assert torch.equal(layout.split([first, rows(200, 201, 202, 203)], 1, 2), rows(1, 102, 103, 202, 203))
    for size in (1, 2):
        assert_inverse(layout, [first, rows(200, 201, 202, 203)], size)
    with pytest.raises(ValueError, match="a tensor-parallel size of 4 does not divide dimension 0"):
        layout.split([first, rows(200, 201, 202, 203)], 0, 4)


def test_sections_in_turn_when_cut_then_as_if_they_stood_one_behind_the_other():
    # two groups of one row of the first section and two of the second, and of one row of each
    layout = GroupedSections(2, ((2, 4), (2, 2)))
    tensors = [rows(0, 100, 101, 1, 102, 103), rows(200, 300, 201, 301)]
    assert torch.equal(layout.split(tensors, 0, 1), rows(0, 1, 100, 101, 102, 103, 200, 201, 300, 301))
    assert torch.equal(layout.split(tensors, 1, 2), rows(1, 102, 103, 201, 301))
    for size in (1, 2):
        assert_inverse(layout, tensors, size)


def test_less_one_then_exact_from_a_half_to_256_in_bfloat16():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weights = every[(every >= 0.5) & (every <= 256)]
    assert len(weights) > 1_000
    assert LessOne().split([torch.tensor([1.5])], 3, 4).tolist() == [0.5]
    [back] = LessOne().merge([LessOne().split([weights], 0, 2)])
    assert torch.equal(back, weights)
    small = every[(every > 0) & (every < 0.5)]
    [back] = LessOne().merge([LessOne().split([small], 0, 2)])
    assert (back - small).abs().max() <= 2**-9


def test_gated_up_when_cut_then_each_rank_has_its_part_of_both_halves():
    gate, up = rows(0, 1, 2, 3), rows(100, 101, 102, 103)
    first, second = (GatedUp().split([gate, up], rank, 2) for rank in range(2))
    assert torch.equal(first, rows(0, 1, 100, 101))
    assert torch.equal(second, rows(2, 3, 102, 103))
    merged = GatedUp().merge([first, second])
    assert torch.equal(merged[0], gate) and torch.equal(merged[1], up)


def test_interleaved_gate_up_when_cut_then_each_rank_has_its_part_of_both():
    # inputs x outputs: gates are even columns, ups odd ones
    stacked = torch.tensor([[0.0, 100, 1, 101, 2, 102, 3, 103], [10, 110, 11, 111, 12, 112, 13, 113]])
    first, second = (InterleavedGateUp().split([stacked], rank, 2) for rank in range(2))
    assert first.tolist() == [[0, 10], [1, 11], [100, 110], [101, 111]]
    assert second.tolist() == [[2, 12], [3, 13], [102, 112], [103, 113]]
    assert_inverse(InterleavedGateUp(), [stacked], 2)
    assert InterleavedGateUp().split([stacked[0]], 1, 2).tolist() == [2, 3, 102, 103]
    assert_inverse(InterleavedGateUp(), [stacked[0]], 4)


def test_transposed_when_cut_then_along_the_inputs_which_are_rows_of_the_checkpoint():
    stacked = rows(0, 1, 2, 3)
    assert Transposed().split([stacked], 1, 2).tolist() == [[2, 3], [2.5, 3.5]]
    assert_inverse(Transposed(), [stacked], 2)


def test_sharded_when_row_parallel_then_cut_along_columns():
    whole = torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13]])
    assert Sharded(1).split([whole], 1, 2).tolist() == [[2, 3], [12, 13]]
    assert Sharded(0).split([whole], 1, 2).tolist() == [[10, 11, 12, 13]]


def test_vocabulary_when_padded_then_zeros_at_the_end_that_merging_drops():
    # 5 token ids padded to 8 rows over 2 ranks: ids 0-3, then id 4 and three rows of nothing.
    layout, whole = Vocabulary(5, 8), rows(1, 2, 3, 4, 5)
    assert torch.equal(layout.split([whole], 0, 2), rows(1, 2, 3, 4))
    assert layout.split([whole], 1, 2).tolist() == [[5, 5.5], [0, 0], [0, 0], [0, 0]]
    # What training has made of the padding is not a token's.
    trained = [rows(1, 2, 3, 4), rows(5, 77, 78, 79)]
    [merged] = layout.merge(trained)
    assert torch.equal(merged, whole)


def test_replicated_when_split_or_merged_then_the_whole_of_any_rank():
    norm = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(Replicated().split([norm], 3, 4), norm)
    assert torch.equal(Replicated().merge([norm, norm])[0], norm)
    assert Replicated().replicated and not any(
        layout.replicated for layout in (QKV, GatedUp(), Sharded(0), Vocabulary(5, 8))
    )


def test_rows_or_whole_when_the_shard_has_all_rows_then_replicated_and_else_cut():
    layout = RowsOrWhole(6)
    assert layout.resolve(torch.zeros(6, 2)) == Replicated() and layout.resolve(torch.zeros(3, 2)) == Sharded(
        0
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "layout, shapes",
    [
        (Replicated(), [(6,)]),
        (Sharded(0), [(8, 3)]),
        (Sharded(1), [(3, 8)]),
        (Vocabulary(13, 16), [(13, 3)]),
        (Vocabulary(16, 16), [(16, 3)]),
        (GatedUp(), [(8, 3), (8, 3)]),
        (GatedUp(), [(4,), (4,)]),
        (GroupedQKV(heads=8, groups=4, head_dim=3), [(24, 5), (12, 5), (12, 5)]),
        (GroupedQKV(heads=4, groups=4, head_dim=2), [(8, 5), (8, 5), (8, 5)]),
        (GroupedQKV(heads=8, groups=4, head_dim=3), [(24,), (12,), (12,)]),
    ],
)
def test_split_then_merge_when_over_any_number_of_ranks_then_the_same_tensors(layout, shapes, size):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
    assert_inverse(layout, tensors, size)
    # All ranks hold equally much, and together all of it (with the padding).
    shards = [layout.split(tensors, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1


@pytest.mark.parametrize("layout", [Sharded(0), GatedUp()])
def test_split_when_the_size_does_not_divide_the_weight_then_both_are_named(layout):
    weight = torch.zeros(6, 2)
    with pytest.raises(
        ValueError, match=r"size of 4 does not divide dimension 0 of a weight of shape \(6, 2\)"
    ):
        layout.split([weight, weight], 0, 4)

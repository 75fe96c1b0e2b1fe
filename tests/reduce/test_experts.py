"""Sums over the tokens of each expert, by hand, with other ranks played."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl_corr.reduce import experts
from megatron_rl_corr.reduce.layout import ExpertGroups

# 2 layers, 4 experts, 3 values a token.
TABLE = torch.arange(24, dtype=torch.float64).view(2, 4, 3)


def ranks(count: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: count)


def test_sums_when_tokens_go_to_two_experts_each_then_each_has_both():
    # Token 0 goes to experts 0 and 2, then 1 and 0; token 1 to 2 and 1, then 1 and 2.
    ids = torch.tensor([[[0, 2], [1, 0]], [[2, 1], [1, 2]]], dtype=torch.uint8)
    sums = experts.expert_sums(ids, torch.tensor([[1.0, 5.0], [10.0, 0.5]]), 4)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [
        [[1.0, 5.0], [10.0, 0.5], [11.0, 5.5], [0.0, 0.0]],
        [[1.0, 5.0], [11.0, 5.5], [10.0, 0.5], [0.0, 0.0]],
    ]


def test_scatter_when_alone_then_a_copy():
    own = experts.scatter_expert_sums(TABLE, ExpertGroups())
    assert own.tolist() == TABLE.tolist() and own.data_ptr() != TABLE.data_ptr()


@pytest.mark.parametrize("rank", [0, 1])
def test_scatter_when_over_two_ranks_and_replicas_then_the_rows_of_this_ranks_experts(monkeypatch, rank):
    expert, alone, pair = ranks(2), ranks(1), ranks(2)
    reduced = []

    def reduce_scatter(mine, parts, group):
        assert group is expert and all(part.is_contiguous() for part in parts)
        mine.copy_(parts[rank] * 2)  # the other rank has the same

    monkeypatch.setattr(dist, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(dist, "all_reduce", lambda mine, group: reduced.append(group))
    own = experts.scatter_expert_sums(TABLE, ExpertGroups(expert, (None, alone, pair)))
    assert own.tolist() == (TABLE[:, 2 * rank : 2 * rank + 2] * 2).tolist()
    assert reduced == [pair]


def test_whole_when_gathered_then_the_experts_in_the_order_of_ranks(monkeypatch):
    assert experts.whole_expert_sums(TABLE, ExpertGroups()).tolist() == TABLE.tolist()
    halves = torch.stack([TABLE[:, :2], TABLE[:, 2:]])
    monkeypatch.setattr(experts, "all_gather_stacked", lambda own, group: halves)
    assert experts.whole_expert_sums(TABLE[:, :2], ExpertGroups(ranks(2))).tolist() == TABLE.tolist()

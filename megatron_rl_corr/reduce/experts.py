"""Sums over the tokens of each expert, each expert-parallel rank owning its own experts' rows.

T tokens of this rank, L layers with experts of this rank, K experts a token, E experts a layer,
V values a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.layout import ExpertGroups


def expert_sums(expert_ids: Tensor, values: Tensor, num_experts: int) -> Tensor:
    """Sum of the values of the tokens that went to each expert; a token counts once for each
    of its K experts.

    Args:
        expert_ids: [T, L, K], any integer type.
        values: [T, V].
        num_experts: E.

    Returns:
        [L, E, V] float64.
    """
    tokens, layers, top_k = expert_ids.shape
    table = values.new_zeros(layers, num_experts, values.shape[1], dtype=torch.float64)
    each = values.double().repeat_interleave(top_k, dim=0)
    for layer in range(layers):
        table[layer].index_add_(0, expert_ids[:, layer].long().reshape(-1), each)
    return table


@collective
def scatter_expert_sums(table: Tensor, groups: ExpertGroups) -> Tensor:
    """[L, E, V] sums over this rank's own tokens -> [L, E / ep, V] over the stage's: one collective a group.

    A rank whose tokens another rank holds too passes zeros.
    """
    own = table.unflatten(1, (groups.size, -1))
    if groups.size > 1:
        parts = [part.contiguous() for part in own.transpose(0, 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=groups.expert)
    else:
        mine = own[:, 0].clone()
    for group in groups.replicas:
        if group is not None and group.size() > 1:
            dist.all_reduce(mine, group=group)
    return mine


@collective
def whole_expert_sums(own: Tensor, groups: ExpertGroups) -> Tensor:
    """[L, E / ep, V] of each expert-parallel rank -> [L, E, V] on all: one collective."""
    return all_gather_stacked(own, groups.expert).transpose(0, 1).flatten(1, 2)

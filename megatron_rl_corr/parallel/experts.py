"""Sums over the tokens of each expert, each expert-parallel rank owning its own experts' rows.

T tokens of this rank, M layers with experts of this rank, k experts a token, E experts a layer, V values a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.parallel.gather import all_gather_stacked


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of one pipeline stage; None means this rank alone. Together they are all ranks of the stage."""

    expert: ProcessGroup | None = None
    """Ranks that hold other experts: expert parallelism."""
    replicas: tuple[ProcessGroup | None, ...] = ()
    """Their product is the ranks that hold the same experts, whole or cut: expert tensor and data parallelism."""

    @property
    def size(self) -> int:
        return 1 if self.expert is None else self.expert.size()

    def all_reduce_scatter(self, table: Tensor) -> Tensor:
        """[M, E, V] sums over this rank's own tokens -> [M, E / ep, V] over the stage's: one collective a group.

        A rank whose tokens another one holds too gives zeros.
        """
        own = table.unflatten(1, (self.size, -1))
        if self.size > 1:
            parts = [part.contiguous() for part in own.transpose(0, 1)]
            mine = torch.empty_like(parts[0])
            dist.reduce_scatter(mine, parts, group=self.expert)
        else:
            mine = own[:, 0].clone()
        for group in self.replicas:
            if group is not None and group.size() > 1:
                dist.all_reduce(mine, group=group)
        return mine

    def all_gather(self, own: Tensor) -> Tensor:
        """[M, E / ep, V] of each expert-parallel rank -> [M, E, V] on all: one collective."""
        return all_gather_stacked(own, self.expert).transpose(0, 1).flatten(1, 2)


def expert_sums(experts_of: Tensor, values: Tensor, experts: int) -> Tensor:
    """[M, E, V] float64: the values [T, V] of the tokens that went to each expert. experts_of [T, M, k] ids.

    A token counts once for each of its k experts.
    """
    tokens, layers, top_k = experts_of.shape
    table = values.new_zeros(layers, experts, values.shape[1], dtype=torch.float64)
    each = values.double().repeat_interleave(top_k, dim=0)
    for layer in range(layers):
        table[layer].index_add_(0, experts_of[:, layer].long().reshape(-1), each)
    return table

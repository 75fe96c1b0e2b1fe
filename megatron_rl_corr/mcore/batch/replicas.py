"""Sends what a replica's data leader has to the other ranks of its replica."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.layout import Layout


@collective
def broadcast_to_replica(tensors: list[Tensor], layout: Layout) -> None:
    """Send tensors from the first rank of the first stage to its stage, and from there
    down every pipeline.
    """
    if layout.pp_rank == 0:
        _broadcast_from_first(tensors, layout.tp_cp_group)
    _broadcast_from_first(tensors, layout.pp_group)


@collective
def _broadcast_from_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)

"""Sends a step's routed experts from the data leader to its replica: each rank gets its layers of its own tokens.

S samples of this replica, t tokens of a row that a rank's routers see, L layers with experts (l of them on a stage),
K experts a token. `length` is that of whole rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.parallel.context import zigzag_positions
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.layout import Layout


def local_positions(length: int, cp: tuple[int, int], sp: tuple[int, int]) -> Tensor:
    """Positions in the row that the routers of a rank see, in their order: [t] int64.

    Args:
        length: tokens of a whole row.
        cp: (rank, size) of the context-parallel group.
        sp: (rank, size) of the sequence-parallel group; (0, 1) without sequence parallelism.
    """
    positions = zigzag_positions(cp[0], cp[1], (0, length))
    return positions.chunk(sp[1])[sp[0]]


def router_positions(length: int, layout: Layout) -> Tensor:
    """`local_positions` of this rank."""
    tp = layout.tp_group
    sp = (tp.rank(), tp.size()) if layout.sequence_parallel else (0, 1)
    return local_positions(length, (layout.cp_group.rank(), layout.cp_size), sp)


def scatter_routed_experts(
    packed: Tensor | None, rows: int, length: int, *, shape: ExpertShape, stage_layers: tuple[tuple[int, ...], ...],
    layout: Layout,
) -> Tensor:
    """Each rank's part of the samples' routed experts; every rank of the replica calls it.

    The leader sends each stage its layers, and the stage's first rank scatters its tokens over tensor x context: no
    rank but the leader ever holds another stage's layers.

    Args:
        packed: [S, length, L, K] of shape.dtype on the data leader, None on others.
        rows: S.
        length: tokens of a whole row.
        shape: the model's layers with experts.
        stage_layers: the layers of each pipeline stage.
        layout: this rank's process groups.

    Returns:
        [S, t, l, K] of shape.dtype.
    """
    device, stages = communication_device(), layout.pp_group
    places = [[shape.layers.index(layer) for layer in stage] for stage in stage_layers]
    own = places[layout.pp_rank]
    part = None
    if packed is not None:
        for stage in range(1, layout.pp_size):
            if places[stage]:
                selected = packed[:, :, places[stage]].contiguous().to(device)
                dist.send(_bytes(selected), dist.get_global_rank(stages, stage), group=stages)
        part = packed[:, :, own].to(device)
    elif layout.pp_rank > 0 and layout.tp_cp_group.rank() == 0 and own:
        part = torch.empty(rows, length, len(own), shape.top_k, dtype=shape.dtype, device=device)
        dist.recv(_bytes(part), dist.get_global_rank(stages, 0), group=stages)
    tp = layout.tp_group.size()
    ranks = [
        local_positions(length, (cp, layout.cp_size), (rank, tp) if layout.sequence_parallel else (0, 1))
        for cp in range(layout.cp_size) for rank in range(tp)
    ]
    mine = torch.empty(rows, len(ranks[0]), len(own), shape.top_k, dtype=shape.dtype, device=device)
    if not own:
        return mine
    if len(ranks) == 1:
        return part
    group = layout.tp_cp_group
    # Tensor ranks are numbered before context ranks.
    assert group.rank() == layout.cp_group.rank() * tp + layout.tp_group.rank()
    parts = None if part is None else [_bytes(part[:, positions.to(device)]) for positions in ranks]
    received = _bytes(mine)
    dist.scatter(received, parts, dist.get_global_rank(group, 0), group=group)
    return mine


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: no backend sends int16."""
    return tensor.contiguous().view(-1).view(torch.uint8)

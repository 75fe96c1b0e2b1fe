"""A step's routes from the data leader to its replica: each rank gets its own layers' rows of its own tokens.

N samples of this replica, L = --seq-length, t tokens of a row that a rank's routers see, M layers with experts (m of
them on a stage), k experts a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.engines.sglang.routed_experts import ExpertShape
from megatron_rl_corr.parallel.context import zigzag_positions
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.layout import Layout


def local_positions(length: int, cp: tuple[int, int], sp: tuple[int, int]) -> Tensor:
    """Positions in the row [t] int64 that the routers of a rank see, in their order; (rank, size) of either group.

    sp is (0, 1) without sequence parallelism.
    """
    positions = zigzag_positions(cp[0], cp[1], (0, length))
    return positions.chunk(sp[1])[sp[0]]


def scatter_routes(
    packed: Tensor | None, rows: int, length: int, *, shape: ExpertShape, stage_layers: tuple[tuple[int, ...], ...],
    layout: Layout, sequence_parallel: bool,
) -> Tensor:
    """packed [N, L, M, k] of shape.dtype on the data leader (others: None) -> [N, t, m, k] on every rank.

    The leader sends each stage its layers, and the stage's first rank deals its tokens out over tensor x context: no
    rank but the leader ever holds another stage's layers.
    """
    device, stages = communication_device(), layout.pp_group
    places = [[shape.layers.index(layer) for layer in stage] for stage in stage_layers]
    own = places[layout.pp_rank]
    part = None
    if packed is not None:
        for stage in range(1, layout.pp_size):
            if places[stage]:
                there = packed[:, :, places[stage]].contiguous().to(device)
                dist.send(_bytes(there), dist.get_global_rank(stages, stage), group=stages)
        part = packed[:, :, own].to(device)
    elif layout.pp_rank > 0 and layout.tp_cp_group.rank() == 0 and own:
        part = torch.empty(rows, length, len(own), shape.top_k, dtype=shape.dtype, device=device)
        dist.recv(_bytes(part), dist.get_global_rank(stages, 0), group=stages)
    tp = layout.tp_group.size()
    ranks = [
        local_positions(length, (cp, layout.cp_size), (rank, tp) if sequence_parallel else (0, 1))
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

"""Sends a step's routed experts from the data leader to its replica: each rank gets its layers
of its own tokens.

W tokens of the replica's samples one behind the other, padding included, T of them on a context-parallel
rank, L layers with experts (l of them on a stage), K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape, no_routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout


@collective
def scatter_routed_experts(
    packed: Tensor | None,
    boundaries: Sequence[int],
    *,
    shape: ExpertShape,
    stage_layers: tuple[tuple[int, ...], ...],
    layout: Layout,
) -> Tensor:
    """Each rank's part of the samples' routed experts; every rank of the replica calls it.

    The leader sends each stage its layers, and the stage's first rank scatters its tokens over tensor x
    context: no rank but the leader ever holds another stage's layers. Tensor ranks get the same, as a
    microbatch decides which of them its routers see under sequence parallelism.

    Args:
        packed: [W, L, K] of shape.dtype on the data leader, None on others.
        boundaries: 0, n1, n1 + n2, ..., W: where each sample begins.
        shape: the model's layers with experts.
        stage_layers: the layers of each pipeline stage.
        layout: this rank's process groups.

    Returns:
        [T + 1, l, K] of shape.dtype; behind the tokens a row without routes.
    """
    device, stages = communication_device(), layout.pp_group
    places = [[shape.layers.index(layer) for layer in stage] for stage in stage_layers]
    own = places[layout.pp_rank]
    part = None
    if packed is not None:
        for stage in range(1, layout.pp_size):
            if places[stage]:
                selected = packed[:, places[stage]].contiguous().to(device)
                dist.send(_bytes(selected), dist.get_global_rank(stages, stage), group=stages)
        part = packed[:, own].to(device)
    elif layout.pp_rank > 0 and layout.tp_cp_group.rank() == 0 and own:
        part = torch.empty(boundaries[-1], len(own), shape.top_k, dtype=shape.dtype, device=device)
        dist.recv(_bytes(part), dist.get_global_rank(stages, 0), group=stages)
    behind = no_routes(shape, 1)[:, own].to(device)
    mine = torch.empty(
        boundaries[-1] // layout.cp_size, len(own), shape.top_k, dtype=shape.dtype, device=device
    )
    group, tp = layout.tp_cp_group, layout.tp_group.size()
    if not own or group.size() == 1:
        return torch.cat([part if own else mine, behind])
    # Tensor ranks are numbered before context ranks.
    assert group.rank() == layout.cp_group.rank() * tp + layout.tp_group.rank()
    parts = None
    if part is not None:
        by_context = [
            _bytes(part[zigzag_positions(rank, layout.cp_size, boundaries, device)])
            for rank in range(layout.cp_size)
        ]
        parts = [one for one in by_context for _ in range(tp)]
    received = _bytes(mine)
    dist.scatter(received, parts, dist.get_global_rank(group, 0), group=group)
    return torch.cat([mine, behind])


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: no backend sends int16."""
    return tensor.contiguous().view(-1).view(torch.uint8)

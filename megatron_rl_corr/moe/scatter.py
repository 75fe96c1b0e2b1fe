"""Sends a step's routed experts from the data leader to its replica: each rank gets its layers
of its own tokens.

T tokens of a context-parallel rank, padding included, L layers with experts (l of them on a stage), K experts
a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape, no_routes, write_routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_runs
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.slices import scatter_slices


@collective
def scatter_routed_experts(
    samples: Sequence[Tensor | None] | None,
    boundaries: Sequence[int],
    *,
    shape: ExpertShape,
    stage_layers: tuple[tuple[int, ...], ...],
    layout: Layout,
) -> Tensor:
    """Each rank's part of the samples' routed experts; every rank of the replica calls it.

    The leader copies the layers and tokens of one stage and context-parallel rank at a time out of the
    samples, and sends them. Tensor ranks get the same, as a microbatch decides which of them its routers see
    under sequence parallelism.

    Args:
        samples: on the data leader each sample's [tokens - 1, L, K] of shape.dtype, or None; None on others.
        boundaries: 0, n1, n1 + n2, ...: where each sample begins, with its padding.
        shape: the model's layers with experts.
        stage_layers: the layers of each pipeline stage.
        layout: this rank's process groups.

    Returns:
        [T + 1, l, K] of shape.dtype; behind the tokens a row without routes.
    """
    device, tokens = communication_device(), boundaries[-1] // layout.cp_size
    places = [[shape.layers.index(layer) for layer in stage] for stage in stage_layers]
    made = no_routes(shape, tokens + 1, layers=len(places[layout.pp_rank]), device=device)

    def slice_of(stage: int, rank: int) -> Tensor:
        into = torch.empty(
            tokens, len(places[stage]), shape.top_k, dtype=shape.dtype, pin_memory=device.type == "cuda"
        )
        runs = zigzag_runs(rank, layout.cp_size, boundaries)
        write_routes(samples, boundaries, runs, places[stage], into)
        return into

    scatter_slices(
        None if samples is None else slice_of,
        made[:-1],
        layout,
        stages={stage for stage, layers in enumerate(places) if layers},
    )
    return made

"""Candidate layouts of training on a number of GPUs, which of them fit, and which is the best of those."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from megatron_rl_corr.commands.planner.training_memory import TrainingMemory, training_memory
from megatron_rl_corr.models.architectures import Config, num_experts

TIGHT = 0.15
"""Added to the cost of a layout that fits exactly, as the bytes are estimates."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory."""

    layout: TrainLayout
    memory: TrainingMemory
    spare: float
    """Bytes left on the fullest GPU, behind the reserve; negative where it does not fit."""
    cost: float
    """Rough time of a step, in that of a plain data-parallel one; it only orders candidates."""

    @property
    def fits(self) -> bool:
        return self.spare >= 0


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the user has decided of a layout; None leaves it to the search."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    recompute: str | None = None
    offload_optimizer: bool | None = None
    linear_logprobs: bool = False
    distributed_optimizer: bool = True
    expert_imbalance: float = 1.5


def candidates(
    config: Config,
    workload: Workload,
    fixed: Fixed,
    *,
    gpus: int,
    gpus_per_node: int,
    usable: float,
    colocated: bool = False,
) -> list[Candidate]:
    """All layouts that Megatron can make on the GPUs: first those that fit, by cost; then the
    others, by shortage.

    Args:
        config: the model's config.json.
        workload: what a microbatch holds.
        fixed: sizes that are not searched.
        gpus: that train.
        gpus_per_node: tensor-parallel ranks stay on one node.
        usable: bytes of a GPU, less the reserve.
        colocated: servers are on the same GPUs, in turn.

    Raises:
        ValueError: no layout is possible, with the reasons of the nearest one.
    """
    found, refused = [], []
    for layout in _layouts(config, fixed, gpus, gpus_per_node):
        problems = layout.problems(config, workload)
        if problems:
            refused.append(problems)
            continue
        memory = training_memory(config, layout, workload, colocated=colocated)
        spare = usable - memory.fullest.total
        found.append(Candidate(layout, memory, spare, cost(layout) * (1 + TIGHT * _tightness(spare, usable))))
    if not found:
        raise ValueError(f"no layout is possible on {gpus} GPUs: {'; '.join(min(refused, key=len))}")
    return sorted(found, key=lambda one: (0, one.cost) if one.fits else (1, -one.spare))


def cost(layout: TrainLayout) -> float:
    """A rough factor of time, for choosing between layouts that fit.

    Full recompute is one more forward pass (4/3). The others are guesses of what exchanges cost: 10 %
    for each doubling of tensor or expert parallelism, 15 % of context and expert-tensor parallelism,
    20 % of the pipeline, and half as much again for Adam on the host. Measure before you trust an
    order of near ones.
    """
    factor = (4 / 3 if layout.recompute == "full" else 1.0) * (1.5 if layout.offload_optimizer else 1.0)
    doublings = (
        (layout.tensor, 0.1),
        (layout.expert, 0.1),
        (layout.context, 0.15),
        (layout.pipeline, 0.2),
        (layout.expert_tensor, 0.15),
    )
    return factor * math.prod(1 + share * math.log2(size) for size, share in doublings)


def _tightness(spare: float, usable: float) -> float:
    """From 0, where a tenth of the memory or more is spare, to 1, where nothing is."""
    return min(max(1 - spare / (0.1 * usable), 0.0), 1.0)


def _layouts(config: Config, fixed: Fixed, gpus: int, gpus_per_node: int) -> list[TrainLayout]:
    def sizes(given: int | None, limit: int) -> Sequence[int]:
        return (
            [given]
            if given is not None
            else [2**power for power in range(limit.bit_length()) if 2**power <= limit]
        )

    experts = min(gpus, num_experts(config) or 1)
    choices = itertools.product(
        sizes(fixed.tensor, min(gpus, gpus_per_node)),
        sizes(fixed.pipeline, gpus),
        sizes(fixed.context, gpus),
        sizes(fixed.expert, experts),
        [fixed.expert_tensor or 1],
        [fixed.recompute] if fixed.recompute else ["none", "full"],
        [False, True] if fixed.offload_optimizer is None else [fixed.offload_optimizer],
    )
    return [
        TrainLayout(
            gpus=gpus,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            recompute=recompute,
            offload_optimizer=offload,
            linear_logprobs=fixed.linear_logprobs,
            distributed_optimizer=fixed.distributed_optimizer,
            expert_imbalance=fixed.expert_imbalance,
        )
        for tensor, pipeline, context, expert, expert_tensor, recompute, offload in choices
    ]

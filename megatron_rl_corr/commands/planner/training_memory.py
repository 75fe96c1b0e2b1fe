"""Bytes on each GPU that trains: weights, gradients, optimizer, activations, logits, by pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.commands.planner.activations import BF16, FP32, layer_bytes, logits_bytes
from megatron_rl_corr.commands.planner.parameters import ModelParameters, model_parameters
from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from megatron_rl_corr.models.architectures import Config, expert_layers

ADAM = 12
"""Bytes a parameter of the optimizer: float32 weights and Adam's two moments."""
OFFLOADED = 16
"""The same in the host's memory, where Megatron's offloaded Adam keeps a copy of the
float32 gradients too.
"""
VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on a GPU of one pipeline stage."""

    stage: int
    parameters: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations of all microbatches in flight, and of the one layer that is at work."""
    logits: float

    @property
    def state(self) -> float:
        """What stays from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.state + self.activations + self.logits


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on every stage's GPUs, and on a host."""

    stages: tuple[StageMemory, ...]
    host: float
    """Memory of the hosts, all ranks together: Adam's state, always there or while servers
    sample on these GPUs.
    """

    @property
    def fullest(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, in bytes."""
        names = ("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits", "total")
        stages = [{name: round(getattr(stage, name)) for name in names} for stage in self.stages]
        return {"stages": stages, "host": round(self.host)}


def training_memory(
    config: Config, layout: TrainLayout, workload: Workload, *, colocated: bool = False
) -> TrainingMemory:
    """Estimate the bytes on each GPU.

    A parameter takes 2 bytes of weights (bfloat16), 4 of gradients (float32) and 12 of Adam, these
    divided by the ranks that the distributed optimizer splits them over. Stage s of p holds p - s
    microbatches at a time (1F1B).

    On the hosts lie 16 bytes a parameter with an offloaded optimizer. With colocated servers each
    rank's optimizer is moved there while they sample, as many bytes as on its GPU; gradients are
    freed, and take none.

    Args:
        config: the model's config.json.
        layout: one without `problems`.
        workload: the largest microbatch.
        colocated: servers are on the same GPUs, in turn.

    Raises:
        ValueError: the architecture is not supported.
    """
    counted = model_parameters(config)
    stages = tuple(_stage(config, counted, layout, workload, stage) for stage in range(layout.pipeline))
    host = OFFLOADED * counted.total if layout.offload_optimizer else 0.0
    if colocated and not layout.offload_optimizer:
        host = sum(stage.optimizer for stage in stages) * layout.gpus / layout.pipeline
    return TrainingMemory(stages, host)


def padded_vocab_size(config: Config, layout: TrainLayout) -> int:
    """Rows of Megatron's embedding: vocab_size up to a multiple of 128 x tensor-parallel size."""
    multiple = VOCABULARY_MULTIPLE * layout.tensor
    return -(-config["vocab_size"] // multiple) * multiple


def _stage(
    config: Config, counted: ModelParameters, layout: TrainLayout, workload: Workload, stage: int
) -> StageMemory:
    each, last = config["num_hidden_layers"] // layout.pipeline, layout.pipeline - 1
    numbers = range(stage * each, (stage + 1) * each)
    layers = [counted.layers[number] for number in numbers]
    padded = padded_vocab_size(config, layout)
    # A tied output layer is a copy where the last stage is not the first.
    ends = (stage == 0) + (stage == last and not (counted.tied and layout.pipeline == 1))
    dense = sum(layer.split for layer in layers) / layout.tensor + sum(layer.whole for layer in layers)
    dense += ends * padded * config["hidden_size"] / layout.tensor + (
        counted.final_norm if stage == last else 0
    )
    routed = sum(layer.routed for layer in layers) / (layout.expert * layout.expert_tensor)
    parameters, optimizer = dense + routed, 0.0
    if not layout.offload_optimizer:
        sharded = layout.distributed_optimizer
        optimizer = ADAM * (
            dense / (layout.dense_shards if sharded else 1)
            + routed / (layout.expert_shards if sharded else 1)
        )
    tokens = workload.microbatch_tokens / layout.context
    return StageMemory(
        stage=stage,
        parameters=parameters,
        weights=BF16 * parameters,
        gradients=FP32 * parameters,
        optimizer=optimizer,
        activations=tokens * _activation_bytes(config, layout, numbers, stage),
        logits=logits_bytes(config, layout, round(tokens), padded) if stage == last else 0.0,
    )


def _activation_bytes(config: Config, layout: TrainLayout, numbers: range, stage: int) -> float:
    """Bytes a token: the layers' of each microbatch in flight, and the gradients of the
    largest layer at work.

    Where a layer is recomputed, its activations are there beside their gradients.
    """
    with_experts = expert_layers(config)
    kept = sum(layer_bytes(config, layout, has_experts=number in with_experts) for number in numbers)
    kinds = {number in with_experts for number in numbers}
    largest = max(layer_bytes(config, layout, has_experts=kind, recompute="none") for kind in kinds)
    return kept * (layout.pipeline - stage) + largest * (2 if layout.recompute == "full" else 1)

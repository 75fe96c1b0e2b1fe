"""A rank's parameters, each with the rule that ties it to Hugging Face tensors; loading those into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_rl_corr.weight_sync.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.weight_sync.names import NameTable, ParameterRule, global_name


@dataclass(frozen=True)
class ShardRanks:
    """This rank's place among those that cut a parameter; experts have their own tensor-parallel size."""

    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    ep_rank: int = 0


@dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank's model."""

    tensor: Tensor
    local_name: str
    layer_offset: int
    experts_per_rank: int
    table: NameTable

    def rule(self, ep_rank: int) -> ParameterRule:
        """Its rule as expert-parallel rank `ep_rank` would name it (others hold other experts there)."""
        offset = ep_rank * self.experts_per_rank
        name = global_name(self.local_name, layer_offset=self.layer_offset, expert_offset=offset)
        return self.table.find(name)


def local_parameters(
    chunks: Sequence[nn.Module], table: NameTable, *, experts_per_rank: int
) -> list[LocalParameter]:
    """All parameters of this rank's unwrapped GPT model chunks, in the model's order."""
    found = []
    for chunk in chunks:
        layers = chunk.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, tensor in chunk.named_parameters():
            found.append(LocalParameter(tensor, name, offset, experts_per_rank, table))
    return found


@torch.no_grad()
def load_shards(parameters: Sequence[LocalParameter], checkpoint: HFCheckpoint, ranks: ShardRanks) -> None:
    """Fill this rank's parameters from a Hugging Face checkpoint; each rank reads only what it holds.

    Raises ValueError where a tensor is missing or has another shape than the model flags make.
    """
    for parameter in parameters:
        rule = parameter.rule(ranks.ep_rank)
        rank, size = (
            (ranks.expert_tp_rank, ranks.expert_tp_size) if rule.is_expert else (ranks.tp_rank, ranks.tp_size)
        )
        shard = rule.layout.split([checkpoint.tensor(name) for name in rule.hf_names], rank, size)
        if shard.shape != parameter.tensor.shape:
            raise ValueError(
                f"{parameter.local_name}: the checkpoint's {' + '.join(rule.hf_names)} makes a shard of "
                f"{tuple(shard.shape)}, the model has {tuple(parameter.tensor.shape)}; give Megatron the "
                f"sizes of {checkpoint.path / 'config.json'}"
            )
        parameter.tensor.copy_(shard)

"""The parameters of one rank with their rules, and loading a Hugging Face checkpoint into them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hybrid import gpt_name, layers_per_block
from megatron_rl_corr.models.layouts import RowsOrWhole
from megatron_rl_corr.models.mtp import PREFIX as MTP
from megatron_rl_corr.models.names import CheckpointNames, ParameterNames, ParameterRule, global_name

EXPERT_BIAS = ".router.expert_bias"
"""The buffer that balances experts without an auxiliary loss; Megatron changes it after every step."""
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ShardRanks:
    """This rank's coordinates; experts have a tensor-parallel group of their own."""

    tp_rank: int = 0
    tp_size: int = 1
    expert_tp_rank: int = 0
    expert_tp_size: int = 1
    ep_rank: int = 0


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank's model, with what turns its name into a rule."""

    tensor: Tensor
    local_name: str
    layer_offset: int
    experts_per_rank: int
    table: ParameterNames
    is_hybrid: bool = False
    """It belongs to a HybridModel, whose layers have other numbers."""
    is_copy: bool = False
    """Another stage has the same parameter, and sends it."""
    module: nn.Module | None = None
    """The one that has the parameter, by which Megatron-Bridge knows its kind."""

    def rule(self, ep_rank: int) -> ParameterRule:
        """The layout and the Hugging Face tensors of this parameter on one expert-parallel rank.

        Args:
            ep_rank: each holds other experts under the same local names.
        """
        offset = ep_rank * self.experts_per_rank
        name = global_name(self.local_name, layer_offset=self.layer_offset, expert_offset=offset)
        rule = self.table.find(gpt_name(name) if self.is_hybrid else name, self.module)
        layout = rule.layout.resolve(self.tensor) if isinstance(rule.layout, RowsOrWhole) else rule.layout
        return replace(rule, layout=layout, is_copy=rule.is_copy or self.is_copy)


def local_parameters(
    chunks: Sequence[nn.Module], table: ParameterNames, *, experts_per_rank: int
) -> list[LocalParameter]:
    """All parameters of this rank in the model's order, the routers' expert biases included.

    Args:
        chunks: unwrapped chunks of a GPTModel or a HybridModel.
        table: the rules of the checkpoint that the model comes from.
        experts_per_rank: experts of a layer that one expert-parallel rank holds.

    Raises:
        ValueError: the model has another number of layers than the checkpoint, ties its embeddings
            otherwise, lacks the MTP layers of its configuration, or is a HybridModel of other layers.
    """
    found = []
    for chunk in chunks:
        block = layers_per_block(chunk)
        parameters = list(chunk.named_parameters())
        has_mtp = any(name.startswith(MTP) for name, _ in parameters)
        if chunk.config.mtp_num_layers and chunk.post_process and not has_mtp:
            raise ValueError(
                f"--mtp-num-layers {chunk.config.mtp_num_layers}: the script's model has no such layers; "
                "hand get_gpt_mtp_block_spec's result on to its GPTModel as mtp_block_spec"
            )
        table.check_model(
            num_layers=chunk.config.num_layers // block,
            tied=chunk.share_embeddings_and_output_weights,
            mtp_layers=chunk.config.mtp_num_layers or 0,
        )
        layers = chunk.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(EXPERT_BIAS)]
        for name, tensor in [*parameters, *biases]:
            # MTP layers embed tokens too, on the last stage, by a copy that Megatron keeps the same.
            is_copy = has_mtp and name == EMBEDDING and not chunk.pre_process
            module = chunk.get_submodule(name.rpartition(".")[0])
            found.append(
                LocalParameter(tensor, name, offset, experts_per_rank, table, block == 2, is_copy, module)
            )
    return found


@torch.no_grad()
def load_shards(parameters: Sequence[LocalParameter], checkpoint: HFCheckpoint, ranks: ShardRanks) -> None:
    """Copy a Hugging Face checkpoint into this rank's parameters; every rank reads only what it holds.

    Args:
        parameters: all of this rank, as `local_parameters` returns them.
        checkpoint: the model that they come from.
        ranks: this rank's tensor- and expert-parallel coordinates.

    Raises:
        ValueError: the checkpoint lacks a tensor, has another shape than the model, has a tensor
            of these layers that no parameter takes, or MTP layers with an embedding or an output
            layer of their own.
    """
    for parameter in parameters:
        rule = parameter.rule(ranks.ep_rank)
        rank, size = (
            (ranks.expert_tp_rank, ranks.expert_tp_size) if rule.is_expert else (ranks.tp_rank, ranks.tp_size)
        )
        whole = [_read(checkpoint, name, rule) for name in rule.hf_names]
        _check_shapes(parameter, rule, whole, size, checkpoint)
        shard = rule.layout.split(whole, rank, size)
        if shard.shape != parameter.tensor.shape:
            raise ValueError(
                f"{parameter.local_name}: the checkpoint's {' + '.join(rule.hf_names)} makes a shard of "
                f"{tuple(shard.shape)}, the model has {tuple(parameter.tensor.shape)}; give Megatron the "
                f"sizes of {checkpoint.path / 'config.json'}"
            )
        if parameter.local_name.endswith(EXPERT_BIAS):
            # Megatron converts it to float32 in the first forward pass; until then it has the model's dtype.
            parameter.tensor.data = parameter.tensor.data.float()
        parameter.tensor.copy_(shard)
    _check_all_used(parameters, checkpoint, ranks)
    if any(parameter.local_name.startswith(MTP) for parameter in parameters):
        _check_shared(parameters[0].table, checkpoint)


def _read(checkpoint: HFCheckpoint, name: str, rule: ParameterRule) -> Tensor:
    """A tensor of the checkpoint, or this expert's row of it."""
    if rule.row is None:
        return checkpoint.tensor(name)
    if (found := checkpoint.shape(name)[0]) != rule.rows:
        raise ValueError(
            f"{checkpoint.file_of(name)}: {name} stacks {found} experts, and config.json has {rule.rows}; "
            "correct the config.json, or name the folder whose weights that file describes"
        )
    return checkpoint.row(name, rule.row)


def _check_shared(table: CheckpointNames, checkpoint: HFCheckpoint) -> None:
    """Raise ValueError if MTP layers have another embedding or output layer than the model, whose
    Megatron lets them use.
    """
    for copy, name in table.shared_by_mtp.items():
        if copy in checkpoint.names and not torch.equal(checkpoint.tensor(copy), checkpoint.tensor(name)):
            raise ValueError(
                f"--mtp-num-layers: {copy} of {checkpoint.path} differs from {name}, and Megatron's layers "
                "that predict further tokens use the model's own; leave --mtp-num-layers out"
            )


def _check_shapes(
    parameter: LocalParameter,
    rule: ParameterRule,
    whole: Sequence[Tensor],
    size: int,
    checkpoint: HFCheckpoint,
) -> None:
    """ValueError for tensors of other shapes than this rank's parameter, times `size` ranks, is made of.

    A layout would fail in them without a name, or, where only the number of elements is right,
    cut them wrongly.
    """
    shards = [torch.empty(parameter.tensor.shape, device="meta")] * (1 if rule.layout.replicated else size)
    try:
        expected = [tensor.shape for tensor in rule.layout.merge(shards)]
    except RuntimeError:
        raise ValueError(
            f"{parameter.local_name}: the model has {tuple(parameter.tensor.shape)} on each of {size} ranks, "
            f"of which {' + '.join(rule.hf_names)} can't be made; give Megatron the sizes of "
            f"{checkpoint.path / 'config.json'}"
        ) from None
    for name, tensor, shape in zip(rule.hf_names, whole, expected, strict=True):
        if tensor.shape != shape:
            raise ValueError(
                f"{checkpoint.file_of(name)}: {name} is {tuple(tensor.shape)}, and the model "
                f"({parameter.local_name}) needs {tuple(shape)}; give Megatron the sizes of "
                f"{checkpoint.path / 'config.json'}, or the folder whose weights that file describes"
            )


def _check_all_used(
    parameters: Sequence[LocalParameter], checkpoint: HFCheckpoint, ranks: ShardRanks
) -> None:
    """Raise ValueError for a tensor of these layers that no parameter took, such as a bias
    without its flag.
    """
    used = {
        _without_expert_number(name)
        for parameter in parameters
        for name in parameter.rule(ranks.ep_rank).hf_names
    }
    layers, table = {match[0] for name in used if (match := _HF_LAYER.match(name))}, parameters[0].table
    left = [
        name
        for name in checkpoint.names
        if (match := _HF_LAYER.match(name))
        and match[0] in layers
        and _without_expert_number(name) not in used
        and (table.is_of_mtp(name) or table.why_kept(name) is None)
    ]
    if left:
        raise ValueError(
            f"the checkpoint {checkpoint.path}: Megatron's model has no place for {left[0]} (one of "
            f"{len(left)} tensors); do the model flags (--add-qkv-bias, --qk-layernorm, "
            "--moe-shared-expert-intermediate-size, --moe-router-enable-expert-bias, ...) describe that "
            "model?"
        )


_HF_LAYER = re.compile(r"model\.(language_model\.)?layers\.\d+\.")


def _without_expert_number(name: str) -> str:
    """The name with N for the expert's number: a rank holds some of a layer's experts only."""
    return re.sub(r"\.experts\.\d+\.", ".experts.N.", name)

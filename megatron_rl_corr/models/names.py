"""Maps the parameter names of a Megatron GPT model to Hugging Face tensors.

L is the layer's number in the whole model, E the expert's, both from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl_corr.models.architectures import (
    FAMILIES,
    ends,
    hf_name,
    is_tied,
    kept_as_loaded,
    parts_of,
)
from megatron_rl_corr.models.layouts import TensorLayout
from megatron_rl_corr.models.mtp import hf_prefixes, mtp_rows, num_mtp_layers, shared_tensors
from megatron_rl_corr.models.settings import with_defaults

if TYPE_CHECKING:
    from torch import nn

ARCHITECTURES = tuple(FAMILIES)


@dataclass(frozen=True)
class ParameterRule:
    """The layout of one parameter, and the Hugging Face tensors that it consists of.

    Example: for decoder.layers.3.mlp.experts.linear_fc1.weight7, layout GatedUp(), hf_names
    ("model.layers.3.mlp.experts.7.gate_proj.weight",
    "model.layers.3.mlp.experts.7.up_proj.weight"), is_expert True.
    """

    layout: TensorLayout
    hf_names: tuple[str, ...]
    """In the layout's order."""
    is_expert: bool
    is_copy: bool = False
    """Loaded but never sent: the last pipeline stage's copy of a tied embedding."""
    sent_with: tuple[str, ...] = ()
    """Names of all tensors that must reach a server in one request with these; empty if there are none."""
    row: int | None = None
    """The expert's number, where one Hugging Face tensor stacks all experts of a layer: this is that row
    of it.
    """
    rows: int = 0
    """Experts in that tensor."""


class CheckpointNames:
    """What a model's config.json alone says of its checkpoint's tensors; see `NameTable` for the rest.

    Args:
        hf_config: the model's config.json, of any architecture.
    """

    def __init__(self, hf_config: Mapping[str, Any]):
        hf_config = with_defaults(hf_config)
        self.tied = is_tied(hf_config)
        self.shared_by_mtp = shared_tensors(hf_config)
        """Copies that the checkpoint's MTP layers may hold -> the tensors that they are copies of."""
        self._mtp_layers, self._mtp_prefixes = num_mtp_layers(hf_config), tuple(hf_prefixes(hf_config))
        self._num_layers = hf_config["num_hidden_layers"]
        self._kept = [(re.compile(kept.pattern), kept.reason) for kept in kept_as_loaded(hf_config)]

    def why_kept(self, name: str) -> str | None:
        """Why servers keep a tensor of the checkpoint as they loaded it; None if it must be sent."""
        return next((reason for pattern, reason in self._kept if pattern.fullmatch(name)), None)

    def is_of_mtp(self, name: str) -> bool:
        """True if a tensor of the checkpoint is one of its MTP layers' own, which are trained all or none."""
        return name.startswith(self._mtp_prefixes) and name not in self.shared_by_mtp


class ParameterNames(CheckpointNames):
    """The rules for all parameters of one model, whoever gives them; `find` is a subclass's.

    Args:
        hf_config: the model's config.json.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: the checkpoint is quantised, or the vocabulary does not fit.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        super().__init__(hf_config)
        if hf_config.get("quantization_config"):
            raise ValueError(
                "config.json: quantization_config is set, and quantised weights are not loaded; name the "
                "model in bfloat16 here, which servers may serve in block-wise FP8, or convert the checkpoint"
            )
        if padded_vocab_size < hf_config["vocab_size"]:
            raise ValueError(
                f"--vocab-size: Megatron's padded vocabulary of {padded_vocab_size} is smaller than the "
                f"checkpoint's {hf_config['vocab_size']}; give --vocab-size {hf_config['vocab_size']}, and "
                "--tokenizer-type NullTokenizer where Megatron's own tokenizer has fewer ids: it makes no "
                "prompts"
            )

    def find(self, name: str, module: nn.Module | None = None) -> ParameterRule:
        """The layout and the Hugging Face tensors of a parameter.

        Args:
            name: Megatron's, with the numbers that layer and expert have in the whole model
                (see `global_name`).
            module: the one that has the parameter, where a model is there; the table does not need it.

        Raises:
            ValueError: the architecture has no such parameter.
        """
        raise NotImplementedError

    def check_model(self, *, num_layers: int, tied: bool, mtp_layers: int = 0) -> None:
        """Raise ValueError if Megatron's model has other layers or another output layer than the checkpoint.

        Args:
            num_layers: layers of the whole model, by Megatron's configuration.
            tied: whether its output layer uses the embedding's weights.
            mtp_layers: its layers that predict further tokens: all of the checkpoint's, or none.
        """
        if num_layers != self._num_layers:
            raise ValueError(
                f"--num-layers {num_layers}: the checkpoint has {self._num_layers}; "
                f"give --num-layers {self._num_layers}"
            )
        if mtp_layers not in (0, self._mtp_layers):
            remedy = f"give --mtp-num-layers {self._mtp_layers}, or " if self._mtp_layers else ""
            raise ValueError(
                f"--mtp-num-layers {mtp_layers}: the checkpoint has {self._mtp_layers or 'no'} layers that "
                f"predict further tokens (num_nextn_predict_layers in config.json); {remedy}leave it out"
            )
        if tied != self.tied:
            # Otherwise the trainer would have an output layer that the servers lack, or the other way round.
            problem, remedy = ("ties", "leave out") if self.tied else ("does not tie", "give")
            raise ValueError(
                f"config.json: the checkpoint {problem} its word embeddings and Megatron's model "
                f"does{' not' if self.tied else ''}; {remedy} --untie-embeddings-and-output-weights"
            )


class NameTable(ParameterNames):
    """The rules of the tables in models/architectures.py.

    Args:
        hf_config: the model's config.json.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: the architecture is not supported, the checkpoint is quantised, or the
            vocabulary does not fit.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        hf_config, parts = with_defaults(hf_config), parts_of(with_defaults(hf_config))
        super().__init__(hf_config, padded_vocab_size=padded_vocab_size)
        self._config = hf_config
        layer_rows = [row for part in parts for row in part(hf_config)]
        rows = [*ends(hf_config, padded_vocab_size), *layer_rows, *mtp_rows(hf_config, layer_rows)]
        self._rules = [(re.compile(row.pattern), row) for row in rows]

    def find(self, name: str, module: nn.Module | None = None) -> ParameterRule:
        for pattern, row in self._rules:
            match = pattern.fullmatch(name)
            if match:
                numbers = match.groupdict()
                names, together = (
                    tuple(hf_name(template.format(**numbers), self._config) for template in templates)
                    for templates in (row.hf_names, row.sent_with)
                )
                expert = int(numbers["E"]) if row.stacked else None
                return ParameterRule(
                    row.layout, names, "E" in numbers, row.is_copy, together, expert, row.stacked
                )
        raise ValueError(
            f"Megatron's parameter {name} does not exist in the checkpoint's architecture; do the model "
            "flags (--num-experts, --qk-layernorm, --disable-bias-linear, --mtp-num-layers, ...) describe "
            "that model?"
        )


_EXPERT_NUMBER = re.compile(r"(local_experts\.|linear_fc[12]\.(?:weight|bias))(\d+)")
_LAYER_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)")


def global_name(local_name: str, *, layer_offset: int, expert_offset: int) -> str:
    """A local parameter name with this rank's layer and expert numbers replaced by those of the whole model.

    Args:
        local_name: the name within this rank's model chunk.
        layer_offset: layers before the chunk's first one.
        expert_offset: experts before this rank's first one.
    """
    name = _LAYER_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}", local_name)
    if ".mlp.experts." in name:
        name = _EXPERT_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}", name)
    return name

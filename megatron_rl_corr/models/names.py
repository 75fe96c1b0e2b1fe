"""Which Hugging Face tensors each parameter of a Megatron GPT model is made of, by its name.

L is the layer's number in the whole model, E the expert's, both from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.models.architectures import FAMILIES, ends, is_tied, kept_as_loaded
from megatron_rl_corr.models.layouts import Layout

ARCHITECTURES = tuple(FAMILIES)


@dataclass(frozen=True)
class ParameterRule:
    """One parameter's layout and the names of its Hugging Face tensors, in the layout's order."""

    layout: Layout
    hf_names: tuple[str, ...]
    is_expert: bool
    is_copy: bool = False
    """Loaded, but never sent: a tied embedding's second copy, on the last pipeline stage."""
    sent_with: tuple[str, ...] = ()
    """Where servers load its tensors only together with others in one request: the names of all of these."""


class NameTable:
    """The rules for one model, from its Hugging Face config.json."""

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        kind = hf_config.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(
                f"--rollout-hf-checkpoint: model_type {kind!r} has no table of weight names; "
                f"supported: {', '.join(ARCHITECTURES)}; take a model of one of these, or describe this one's parts in "
                "megatron_rl_corr/models/architectures.py"
            )
        if hf_config.get("quantization_config"):
            raise ValueError(
                "--rollout-hf-checkpoint: its weights are quantised (quantization_config in config.json), and neither "
                "loaded nor sent so; convert it to bfloat16"
            )
        if padded_vocab_size < hf_config["vocab_size"]:
            raise ValueError(
                f"--vocab-size: Megatron's padded vocabulary of {padded_vocab_size} is smaller than the "
                f"checkpoint's {hf_config['vocab_size']}; give --vocab-size {hf_config['vocab_size']}"
            )
        self._tied, self._num_layers = is_tied(hf_config), hf_config["num_hidden_layers"]
        rows = [*ends(hf_config, padded_vocab_size), *(row for part in FAMILIES[kind] for row in part(hf_config))]
        self._rules = [(re.compile(row.pattern), row) for row in rows]
        self._kept = [(re.compile(kept.pattern), kept.reason) for kept in kept_as_loaded(hf_config)]

    def check_model(self, *, num_layers: int, tied: bool) -> None:
        """ValueError for a Megatron model whose layers or output layer are not the checkpoint's."""
        if num_layers != self._num_layers:
            raise ValueError(
                f"--num-layers {num_layers}: the checkpoint has {self._num_layers}; "
                f"give --num-layers {self._num_layers}"
            )
        if tied != self._tied:
            # Otherwise an output layer would be trained that the servers don't have, or the other way round.
            problem, remedy = ("ties", "leave out") if self._tied else ("does not tie", "give")
            raise ValueError(
                f"--rollout-hf-checkpoint: the checkpoint {problem} its word embeddings and Megatron's model "
                f"does{' not' if self._tied else ''}; {remedy} --untie-embeddings-and-output-weights"
            )

    def why_kept(self, name: str) -> str | None:
        """Why a tensor of the checkpoint is never sent, so that servers keep it as they have loaded it; None: it is."""
        return next((reason for pattern, reason in self._kept if pattern.fullmatch(name)), None)

    def find(self, name: str) -> ParameterRule:
        """The rule for a name with global layer and expert numbers; ValueError if there is none."""
        for pattern, row in self._rules:
            match = pattern.fullmatch(name)
            if match:
                numbers = match.groupdict()
                names, together = (
                    tuple(template.format(**numbers) for template in templates)
                    for templates in (row.hf_names, row.sent_with)
                )
                return ParameterRule(row.layout, names, "E" in numbers, row.is_copy, together)
        raise ValueError(
            f"Megatron parameter {name} has no counterpart in the checkpoint's architecture; "
            "do the model flags (--num-experts, --qk-layernorm, --disable-bias-linear, --mtp-num-layers, ...) describe "
            "that model?"
        )


_EXPERT_NUMBER = re.compile(r"(local_experts\.|linear_fc[12]\.weight)(\d+)")
_LAYER_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)")


def global_name(local_name: str, *, layer_offset: int, expert_offset: int) -> str:
    """A shard's parameter name with this rank's layer and expert numbers turned into the whole model's."""
    name = _LAYER_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}", local_name)
    if ".mlp.experts." in name:
        name = _EXPERT_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}", name)
    return name

"""Which Hugging Face tensors each parameter of a Megatron GPT model is made of: a table of rules.

Both of Megatron's layer specs are covered: the local one, and Transformer Engine's, which folds a norm into
the linear layer behind it. L is the layer's number in the whole model, E the expert's, both from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.weight_sync.layouts import GatedUp, GroupedQKV, Layout, Replicated, Sharded, Vocabulary

ARCHITECTURES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ParameterRule:
    """One parameter's layout and the names of its Hugging Face tensors, in the layout's order."""

    layout: Layout
    hf_names: tuple[str, ...]
    is_expert: bool


class NameTable:
    """The rules for one model, from its Hugging Face config.json."""

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        kind = hf_config.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"--rollout-hf-checkpoint: model_type {kind!r} has no table of weight names; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        if hf_config.get("tie_word_embeddings"):
            raise ValueError(
                "--rollout-hf-checkpoint: tied word embeddings are not supported; "
                "use a checkpoint with tie_word_embeddings false"
            )
        if padded_vocab_size < hf_config["vocab_size"]:
            raise ValueError(
                f"--vocab-size: Megatron's padded vocabulary of {padded_vocab_size} is smaller than the "
                f"checkpoint's {hf_config['vocab_size']}; give --vocab-size {hf_config['vocab_size']}"
            )
        self._rules = _rules(hf_config, padded_vocab_size)

    def find(self, name: str) -> ParameterRule:
        """The rule for a name with global layer and expert numbers; ValueError if there is none."""
        for pattern, layout, templates in self._rules:
            match = pattern.fullmatch(name)
            if match:
                numbers = match.groupdict()
                names = tuple(template.format(**numbers) for template in templates)
                return ParameterRule(layout, names, "E" in numbers)
        raise ValueError(
            f"Megatron parameter {name} has no counterpart in the checkpoint's architecture; "
            "do the model flags (--num-experts, --qk-layernorm, --disable-bias-linear, ...) describe that "
            "model?"
        )


def _rules(config: Mapping[str, Any], padded_vocab_size: int) -> list[tuple[re.Pattern, Layout, list[str]]]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    qkv = GroupedQKV(heads, config["num_key_value_heads"], head_dim)
    vocabulary = Vocabulary(config["vocab_size"], padded_vocab_size)
    row, whole, gated = Sharded(1), Replicated(), GatedUp()
    layer, hf = r"decoder\.layers\.(?P<L>\d+)\.", "model.layers.{L}."
    attention, hf_attention = layer + r"self_attention\.", hf + "self_attn."
    expert, hf_expert = layer + r"mlp\.experts\.", hf + "mlp.experts.{E}."
    table = [
        (r"embedding\.word_embeddings\.weight", vocabulary, ["model.embed_tokens.weight"]),
        (r"output_layer\.weight", vocabulary, ["lm_head.weight"]),
        (r"decoder\.final_layernorm\.weight", whole, ["model.norm.weight"]),
        (layer + r"(input_layernorm|self_attention\.linear_qkv\.layer_norm)(\.|_)weight", whole,
         [hf + "input_layernorm.weight"]),
        (attention + r"linear_qkv\.weight", qkv, [hf_attention + f"{part}_proj.weight" for part in "qkv"]),
        (attention + r"linear_proj\.weight", row, [hf_attention + "o_proj.weight"]),
        (attention + r"q_layernorm\.weight", whole, [hf_attention + "q_norm.weight"]),
        (attention + r"k_layernorm\.weight", whole, [hf_attention + "k_norm.weight"]),
        (layer + r"(pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)(\.|_)weight", whole,
         [hf + "post_attention_layernorm.weight"]),
        (layer + r"mlp\.linear_fc1\.weight", gated, [hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"]),
        (layer + r"mlp\.linear_fc2\.weight", row, [hf + "mlp.down_proj.weight"]),
        (layer + r"mlp\.router\.weight", whole, [hf + "mlp.gate.weight"]),
        (expert + r"local_experts\.(?P<E>\d+)\.linear_fc1\.weight", gated,
         [hf_expert + "gate_proj.weight", hf_expert + "up_proj.weight"]),
        (expert + r"local_experts\.(?P<E>\d+)\.linear_fc2\.weight", row, [hf_expert + "down_proj.weight"]),
        # Grouped experts of Transformer Engine: linear_fc1.weight7 is expert 7's.
        (expert + r"linear_fc1\.weight(?P<E>\d+)", gated,
         [hf_expert + "gate_proj.weight", hf_expert + "up_proj.weight"]),
        (expert + r"linear_fc2\.weight(?P<E>\d+)", row, [hf_expert + "down_proj.weight"]),
    ]
    return [(re.compile(pattern), layout, names) for pattern, layout, names in table]


_EXPERT_NUMBER = re.compile(r"(local_experts\.|linear_fc[12]\.weight)(\d+)")
_LAYER_NUMBER = re.compile(r"(decoder\.layers\.)(\d+)")


def global_name(local_name: str, *, layer_offset: int, expert_offset: int) -> str:
    """A shard's parameter name with this rank's layer and expert numbers turned into the whole model's."""
    name = _LAYER_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + layer_offset}", local_name)
    if ".mlp.experts." in name:
        name = _EXPERT_NUMBER.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}", name)
    return name

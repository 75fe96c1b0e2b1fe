"""The multi-token prediction (MTP) layers behind a checkpoint's own ones, as Megatron and
Hugging Face name them.

Layer k of n reads the model's last hidden state h_i and the token t_{i+1+k}: h' =
eh_proj([enorm(embed(t)), hnorm(h)]), then a decoder layer, shared_head.norm and the output layer.
Embedding and output layer are the model's own, of which some checkpoints hold copies.
"""

from __future__ import annotations

from megatron_rl_corr.models.architectures import LAYER, Config, ParameterRow
from megatron_rl_corr.models.layouts import Replicated, Sharded

FAMILIES_WITH_MTP = ("deepseek_v3",)
"""`model_type`s whose extra layers are known; those of others are tensors like any others."""
PREFIX = "mtp.layers."
"""What Megatron's names of their parameters begin with."""


def num_mtp_layers(config: Config) -> int:
    """Layers that predict further tokens, by config.json."""
    known = config.get("model_type") in FAMILIES_WITH_MTP
    return (config.get("num_nextn_predict_layers") or 0) if known else 0


def hf_prefixes(config: Config) -> list[str]:
    """What the Hugging Face names of each MTP layer begin with: "model.layers.61." in V3, whose
    own end with 60.
    """
    first = config["num_hidden_layers"]
    return [f"model.layers.{first + layer}." for layer in range(num_mtp_layers(config))]


def shared_tensors(config: Config) -> dict[str, str]:
    """Name of each copy that a checkpoint may hold -> the tensor of the model that
    Megatron's MTP layers use.
    """
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {prefix + copy: name for prefix in hf_prefixes(config) for copy, name in shared.items()}


def mtp_rows(config: Config, layer_rows: list[ParameterRow]) -> list[ParameterRow]:
    """The rows of all MTP layers.

    Args:
        config: the model's config.json.
        layer_rows: those of the architecture's decoder layers, which each of them has one of.
    """
    rows = []
    for layer, hf in enumerate(hf_prefixes(config)):
        megatron = PREFIX.replace(".", r"\.") + rf"{layer}\."
        rows += [
            ParameterRow(megatron + r"enorm\.weight", Replicated(), (hf + "enorm.weight",)),
            ParameterRow(megatron + r"hnorm\.weight", Replicated(), (hf + "hnorm.weight",)),
            ParameterRow(megatron + r"eh_proj\.weight", Sharded(0), (hf + "eh_proj.weight",)),
            ParameterRow(
                megatron + r"final_layernorm\.weight", Replicated(), (hf + "shared_head.norm.weight",)
            ),
        ]
        # In a checkpoint Megatron calls the decoder layer transformer_layer.
        inside = megatron + r"(?:mtp_model_layer|transformer_layer)\."
        number = str(config["num_hidden_layers"] + layer)
        for row in layer_rows:
            names, together = (
                tuple(name.replace("{L}", number) for name in names)
                for names in (row.hf_names, row.sent_with)
            )
            rows.append(
                row._replace(pattern=row.pattern.replace(LAYER, inside), hf_names=names, sent_with=together)
            )
    return rows

"""The supported architectures, as tables from Megatron parameters to Hugging Face tensors.

An architecture is a tuple of parts (`FAMILIES`); a part is a function from config.json to rows of its
table. The rows cover both of Megatron's layer specs: the local one, and Transformer Engine's, which
fuses a norm into the linear layer after it. {L} is the layer's number in the whole model, {E} the
expert's, both from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_rl_corr.models.layouts import (
    GatedUp,
    GroupedQKV,
    GroupedSections,
    InterleavedGateUp,
    LessOne,
    Replicated,
    RowsOrWhole,
    Sections,
    Sharded,
    TensorLayout,
    Transposed,
    Vocabulary,
)

Config = Mapping[str, Any]
"""A Hugging Face config.json."""


class ParameterRow(NamedTuple):
    r"""One row of a table: which Hugging Face tensors a Megatron parameter consists of.

    Example: `ParameterRow(r"decoder\.final_layernorm\.weight", Replicated(), ("model.norm.weight",))`.
    """

    pattern: str
    """Regular expression for the Megatron name, with the groups L and E for the layer and the expert."""
    layout: TensorLayout | RowsOrWhole
    hf_names: tuple[str, ...]
    """Names of its Hugging Face tensors, in the layout's order, with {L} and {E}."""
    is_copy: bool = False
    """Loaded but never sent: another parameter holds the same weights."""
    sent_with: tuple[str, ...] = ()
    """Names of all tensors that a server fuses into one parameter and drops unless one request
    brings them all.
    """
    stacked: int = 0
    """Experts whose tensors one Hugging Face tensor stacks, this one as its row {E}; 0: each has its own."""


class KeptTensors(NamedTuple):
    """Tensors of a checkpoint that are never sent: servers keep the values that they loaded."""

    pattern: str
    """Regular expression for the Hugging Face name."""
    reason: str


KINDS = ("weight", "bias")
LAYER, HF_LAYER = r"decoder\.layers\.(?P<L>\d+)\.", "model.layers.{L}."
ATTENTION, HF_ATTENTION = LAYER + r"self_attention\.", HF_LAYER + "self_attn."
MLP, HF_MLP = LAYER + r"mlp\.", HF_LAYER + "mlp."


def ends(config: Config, padded_vocab_size: int) -> list[ParameterRow]:
    """Embedding, output layer and final norm.

    Args:
        config: the model's config.json.
        padded_vocab_size: rows of Megatron's embedding.

    With tied embeddings only a last pipeline stage that is not also the first has an output layer,
    and it is a copy.
    """
    vocabulary = Vocabulary(config["vocab_size"], padded_vocab_size)
    embedding, tied = "model.embed_tokens.weight", is_tied(config)
    return [
        ParameterRow(r"embedding\.word_embeddings\.weight", vocabulary, (embedding,)),
        ParameterRow(
            r"output_layer\.weight", vocabulary, (embedding if tied else "lm_head.weight",), is_copy=tied
        ),
        ParameterRow(r"decoder\.final_layernorm\.weight", Replicated(), ("model.norm.weight",)),
    ]


def is_tied(config: Config) -> bool:
    """True if the output layer uses the embedding's weights."""
    return bool(config.get("tie_word_embeddings", False))


WINDOWED = ("gpt_oss",)
"""Families of which every other layer, from the first on, attends within a window."""
WINDOWED_TYPES = ("sliding_attention", "full_attention")

LINEAR_TYPES = ("linear_attention", "full_attention")

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""config.json's names of the number of experts of a layer."""


def num_experts(config: Config) -> int | None:
    """Experts of a layer; None for a dense model."""
    return next((config[key] for key in EXPERTS if config.get(key)), None)


def expert_layers(config: Config) -> tuple[int, ...]:
    """Numbers of the layers that have experts, from 0; none for a dense model."""
    if num_experts(config) is None:
        return ()
    step, first = config.get("decoder_sparse_step", 1), config.get("first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers") or ()
    return tuple(
        layer
        for layer in range(config["num_hidden_layers"])
        if layer >= first and layer not in dense and (layer + 1) % step == 0
    )


def window_layers(config: Config) -> tuple[int, ...]:
    """Numbers of the layers that attend within a window, from 0; none for a family without such layers."""
    if config.get("model_type") not in WINDOWED:
        return ()
    kinds = config.get("layer_types") or [WINDOWED_TYPES[i % 2] for i in range(config["num_hidden_layers"])]
    return tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED_TYPES[0])


def linear_layers(config: Config) -> tuple[int, ...]:
    """Numbers of the layers whose attention is a gated delta net, from 0; none for a family without such.

    All but every `full_attention_interval`-th, as servers have it, which read no `layer_types`.
    """
    step = config.get("full_attention_interval")
    return tuple(layer for layer in range(config["num_hidden_layers"] if step else 0) if (layer + 1) % step)


def of_text(config: Config) -> Config:
    """The settings of the part for text of a model of images and text; any other config.json as it is.

    Outside of `text_config` engines read those of OF_WHOLE alone; whether embeddings are tied, only there.

    Raises:
        ValueError: it has another part for text.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if not (isinstance(kind, str) and kind in TEXT_OF) or text is None:
        return config
    if not isinstance(text, Mapping) or text.get("model_type", TEXT_OF[kind]) != TEXT_OF[kind]:
        raise ValueError(
            f"config.json: text_config of a {kind} must be an object with model_type {TEXT_OF[kind]}; "
            "correct it"
        )
    whole = {"tie_word_embeddings": False} | {key: config[key] for key in OF_WHOLE if key in config}
    return {**text, **whole}


OF_WHOLE = (
    "model_type",
    "architectures",
    "tie_word_embeddings",
    "quantization_config",
    "transformers_version",
    "dtype",
    "torch_dtype",
)
"""What engines read of a model of images and text outside of `text_config`."""


_DRAFTS = "multi-token prediction only drafts tokens, which the trained weights verify"


def kept_as_loaded(config: Config) -> list[KeptTensors]:
    """Tensors that training never changes; any other tensor that is not sent is an error
    (weight_sync/coverage.py).
    """
    kept = [
        KeptTensors(
            r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)", "computed from config.json; not a weight"
        ),
        KeptTensors(
            r".*\.([kvq]|kv|prob)_scale(_float)?", "scale of a quantised KV cache: calibrated, not trained"
        ),
    ]
    if config.get("model_type") in TEXT_OF:
        kept.append(KeptTensors(r"(model\.)?visual\..*", "prompts are text, of which no image is a part"))
    if linear_layers(config):
        kept += [
            KeptTensors(r".*norm\.gemma_weight", "1 more than the norm's weight, with which it is set"),
            KeptTensors(r"mtp\..*", _DRAFTS),
        ]
    if is_tied(config):
        kept.append(KeptTensors(r"lm_head\.weight", "tied to the embedding, which is sent"))
    # Their numbers follow the model's own layers: 61 in DeepSeek-V3, 46 in GLM-4.5-Air.
    first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    layers = "|".join(str(first + i) for i in range(count))
    if layers:
        kept.append(KeptTensors(rf"model\.layers\.({layers})\..*", _DRAFTS))
    return kept


def norms(config: Config) -> list[ParameterRow]:
    """The norms before attention and before the MLP."""
    return [
        ParameterRow(
            LAYER + r"(input_layernorm|self_attention\.(linear_qkv|in_proj)\.layer_norm)(\.|_)weight",
            Replicated(),
            (HF_LAYER + "input_layernorm.weight",),
        ),
        ParameterRow(
            LAYER + r"(pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)(\.|_)weight",
            Replicated(),
            (HF_LAYER + "post_attention_layernorm.weight",),
        ),
    ]


def grouped_attention(config: Config) -> list[ParameterRow]:
    """Attention with key-value heads that groups of query heads share, or each its own."""
    return _attention(_qkv(config))


def gated_attention(config: Config) -> list[ParameterRow]:
    """As grouped_attention, its output times the sigmoid of a gate for each number, which is made with the
    queries.
    """
    return _attention(replace(_qkv(config), gated=True))


def _attention(layout: GroupedQKV) -> list[ParameterRow]:
    return [
        ParameterRow(ATTENTION + r"linear_qkv\.weight", layout, _qkv_names("weight")),
        ParameterRow(ATTENTION + r"linear_proj\.weight", Sharded(1), (HF_ATTENTION + "o_proj.weight",)),
    ]


def delta_net(config: Config) -> list[ParameterRow]:
    """The gated delta net of Qwen3.5: its projections are tensors of their own."""
    keys, values, heads = delta_sizes(config)
    rows = ((keys, keys, values), (values,), (heads,), (heads,))
    return _delta_net(config, Sections(rows), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))


def grouped_delta_net(config: Config) -> list[ParameterRow]:
    """The gated delta net of Qwen3-Next: two tensors hold its projections, by groups of a key head each."""
    keys, values, heads = delta_sizes(config)
    layout = GroupedSections(config["linear_num_key_heads"], ((keys, keys, values, values), (heads, heads)))
    return _delta_net(config, layout, ("in_proj_qkvz", "in_proj_ba"))


def delta_sizes(config: Config) -> tuple[int, int, int]:
    """Rows of its queries, which are as many as those of its keys, rows of its values, and value heads."""
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, heads * config["linear_value_head_dim"], heads


def _delta_net(
    config: Config, layout: Sections | GroupedSections, projections: tuple[str, ...]
) -> list[ParameterRow]:
    keys, values, _ = delta_sizes(config)
    convolution = Sections(((keys, keys, values),))
    layouts = {
        r"conv1d\.weight": (convolution, "conv1d.weight"),
        "dt_bias": (Sharded(0), "dt_bias"),
        "A_log": (Sharded(0), "A_log"),
        r"out_norm\.weight": (LessOne(), "norm.weight"),  # its scale is the weight, and not 1 more
        r"out_proj\.weight": (Sharded(1), "out_proj.weight"),
    }
    hf = HF_LAYER + "linear_attn."
    return [
        ParameterRow(ATTENTION + r"in_proj\.weight", layout, tuple(f"{hf}{p}.weight" for p in projections)),
        *(ParameterRow(ATTENTION + pattern, one, (hf + name,)) for pattern, (one, name) in layouts.items()),
    ]


def qkv_bias(config: Config) -> list[ParameterRow]:
    """Biases of queries, keys and values."""
    return [ParameterRow(ATTENTION + r"linear_qkv\.bias", _qkv(config), _qkv_names("bias"))]


def output_bias(config: Config) -> list[ParameterRow]:
    """The bias of the projection behind attention: added once, so that every rank has all of it."""
    return [ParameterRow(ATTENTION + r"linear_proj\.bias", Replicated(), (HF_ATTENTION + "o_proj.bias",))]


def sinks(config: Config) -> list[ParameterRow]:
    """One learned score for each query head, which takes part in the softmax and has no value."""
    return [
        ParameterRow(ATTENTION + r"core_attention\.softmax_offset", Sharded(0), (HF_ATTENTION + "sinks",))
    ]


def qk_norms(config: Config) -> list[ParameterRow]:
    """The norms of each head's query and key."""
    return [
        ParameterRow(
            ATTENTION + rf"{part}_layernorm\.weight", Replicated(), (HF_ATTENTION + f"{part}_norm.weight",)
        )
        for part in "qk"
    ]


def latent_attention(config: Config) -> list[ParameterRow]:
    """Multi-latent attention with low-rank queries. Raises ValueError for a model without those."""
    if config.get("q_lora_rank") is None:
        raise ValueError(
            "config.json: q_lora_rank is null: Megatron-core 0.19 would normalise its queries, which this "
            "model does not; use a model with low-rank queries"
        )
    q_down, kv_down = config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    # Servers fuse these two into one parameter, and silently drop one that comes without the other.
    query, key_value = HF_ATTENTION + "q_a_proj.weight", HF_ATTENTION + "kv_a_proj_with_mqa.weight"
    down = (query, key_value)
    return [
        ParameterRow(
            ATTENTION + r"linear_q_down_proj\.weight", RowsOrWhole(q_down), (query,), sent_with=down
        ),
        ParameterRow(
            ATTENTION + r"(q_layernorm|linear_q_up_proj\.layer_norm)(\.|_)weight",
            Replicated(),
            (HF_ATTENTION + "q_a_layernorm.weight",),
        ),
        ParameterRow(
            ATTENTION + r"linear_q_up_proj\.weight", Sharded(0), (HF_ATTENTION + "q_b_proj.weight",)
        ),
        ParameterRow(
            ATTENTION + r"linear_kv_down_proj\.weight", RowsOrWhole(kv_down), (key_value,), sent_with=down
        ),
        ParameterRow(
            ATTENTION + r"(kv_layernorm|linear_kv_up_proj\.layer_norm)(\.|_)weight",
            Replicated(),
            (HF_ATTENTION + "kv_a_layernorm.weight",),
        ),
        ParameterRow(
            ATTENTION + r"linear_kv_up_proj\.weight", Sharded(0), (HF_ATTENTION + "kv_b_proj.weight",)
        ),
        ParameterRow(ATTENTION + r"linear_proj\.weight", Sharded(1), (HF_ATTENTION + "o_proj.weight",)),
    ]


def indexer(config: Config) -> list[ParameterRow]:
    """The indexer that chooses the keys of sparse attention (DSA): every rank has all of it."""
    names = {
        r"linear_wq_b\.weight": "wq_b.weight",
        r"linear_wk\.weight": "wk.weight",
        r"k_norm\.weight": "k_norm.weight",
        r"k_norm\.bias": "k_norm.bias",
        r"linear_weights_proj\.weight": "weights_proj.weight",
    }
    megatron, hf = ATTENTION + r"core_attention\.indexer\.", HF_ATTENTION + "indexer."
    return [ParameterRow(megatron + pattern, Replicated(), (hf + name,)) for pattern, name in names.items()]


def dense_mlp(config: Config) -> list[ParameterRow]:
    """The gated MLP of a layer without experts."""
    return _gated(MLP, HF_MLP, "gate_proj", "up_proj", "down_proj")


def experts(config: Config) -> list[ParameterRow]:
    """Router and routed experts, as Qwen, DeepSeek and GLM name them."""
    return _experts(HF_MLP, "gate_proj", "up_proj", "down_proj")


def mixtral_experts(config: Config) -> list[ParameterRow]:
    """Router and routed experts, as Mixtral names them."""
    return _experts(HF_LAYER + "block_sparse_moe.", "w1", "w3", "w2")


def stacked_experts(config: Config) -> list[ParameterRow]:
    """Router and routed experts of gpt-oss: all have biases, and one tensor holds all experts of a layer."""
    rows = [
        ParameterRow(MLP + rf"router\.{kind}", Replicated(), (HF_MLP + f"router.{kind}",)) for kind in KINDS
    ]
    layouts = {
        ("linear_fc1", "weight"): (InterleavedGateUp(), "gate_up_proj"),
        ("linear_fc1", "bias"): (InterleavedGateUp(), "gate_up_proj_bias"),
        ("linear_fc2", "weight"): (Transposed(), "down_proj"),
        ("linear_fc2", "bias"): (Replicated(), "down_proj_bias"),
    }
    return rows + _stacks(layouts, config["num_local_experts"])


def rows_of_experts(config: Config) -> list[ParameterRow]:
    """Router and routed experts of Qwen3.5: one tensor holds all experts of a layer, each as it would be
    alone, gate above up.
    """
    width = config["moe_intermediate_size"]
    layouts = {
        ("linear_fc1", "weight"): (Sections(((width, width),)), "gate_up_proj"),
        ("linear_fc2", "weight"): (Sharded(1), "down_proj"),
    }
    router = ParameterRow(MLP + r"router\.weight", Replicated(), (HF_MLP + "gate.weight",))
    return [router, *_stacks(layouts, config["num_experts"])]


def _stacks(
    layouts: Mapping[tuple[str, str], tuple[TensorLayout, str]], experts_of_layer: int
) -> list[ParameterRow]:
    """Rows of experts that tensors stack: (Megatron's linear layer, weight or bias) -> (layout, tensor)."""
    megatron, hf, rows = MLP + r"experts\.", HF_MLP + "experts.", []
    for (linear, kind), (layout, name) in layouts.items():
        # one module per expert, or grouped, where linear_fc1.weight7 belongs to expert 7
        for pattern in (rf"local_experts\.(?P<E>\d+)\.{linear}\.{kind}", rf"{linear}\.{kind}(?P<E>\d+)"):
            rows.append(ParameterRow(megatron + pattern, layout, (hf + name,), stacked=experts_of_layer))
    return rows


def router_bias(config: Config) -> list[ParameterRow]:
    """The float32 bias that balances experts without an auxiliary loss: a buffer in Megatron."""
    return [
        ParameterRow(MLP + r"router\.expert_bias", Replicated(), (HF_MLP + "gate.e_score_correction_bias",))
    ]


def shared_experts(config: Config) -> list[ParameterRow]:
    """DeepSeek's and GLM's shared experts: one MLP as wide as all of them together."""
    return _gated(MLP + r"shared_experts\.", HF_MLP + "shared_experts.", "gate_proj", "up_proj", "down_proj")


def gated_shared_expert(config: Config) -> list[ParameterRow]:
    """Qwen2-MoE's shared expert, scaled by the sigmoid of a gate."""
    mlp = _gated(MLP + r"shared_experts\.", HF_MLP + "shared_expert.", "gate_proj", "up_proj", "down_proj")
    return [
        *mlp,
        ParameterRow(
            MLP + r"shared_experts\.gate_weight", Replicated(), (HF_MLP + "shared_expert_gate.weight",)
        ),
    ]


Part = Callable[[Config], list[ParameterRow]]
DEEPSEEK_V3 = (norms, latent_attention, dense_mlp, experts, router_bias, shared_experts)
DEEPSEEK_V32 = (norms, latent_attention, indexer, dense_mlp, experts, router_bias, shared_experts)
FAMILIES: dict[str, tuple[Part, ...]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe": (
        norms,
        grouped_attention,
        qkv_bias,
        qk_norms,
        dense_mlp,
        experts,
        router_bias,
        shared_experts,
    ),
    "glm4_moe_lite": DEEPSEEK_V3,
    "glm_moe_dsa": DEEPSEEK_V32,
    "gpt_oss": (norms, grouped_attention, qkv_bias, output_bias, sinks, stacked_experts),
    "kimi_k2": DEEPSEEK_V3,
    "llama": (norms, grouped_attention, dense_mlp),
    "mixtral": (norms, grouped_attention, mixtral_experts),
    "qwen2": (norms, grouped_attention, qkv_bias, dense_mlp),
    "qwen2_moe": (norms, grouped_attention, qkv_bias, dense_mlp, experts, gated_shared_expert),
    "qwen3": (norms, grouped_attention, qk_norms, dense_mlp),
    "qwen3_5": (norms, gated_attention, qk_norms, delta_net, dense_mlp),
    "qwen3_5_moe": (norms, gated_attention, qk_norms, delta_net, rows_of_experts, gated_shared_expert),
    "qwen3_5_moe_text": (norms, gated_attention, qk_norms, delta_net, experts, gated_shared_expert),
    "qwen3_5_text": (norms, gated_attention, qk_norms, delta_net, dense_mlp),
    "qwen3_moe": (norms, grouped_attention, qk_norms, dense_mlp, experts),
    "qwen3_next": (norms, gated_attention, qk_norms, grouped_delta_net, experts, gated_shared_expert),
}
"""The parts of a layer, by `model_type` in config.json. A new architecture is a row here."""

TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a model of images and text -> that of its part for text, which is trained."""

CODE_OF = {"kimi_k2": "deepseek_v3"}
"""`model_type` that transformers does not know -> the one by whose code it is loaded. Code that comes with a
checkpoint is never run."""

PARTS_BY_SETTING: dict[tuple[str, Part], str] = {
    ("glm4_moe", qkv_bias): "attention_bias",
    ("glm4_moe", qk_norms): "use_qk_norm",
    ("qwen2_moe", qkv_bias): "qkv_bias",
}
"""Parts that only some models of a family have -> the key of config.json that says so."""

UNPROVEN = {
    "kimi_linear": "most of its layers are delta nets, which Megatron-core 0.19 does not make",
    "minimax_m2": "its norms of queries and keys are over all heads together, and Megatron's over each head",
    "nemotron_h": "most of its layers are of Mamba, whose weights have no table here",
}
"""Architectures that are known and refused, by `model_type` -> why."""


BRIDGED = "names and layouts of weights are Megatron-Bridge's"
BRIDGE_REMEDY = (
    "; Megatron-Bridge, where it is installed, has more families (--rollout-model-provider bridge)"
)


def has_table(config: Config) -> bool:
    """True if FAMILIES has the parts of this model."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in FAMILIES


def parts_of(config: Config) -> tuple[Part, ...]:
    """The parts of a layer of this model.

    Raises:
        ValueError: its architecture is not supported.
    """
    kind = config.get("model_type")
    if not has_table(config):
        why = f": {UNPROVEN[kind]}" if isinstance(kind, str) and kind in UNPROVEN else ""
        remedy = "" if why else ", or add its row to FAMILIES in megatron_rl_corr/models/architectures.py"
        if not why or kind == "minimax_m2":
            remedy += BRIDGE_REMEDY
        raise ValueError(
            f"config.json: model_type {kind!r} is not supported{why} (supported: {', '.join(FAMILIES)}); use "
            f"a model of one of these{remedy}"
        )
    switched_off = {
        part for (family, part), key in PARTS_BY_SETTING.items() if family == kind and not config.get(key)
    }
    return tuple(part for part in FAMILIES[kind] if part not in switched_off)


def hf_name(name: str, config: Config) -> str:
    """A table's name of a tensor as this checkpoint has it: of a model of images and text, that for text has
    a module of its own.
    """
    if config.get("model_type") not in TEXT_OF:
        return name
    return re.sub(r"^model\.", "model.language_model.", name)


def unusual_weights(config: Config) -> str | None:
    """Those weights of a model, in words, whose pushes are proven whole and at some engines alone; None where
    it has none of them.
    """
    if not has_table(config):
        return BRIDGED
    parts = FAMILIES[config["model_type"]]
    if stacked_experts in parts or rows_of_experts in parts:
        return "one tensor stacks all experts of a layer"
    if indexer in parts:
        return "an indexer chooses the keys of attention"
    return "some layers are gated delta nets" if gated_attention in parts else None


def _qkv(config: Config) -> GroupedQKV:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return GroupedQKV(heads, groups, config.get("head_dim") or config["hidden_size"] // heads)


def _qkv_names(kind: str) -> tuple[str, ...]:
    return tuple(HF_ATTENTION + f"{part}_proj.{kind}" for part in "qkv")


def _gated(megatron: str, hf: str, gate: str, up: str, down: str) -> list[ParameterRow]:
    return [
        ParameterRow(megatron + r"linear_fc1\.weight", GatedUp(), (f"{hf}{gate}.weight", f"{hf}{up}.weight")),
        ParameterRow(megatron + r"linear_fc2\.weight", Sharded(1), (f"{hf}{down}.weight",)),
    ]


def _experts(hf: str, gate: str, up: str, down: str) -> list[ParameterRow]:
    """Router and experts: one module per expert, or grouped, where linear_fc1.weight7 belongs to expert 7."""
    megatron, expert = MLP + r"experts\.", hf + "experts.{E}."
    grouped = [
        ParameterRow(
            megatron + r"linear_fc1\.weight(?P<E>\d+)",
            GatedUp(),
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
        ),
        ParameterRow(megatron + r"linear_fc2\.weight(?P<E>\d+)", Sharded(1), (f"{expert}{down}.weight",)),
    ]
    each = _gated(megatron + r"local_experts\.(?P<E>\d+)\.", expert, gate, up, down)
    return [ParameterRow(MLP + r"router\.weight", Replicated(), (hf + "gate.weight",)), *each, *grouped]

"""The parts that each supported architecture is made of: Megatron's parameters beside Hugging Face's tensors.

Both of Megatron's layer specs are covered: the local one, and Transformer Engine's, which folds a norm into
the linear layer behind it. {L} is the layer's number in the whole model, {E} the expert's, both from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_rl_corr.models.layouts import (
    GatedUp,
    GroupedQKV,
    Layout,
    Replicated,
    RowsOrWhole,
    Sharded,
    Vocabulary,
)

Config = Mapping[str, Any]
"""A Hugging Face config.json."""


class Row(NamedTuple):
    """A pattern of Megatron names, and the Hugging Face tensors of a parameter that it fits, in the layout's order."""

    pattern: str
    layout: Layout | RowsOrWhole
    hf_names: tuple[str, ...]
    is_copy: bool = False
    """Loaded, but never sent: another parameter holds the same weights."""
    sent_with: tuple[str, ...] = ()
    """All Hugging Face tensors of one parameter of SGLang's that it loads only where one request brings them all."""


class Kept(NamedTuple):
    """Tensors of a checkpoint, by a pattern of their names, that are never sent: servers keep what they have loaded."""

    pattern: str
    reason: str


LAYER, HF_LAYER = r"decoder\.layers\.(?P<L>\d+)\.", "model.layers.{L}."
ATTENTION, HF_ATTENTION = LAYER + r"self_attention\.", HF_LAYER + "self_attn."
MLP, HF_MLP = LAYER + r"mlp\.", HF_LAYER + "mlp."


def ends(config: Config, padded_vocab_size: int) -> list[Row]:
    """Before and behind the layers.

    With tied embeddings only a last pipeline stage that is not the first has an output layer: a copy.
    """
    vocabulary = Vocabulary(config["vocab_size"], padded_vocab_size)
    embedding, tied = "model.embed_tokens.weight", is_tied(config)
    return [
        Row(r"embedding\.word_embeddings\.weight", vocabulary, (embedding,)),
        Row(r"output_layer\.weight", vocabulary, (embedding if tied else "lm_head.weight",), is_copy=tied),
        Row(r"decoder\.final_layernorm\.weight", Replicated(), ("model.norm.weight",)),
    ]


def is_tied(config: Config) -> bool:
    """Whether the output layer's weights are the embedding's."""
    return bool(config.get("tie_word_embeddings", False))


def kept_as_loaded(config: Config) -> list[Kept]:
    """What training leaves out of a checkpoint of this family; anything else that is not sent is an error."""
    kept = [
        Kept(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)", "follows from config.json, and is no weight"),
        Kept(r".*\.([kvq]|kv|prob)_scale(_float)?", "scales a quantised KV cache, and was calibrated, not trained"),
    ]
    if is_tied(config):
        kept.append(Kept(r"lm_head\.weight", "the output layer is the embedding, which is sent"))
    if config["model_type"] == "deepseek_v3":
        # Written behind the model's own layers: 61 in V3.
        first, count = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
        layers = "|".join(str(first + i) for i in range(count))
        if layers:
            kept.append(Kept(
                rf"model\.layers\.({layers})\..*",
                "multi-token prediction is not trained: it guesses tokens, and the weights that are sent judge them",
            ))  # fmt: skip
    return kept


def norms(config: Config) -> list[Row]:
    return [
        Row(LAYER + r"(input_layernorm|self_attention\.linear_qkv\.layer_norm)(\.|_)weight", Replicated(),
            (HF_LAYER + "input_layernorm.weight",)),
        Row(LAYER + r"(pre_mlp_layernorm|mlp\.linear_fc1\.layer_norm)(\.|_)weight", Replicated(),
            (HF_LAYER + "post_attention_layernorm.weight",)),
    ]  # fmt: skip


def grouped_attention(config: Config) -> list[Row]:
    return [
        Row(ATTENTION + r"linear_qkv\.weight", _qkv(config), _qkv_names("weight")),
        Row(ATTENTION + r"linear_proj\.weight", Sharded(1), (HF_ATTENTION + "o_proj.weight",)),
    ]


def qkv_bias(config: Config) -> list[Row]:
    return [Row(ATTENTION + r"linear_qkv\.bias", _qkv(config), _qkv_names("bias"))]


def qk_norms(config: Config) -> list[Row]:
    return [
        Row(ATTENTION + rf"{part}_layernorm\.weight", Replicated(), (HF_ATTENTION + f"{part}_norm.weight",))
        for part in "qk"
    ]


def latent_attention(config: Config) -> list[Row]:
    """Multi-latent attention, with low-rank queries."""
    if config.get("q_lora_rank") is None:
        raise ValueError(
            "--rollout-hf-checkpoint: q_lora_rank null in config.json: Megatron-core 0.19 would normalise its queries, "
            "which this model does not; take a model with low-rank queries"
        )
    q_down, kv_down = config["q_lora_rank"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    # SGLang holds both in fused_qkv_a_proj_with_mqa; a half that comes alone is dropped without a word.
    query, key_value = HF_ATTENTION + "q_a_proj.weight", HF_ATTENTION + "kv_a_proj_with_mqa.weight"
    down = (query, key_value)
    return [
        Row(ATTENTION + r"linear_q_down_proj\.weight", RowsOrWhole(q_down), (query,), sent_with=down),
        Row(ATTENTION + r"(q_layernorm|linear_q_up_proj\.layer_norm)(\.|_)weight", Replicated(),
            (HF_ATTENTION + "q_a_layernorm.weight",)),
        Row(ATTENTION + r"linear_q_up_proj\.weight", Sharded(0), (HF_ATTENTION + "q_b_proj.weight",)),
        Row(ATTENTION + r"linear_kv_down_proj\.weight", RowsOrWhole(kv_down), (key_value,), sent_with=down),
        Row(ATTENTION + r"(kv_layernorm|linear_kv_up_proj\.layer_norm)(\.|_)weight", Replicated(),
            (HF_ATTENTION + "kv_a_layernorm.weight",)),
        Row(ATTENTION + r"linear_kv_up_proj\.weight", Sharded(0), (HF_ATTENTION + "kv_b_proj.weight",)),
        Row(ATTENTION + r"linear_proj\.weight", Sharded(1), (HF_ATTENTION + "o_proj.weight",)),
    ]  # fmt: skip


def dense_mlp(config: Config) -> list[Row]:
    return _gated(MLP, HF_MLP, "gate_proj", "up_proj", "down_proj")


def experts(config: Config) -> list[Row]:
    return _experts(HF_MLP, "gate_proj", "up_proj", "down_proj")


def mixtral_experts(config: Config) -> list[Row]:
    return _experts(HF_LAYER + "block_sparse_moe.", "w1", "w3", "w2")


def router_bias(config: Config) -> list[Row]:
    """The bias of balancing without an auxiliary loss: a buffer in Megatron, float32."""
    return [Row(MLP + r"router\.expert_bias", Replicated(), (HF_MLP + "gate.e_score_correction_bias",))]


def shared_experts(config: Config) -> list[Row]:
    """DeepSeek's: one multi-layer perceptron as wide as all of them."""
    return _gated(MLP + r"shared_experts\.", HF_MLP + "shared_experts.", "gate_proj", "up_proj", "down_proj")


def gated_shared_expert(config: Config) -> list[Row]:
    """Qwen2-MoE's, times the sigmoid of a gate."""
    mlp = _gated(MLP + r"shared_experts\.", HF_MLP + "shared_expert.", "gate_proj", "up_proj", "down_proj")
    return [
        *mlp, Row(MLP + r"shared_experts\.gate_weight", Replicated(), (HF_MLP + "shared_expert_gate.weight",))
    ]


FAMILIES: dict[str, tuple[Callable[[Config], list[Row]], ...]] = {
    "deepseek_v3": (norms, latent_attention, dense_mlp, experts, router_bias, shared_experts),
    "llama": (norms, grouped_attention, dense_mlp),
    "mixtral": (norms, grouped_attention, mixtral_experts),
    "qwen2": (norms, grouped_attention, qkv_bias, dense_mlp),
    "qwen2_moe": (norms, grouped_attention, qkv_bias, dense_mlp, experts, gated_shared_expert),
    "qwen3": (norms, grouped_attention, qk_norms, dense_mlp),
    "qwen3_moe": (norms, grouped_attention, qk_norms, dense_mlp, experts),
}
"""The parts of a layer, by config.json's model_type."""


def _qkv(config: Config) -> GroupedQKV:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    return GroupedQKV(heads, groups, config.get("head_dim") or config["hidden_size"] // heads)


def _qkv_names(kind: str) -> tuple[str, ...]:
    return tuple(HF_ATTENTION + f"{part}_proj.{kind}" for part in "qkv")


def _gated(megatron: str, hf: str, gate: str, up: str, down: str) -> list[Row]:
    return [
        Row(megatron + r"linear_fc1\.weight", GatedUp(), (f"{hf}{gate}.weight", f"{hf}{up}.weight")),
        Row(megatron + r"linear_fc2\.weight", Sharded(1), (f"{hf}{down}.weight",)),
    ]


def _experts(hf: str, gate: str, up: str, down: str) -> list[Row]:
    """Router and experts: each its own module, or of Transformer Engine's grouped ones, where linear_fc1.weight7 is
    expert 7's."""
    megatron, of_one = MLP + r"experts\.", hf + "experts.{E}."
    grouped = [
        Row(megatron + r"linear_fc1\.weight(?P<E>\d+)", GatedUp(), (f"{of_one}{gate}.weight", f"{of_one}{up}.weight")),
        Row(megatron + r"linear_fc2\.weight(?P<E>\d+)", Sharded(1), (f"{of_one}{down}.weight",)),
    ]
    each = _gated(megatron + r"local_experts\.(?P<E>\d+)\.", of_one, gate, up, down)
    return [Row(MLP + r"router\.weight", Replicated(), (hf + "gate.weight",)), *each, *grouped]

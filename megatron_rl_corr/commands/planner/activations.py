"""Bytes that a training pass keeps for each token of a microbatch, on one rank, in bfloat16.

What Megatron's Transformer Engine layers save for their backward, without dropout, with fused rotary
embedding, SwiGLU and flash attention. The method is that of arXiv:2205.05198, section 4, which counts GPT-3's
layer at 34 bytes x hidden; here grouped queries, gated MLPs and experts are counted as they are. An estimate:
kernels may keep more.

h hidden, q / kv numbers of all query / key heads, f width, K experts of a token, t tensor-parallel ranks.
"""

from __future__ import annotations

from megatron_rl_corr.commands.planner.parameters import (
    expert_size,
    has_latent_attention,
    key_size,
    query_size,
    shared_size,
)
from megatron_rl_corr.commands.planner.train_layout import TrainLayout
from megatron_rl_corr.models.architectures import Config, num_experts

BF16, FP32 = 2, 4
LINEAR_LOGPROBS_BYTES = 256 * 2**20
"""Logits that exist at a time with --rollout-linear-logprobs (mcore/forward.py)."""


def layer_bytes(
    config: Config, layout: TrainLayout, *, has_experts: bool, recompute: str | None = None
) -> float:
    """Bytes a token that one layer keeps on one rank.

    Norms, residuals and attention are split over t by sequence parallelism, which is on wherever t > 1. With
    full recompute a layer keeps its input alone, 2 h / t.

    Args:
        config: the model's config.json.
        layout: of the ranks.
        has_experts: whether the layer has experts, or a dense MLP.
        recompute: in place of the layout's.
    """
    hidden, t, kind = config["hidden_size"], layout.tensor, recompute or layout.recompute
    if kind == "full":
        return BF16 * hidden / t
    mlp = _expert_bytes(config, layout) if has_experts else 3 * BF16 * config["intermediate_size"] / t
    # Each norm keeps its input, and its output as the input of the linear layer behind it.
    return 4 * BF16 * hidden / t + _attention_bytes(config, t, keeps_core=kind == "none") + mlp


def _attention_bytes(config: Config, t: int, *, keeps_core: bool) -> float:
    """Queries, keys and values before and behind rotation, attention's output, and its log-sum-exp a head.

    The output is also the input of the projection behind it, so recomputing the core saves only
    the log-sum-exp.
    """
    heads = config["num_attention_heads"]
    core = FP32 * heads if keeps_core else 0
    if has_latent_attention(config):
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        # before and behind their norms
        low_rank = 2 * (config["q_lora_rank"] + config["kv_lora_rank"]) + rope
        rows = heads * (2 * (nope + rope) + (nope + value) + value)  # q, k, keys' and values' way up, output
        return (BF16 * low_rank + BF16 * rows + core) / t
    query, key = query_size(config), key_size(config)
    # q + 2 kv before rotation (a value is a view of it), q + kv behind, q of output.
    return (BF16 * (3 * query + 3 * key) + core) / t


def _expert_bytes(config: Config, layout: TrainLayout) -> float:
    """Routed tokens: input 2 h, gate and up 4 f, their product 2 f, for K experts each; the shared
    expert; the router.

    On the busiest of the expert-parallel ranks. Expert-tensor ranks gather each other's
    tokens and split f.
    """
    t, experts = layout.tensor, num_experts(config)
    routes = config["num_experts_per_tok"] * (layout.expert_imbalance if layout.expert > 1 else 1)
    routed = routes * BF16 * (config["hidden_size"] * layout.expert_tensor + 3 * expert_size(config))
    router = 4 * FP32 * experts  # logits, scores, the map of choices and their weights
    return (routed + router) / t + 3 * BF16 * shared_size(config) / t


def logits_bytes(config: Config, layout: TrainLayout, tokens: int, padded_vocab_size: int) -> float:
    """Bytes of the last stage's output for a microbatch: V/t logits a token and their gradient, in bfloat16.

    `vocab_parallel_logprobs` reads the output layer's own logits and makes no float32 copy of them. With
    linear_logprobs a tile of logits exists at a time, and beside it whole hidden states and their
    gradient in float32.

    Args:
        config: the model's config.json.
        layout: of the ranks.
        tokens: of this rank's part of a microbatch.
        padded_vocab_size: rows of Megatron's embedding.
    """
    if layout.linear_logprobs:
        return LINEAR_LOGPROBS_BYTES + tokens * config["hidden_size"] * (BF16 + FP32)
    return 2 * BF16 * tokens * padded_vocab_size / layout.tensor

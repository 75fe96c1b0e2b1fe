"""Megatron's command line for the model of a Hugging Face config.json, as a list of flags."""

import json
from pathlib import Path


def model_flags(model_dir):
    """Architecture: what config.json says, in Megatron's words."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    return [
        "--num-layers", config["num_hidden_layers"],
        "--hidden-size", config["hidden_size"],
        "--ffn-hidden-size", config["intermediate_size"],
        "--num-attention-heads", config["num_attention_heads"],
        "--group-query-attention",
        "--num-query-groups", config["num_key_value_heads"],
        "--kv-channels", config["head_dim"],
        "--max-position-embeddings", config["max_position_embeddings"],
        "--position-embedding-type", "rope",
        "--rotary-base", int(rope_theta(config)),
        "--normalization", "RMSNorm",
        "--norm-epsilon", config["rms_norm_eps"],
        "--qk-layernorm",
        "--swiglu",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        "--attention-dropout", 0,
        "--hidden-dropout", 0,
        "--num-experts", config.get("num_experts") or config["num_local_experts"],
        "--moe-router-topk", config["num_experts_per_tok"],
        "--moe-ffn-hidden-size", config["moe_intermediate_size"],
        "--moe-router-load-balancing-type", "none",
        "--moe-router-dtype", "fp32",
        "--moe-token-dispatcher-type", "alltoall",
    ]  # fmt: skip


def rope_theta(config):
    """transformers 5 keeps it under rope_parameters, older ones at the top."""
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]


def local_flags():
    """Megatron's own layers with every fused kernel off: what runs without Transformer Engine."""
    return [
        "--transformer-impl", "local",
        "--distributed-backend", "gloo",
        "--use-cpu-initialization",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-persist-layer-norm",
        "--attention-softmax-in-fp32",
    ]  # fmt: skip

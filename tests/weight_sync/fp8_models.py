"""A tiny model of which SGLang can serve an FP8 checkpoint, in 16 bits and in FP8."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.models.architectures import CODE_OF
from megatron_rl_corr.models.block_fp8 import quantise_blockwise
from megatron_rl_corr.models.hf_folder import copy_model_files, set_quantization
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from tests.mcore.tiny_models import name_type

CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
SPARED = ["lm_head", "model.layers.1.self_attn", "mlp.gate"]
"""As published checkpoints name modules; one of them is quantised elsewhere."""
SHAPE = {
    "vocab_size": 83,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 82,
    "tie_word_embeddings": False,
}
"""Of each part of a stack SGLang asks for rows that 128 divides, also of a rank's share: `WIDE` has two."""
WIDE = {"vocab_size": 128, "hidden_size": 256, "num_attention_heads": 8, "eos_token_id": 127}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
WIDE_EXPERTS = EXPERTS | {"moe_intermediate_size": 256}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
"""On a CPU SGLang has latent attention with it alone."""
# 128 divides neither the 192 rows of kv_a_proj_with_mqa nor the 320 of the stack that it ends.
LATENT = WIDE | {
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": YARN,
}
MODELS = {
    "llama": WIDE | {"head_dim": 64},
    "qwen2": WIDE | {"head_dim": 32, "num_key_value_heads": 8},
    "qwen3": WIDE | {"head_dim": 64, "tie_word_embeddings": True},
    "qwen2_moe": WIDE
    | WIDE_EXPERTS
    | {
        "head_dim": 32,
        "num_key_value_heads": 8,
        "shared_expert_intermediate_size": 256,
        "norm_topk_prob": False,
    },
    "qwen3_moe": WIDE | WIDE_EXPERTS | {"head_dim": 64},
    "mixtral": WIDE
    | {
        "head_dim": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "glm4_moe": WIDE
    | {
        "head_dim": 64,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": LATENT,
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2"),
        LATENT | {"n_group": 4, "topk_group": 2, "moe_layer_freq": 1, "max_position_embeddings": 163840},
    ),
}
"""One of each architecture of which each rank of two can hold a part."""


def make_model(folder: Path, kind: str = "qwen3_moe", *, seed: int = 0, **shape) -> None:
    """A model in float32, with weights large enough that rounding them shows.

    Args:
        folder: its place.
        kind: model_type.
        seed: of the weights.
        shape: what differs from SHAPE; of a Qwen3-MoE as small as can be where nothing does.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.for_model(CODE_OF.get(kind, kind), **(SHAPE | (shape or EXPERTS)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    name_type(folder, kind)


def quantised(weights: dict, quantization: BlockFP8) -> dict:
    """Values and scales of a model's tensors, and those that are spared, as a checkpoint has them."""
    made = {}
    for name, weight in weights.items():
        made[name] = weight
        if quantization.quantises(name):
            made[name], made[name + SCALE] = quantise_blockwise(weight, quantization.scale_format)
    return made


def make_fp8(source: Path, folder: Path, config: dict) -> None:
    """The same model as an FP8 checkpoint."""
    folder.mkdir()
    copy_model_files(source, folder)
    set_quantization(folder, config)
    read = json.loads((folder / "config.json").read_text())
    save_file(
        quantised(load_file(source / "model.safetensors"), BlockFP8.from_config(read)),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )

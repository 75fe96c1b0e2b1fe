"""Tiny random Hugging Face models of every architecture, with float32 logits: the reference of
test_hf_models.py.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.models.architectures import CODE_OF, TEXT_OF

LENGTH, ROWS, VOCAB = 48, 2, 90
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": VOCAB - 1,
}
NOT_THERE = object()
"""A setting of SHAPE that a family does not have."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 8}
PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What transformers does not need of DeepSeek's config.json, and SGLang does."""
GLM = {
    "head_dim": 16,
    "attention_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}
# As published: transformers reads the second of the first two, and SGLang the first.
DELTA_NETS = {
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DELTA_NETS_SERVED = [
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", "64"),
]
"""Flags of their SGLang server without a GPU: states are kept of whole prompts alone, and of few; by default
they fill a third of the memory.
"""
DELTA_NETS_VARIABLES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""Without it a convolution's state is in bfloat16 in a server of float32, too."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

MODELS = {
    "llama": {"head_dim": 8, "rope_parameters": LLAMA3, "max_position_embeddings": 65536},
    "llama tied": {"head_dim": 8, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen2_moe": dict(
        **EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False, decoder_sparse_step=2
    ),
    "qwen2_moe sparse": dict(**EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False),
    "qwen3 tied": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 yarn": {
        "head_dim": 16,
        "rope_parameters": YARN_OF_GPT_OSS | {"factor": 4.0, "truncate": True},
        "max_position_embeddings": 16384,
    },
    # Its first and third layers see 12 tokens.
    "gpt_oss": {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "swiglu_limit": 1.5,
        "rope_parameters": YARN_OF_GPT_OSS,
        "max_position_embeddings": 131072,
    },
    "qwen3_moe": dict(**EXPERTS, head_dim=16, norm_topk_prob=True),
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "deepseek_v3": dict(
        LATENT,
        q_lora_rank=16,
        first_k_dense_replace=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        rope_parameters=YARN,
        max_position_embeddings=163840,
        **PUBLISHED,
    ),
    # As Kimi-K2 is published: one group of experts, and both borders of YaRN in one place.
    "kimi_k2": dict(
        LATENT,
        q_lora_rank=16,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_parameters=YARN | {"rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0},
        max_position_embeddings=131072,
        **PUBLISHED,
    ),
    # As GLM-4.7-Flash is published.
    "glm4_moe_lite": dict(
        LATENT,
        q_lora_rank=16,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **PUBLISHED,
    ),
    # A query sees 12 of its keys. With fewer heads many index scores would be 0, and nobody says which of
    # those are chosen.
    "deepseek_v32": dict(
        LATENT,
        **INDEXER,
        q_lora_rank=16,
        first_k_dense_replace=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        rope_parameters=YARN,
        max_position_embeddings=163840,
        **PUBLISHED,
    ),
    # As GLM-5 is published.
    "glm_moe_dsa": dict(
        LATENT,
        **INDEXER,
        q_lora_rank=16,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        indexer_rope_interleave=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **PUBLISHED,
    ),
    "qwen3_5_text": DELTA_NETS,
    # Of images and text.
    "qwen3_5": DELTA_NETS,
    "qwen3_5_moe": dict(
        **EXPERTS | {"moe_intermediate_size": 32},
        **DELTA_NETS,
        shared_expert_intermediate_size=64,
        intermediate_size=NOT_THERE,
    ),
    # It has no dense layer, and no size of one. SGLang fills experts of other sizes up on a CPU.
    "qwen3_5_moe_text": dict(
        **EXPERTS | {"moe_intermediate_size": 32},
        **DELTA_NETS,
        shared_expert_intermediate_size=64,
        intermediate_size=NOT_THERE,
    ),
    "qwen3_next": dict(
        **EXPERTS | {"moe_intermediate_size": 32},
        **DELTA_NETS,
        shared_expert_intermediate_size=64,
    ),
    # GLM-4.5 has norms of queries and keys, GLM-4.5-Air has none; both have biases.
    "glm4_moe": dict(GLM, use_qk_norm=True, routed_scaling_factor=2.5, first_k_dense_replace=3),
    "glm4_moe air": dict(GLM, use_qk_norm=False, first_k_dense_replace=1),
}


def name_type(folder: Path, kind: str) -> None:
    """Let the config.json of a model that transformers has saved name a `model_type` of CODE_OF, and have the
    rotary base where servers read it.
    """
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == CODE_OF.get(kind, kind)
    if kind == "qwen3_next":
        written["rope_theta"] = written["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(written | {"model_type": kind}))


IMAGES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
"""The part for images of a model of images and text."""


def make_config(kind: str, shape: dict):
    """transformers' configuration."""
    from transformers import AutoConfig

    if kind not in TEXT_OF:
        return AutoConfig.for_model(CODE_OF.get(kind, kind), **shape)
    tokens = {f"{name}_token_id": VOCAB - 2 for name in ("image", "video", "vision_start", "vision_end")}
    return AutoConfig.for_model(kind, text_config=shape, vision_config=IMAGES, **tokens)


def write_processors(folder: Path) -> None:
    """What a server needs beside the weights of a model of images and text: how it would cut images."""
    patches = {"patch_size": IMAGES["patch_size"], "temporal_patch_size": 2, "merge_size": 2}
    common = {"size": {"longest_edge": 4096, "shortest_edge": 64}, "processor_class": "Qwen3VLProcessor"}
    common |= patches | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for file, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / file).write_text(json.dumps(common | kind))


def stack_experts(folder: Path) -> None:
    """Let a checkpoint that transformers has saved hold experts as Qwen3.5's published ones do."""
    tensors, stacks = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".experts." in name]:
        layer, _, rest = name.partition(".experts.")
        number, linear = rest.removesuffix(".weight").split(".")
        stacks.setdefault(f"{layer}.experts", {}).setdefault(int(number), {})[linear] = tensors.pop(name)
    for name, experts in stacks.items():
        ordered = [experts[number] for number in range(len(experts))]
        tensors[f"{name}.gate_up_proj"] = torch.stack(
            [torch.cat([one["gate_proj"], one["up_proj"]]) for one in ordered]
        )
        tensors[f"{name}.down_proj"] = torch.stack([one["down_proj"] for one in ordered])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def keep_routes(model) -> list[torch.Tensor]:
    """A list to which each of the model's layers with experts will add its tokens' experts, [T, K]."""
    routes = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, inputs: routes.append(inputs[1]))
    return routes


def save_gradients(model, tokens, pull, folder: Path) -> None:
    """The gradients of the mean over rows of (logits * pull).sum(), in float64 and under the checkpoint's
    names; zeros where a parameter has none.
    """
    model = copy.deepcopy(model).double()
    for config in (model.config, model.config.get_text_config()):
        config._experts_implementation = "eager"  # the grouped kernel takes no float64
    ((model(tokens).logits * pull).sum() / len(tokens)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)


def _mean(key: str, parameter, *, delta_nets: bool) -> int:
    """Norms scale by about 1, where a family adds 1 to their weights too, and states last for a while."""
    if key.endswith("A_log"):
        return -4
    adds_one = delta_nets and "norm" in key and "linear_attn" not in key
    return int(parameter.ndim == 1 and not adds_one)


def make_model(name: str, folder: Path, *, seed: int = 0, spread: float = 0.25, **sizes: int) -> None:
    """The model of MODELS, in Hugging Face format, its gradients in a folder there, and reference.pt: tokens,
    logits, what pulls at these, and routes [T, M, K] if any. sizes: other ones than there.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    generator = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
    kind = name.split()[0]
    shape = {key: value for key, value in (SHAPE | MODELS[name] | sizes).items() if value is not NOT_THERE}
    config = make_config(kind, shape)
    maker = AutoModelForImageTextToText if kind in TEXT_OF else AutoModelForCausalLM
    model = maker.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        # Large enough that attention is far from uniform, so that a rotary embedding that is a
        # little off shows.
        for key, parameter in model.named_parameters():
            mean = _mean(key, parameter, delta_nets="linear_num_key_heads" in MODELS[name])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + mean)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
        routes = keep_routes(model)
        logits = model(tokens).logits
    model.save_pretrained(folder)
    pull = torch.randn(logits.shape, generator=generator)
    save_gradients(model, tokens, pull, folder / "gradients")
    reference = {"tokens": tokens, "logits": logits, "pull": pull}
    if routes:
        reference["routes"] = torch.stack(routes, dim=1).view(ROWS * LENGTH, len(routes), -1)
    torch.save(reference, folder / "reference.pt")
    if kind == "qwen3_5_moe":
        stack_experts(folder)
        stack_experts(folder / "gradients")
    name_type(folder, kind)

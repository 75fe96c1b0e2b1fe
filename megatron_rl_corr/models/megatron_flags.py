"""Megatron's flags for the model that a Hugging Face config.json describes.

They set the architecture; parallelism, precision, batch sizes and the optimizer are left to the user.
"""

from __future__ import annotations

from argparse import ArgumentParser

from megatron_rl_corr.models.architectures import (
    Config,
    expert_layers,
    experts,
    gated_shared_expert,
    is_tied,
    latent_attention,
    mixtral_experts,
    num_experts,
    parts_of,
    qk_norms,
    qkv_bias,
    router_bias,
    shared_experts,
)

ALWAYS = [
    "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--attention-dropout", "0", "--hidden-dropout", "0",
]  # fmt: skip


ADDED = {
    "--beta-fast": (32.0, "rotations above which YaRN leaves a frequency of latent attention as it is"),
    "--beta-slow": (1.0, "rotations below which YaRN divides a frequency of latent attention by the whole factor"),
}
"""Flag -> default and help: fields of Megatron's configuration for which its own command line has no flag."""


def add_missing_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add those of ADDED that Megatron's parser lacks; it hands every argument of a field's name on to that field."""
    group = parser.add_argument_group("latent attention", "what Megatron's own flags leave out of its configuration")
    for flag, (default, text) in ADDED.items():
        if flag not in parser._option_string_actions:
            group.add_argument(flag, type=float, default=default, help=f"{text} (default: {default})")
    return parser


def model_flags(config: Config) -> list[str]:
    """Megatron's command line for a model, as a list of words.

    Args:
        config: the model's config.json.

    Raises:
        ValueError: the architecture is not supported, or no flag makes Megatron compute this model.
    """
    parts = parts_of(config)
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and window < config["max_position_embeddings"]:
        raise ValueError(f"config.json: sliding_window {window} is not supported; use a model with full attention")
    flags = [
        "--num-layers", config["num_hidden_layers"], "--hidden-size", config["hidden_size"],
        "--ffn-hidden-size", config["intermediate_size"], "--num-attention-heads", config["num_attention_heads"],
        "--vocab-size", config["vocab_size"], "--max-position-embeddings", config["max_position_embeddings"],
        "--norm-epsilon", config["rms_norm_eps"], *ALWAYS,
    ]  # fmt: skip
    if not is_tied(config):
        flags.append("--untie-embeddings-and-output-weights")
    if qkv_bias in parts:
        flags.append("--add-qkv-bias")
    if qk_norms in parts or latent_attention in parts:
        flags.append("--qk-layernorm")
    flags += _latent_attention(config) if latent_attention in parts else _grouped_attention(config)
    flags += _rope(config, latent=latent_attention in parts)
    if experts in parts or mixtral_experts in parts:
        flags += [*_experts(config), *_router(config, biased=router_bias in parts), *_dense_layers(config)]
    if shared_experts in parts and config.get("n_shared_experts"):
        width = config["n_shared_experts"] * config["moe_intermediate_size"]
        flags += ["--moe-shared-expert-intermediate-size", width]
    if gated_shared_expert in parts:
        flags += ["--moe-shared-expert-intermediate-size", config["shared_expert_intermediate_size"],
                  "--moe-shared-expert-gate"]  # fmt: skip
    return [str(flag) for flag in flags]


def _grouped_attention(config: Config) -> list:
    heads = config["num_attention_heads"]
    return [
        "--group-query-attention", "--num-query-groups", config.get("num_key_value_heads") or heads,
        "--kv-channels", config.get("head_dim") or config["hidden_size"] // heads,
    ]  # fmt: skip


def _latent_attention(config: Config) -> list:
    latent_attention(config)  # raises for what Megatron can't express
    return [
        "--multi-latent-attention", "--q-lora-rank", config["q_lora_rank"],
        "--kv-lora-rank", config["kv_lora_rank"], "--qk-head-dim", config["qk_nope_head_dim"],
        "--qk-pos-emb-head-dim", config["qk_rope_head_dim"], "--v-head-dim", config["v_head_dim"],
    ]  # fmt: skip


def _rope(config: Config, *, latent: bool) -> list:
    """Position embedding: transformers 5 has rope_parameters, older versions rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    flags = ["--rotary-base", int(rope.get("rope_theta") or config.get("rope_theta") or 10000)]
    if config["model_type"] == "glm4_moe":
        share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
        flags += ["--rotary-percent", share]
    if kind == "default":
        # Megatron's fused kernel for latent attention, which is on by default, is YaRN's alone.
        return [*flags, "--rope-type", "rope", "--no-rope-fusion"] if latent else flags
    if kind == "llama3" and not latent:
        _demand(rope, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
        return [*flags, "--use-rope-scaling", "--rope-scaling-factor", rope["factor"]]
    if kind == "yarn" and latent:
        _demand(rope, original_max_position_embeddings=4096)
        return [
            *flags, "--rope-type", "yarn", "--rotary-scaling-factor", rope["factor"],
            "--mscale", rope.get("mscale", 1), "--mscale-all-dim", rope.get("mscale_all_dim", 0), *_betas(rope),
        ]  # fmt: skip
    raise ValueError(f"config.json: rope_type {kind!r} is not supported for this architecture")


def _betas(rope: Config) -> list:
    """YaRN's two borders, as rotations within the original context, where they are not those of DeepSeek-V3."""
    found = {"--beta-fast": rope.get("beta_fast") or 32, "--beta-slow": rope.get("beta_slow") or 1}
    return [word for flag, value in found.items() if value != ADDED[flag][0] for word in (flag, value)]


def _experts(config: Config) -> list:
    return [
        "--num-experts", num_experts(config), "--moe-router-topk", config["num_experts_per_tok"],
        "--moe-ffn-hidden-size", config.get("moe_intermediate_size") or config["intermediate_size"],
        "--moe-router-load-balancing-type", "none", "--moe-router-dtype", "fp32",
        "--moe-token-dispatcher-type", "alltoall",
    ]  # fmt: skip


def _router(config: Config, *, biased: bool) -> list:
    """The router's score function, its normalisation over the top k, and groups of experts."""
    kind, groups = config["model_type"], config.get("n_group") or 1
    renormalised = config.get("norm_topk_prob", biased or kind == "mixtral")  # transformers' defaults
    if biased:
        if not renormalised:
            raise ValueError(
                "config.json: norm_topk_prob is false, and Megatron always normalises sigmoid scores over the top k"
            )
        flags = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    else:
        flags = [] if renormalised else ["--moe-router-pre-softmax"]
    if config.get("routed_scaling_factor", 1) != 1:
        flags += ["--moe-router-topk-scaling-factor", config["routed_scaling_factor"]]
    if groups > 1:
        best = config["num_experts_per_tok"] // config["topk_group"]
        if best != 2:
            raise ValueError(
                f"config.json: num_experts_per_tok / topk_group is {best}: Megatron would rank a group by its best "
                f"{best} experts, {kind} ranks it by 2"
            )
        flags += ["--moe-router-num-groups", groups, "--moe-router-group-topk", config["topk_group"]]
    return flags


def _dense_layers(config: Config) -> list:
    """The flag for layers without experts, if there are any: 1 for a layer of experts, 0 for a dense one."""
    with_experts = expert_layers(config)
    pattern = [int(layer in with_experts) for layer in range(config["num_hidden_layers"])]
    return [] if all(pattern) else ["--moe-layer-freq", f"[{','.join(map(str, pattern))}]"]


def _demand(rope: Config, **values: float) -> None:
    for name, value in values.items():
        if rope.get(name, value) != value:
            raise ValueError(f"config.json: {name} is {rope[name]}, and Megatron has {value} without a flag for it")

"""Megatron's flags for the model that a Hugging Face config.json describes.

They set the architecture; parallelism, precision, batch sizes and the optimizer are left to the user.
"""

from __future__ import annotations

from argparse import ArgumentParser

from megatron_rl_corr.models.architectures import (
    Config,
    expert_layers,
    gated_attention,
    gated_shared_expert,
    indexer,
    is_tied,
    latent_attention,
    linear_layers,
    num_experts,
    output_bias,
    parts_of,
    qk_norms,
    qkv_bias,
    router_bias,
    shared_experts,
    stacked_experts,
    window_layers,
)
from megatron_rl_corr.models.rope import ADDED, rope_flags
from megatron_rl_corr.models.settings import (
    DEFAULTS,
    ROPE,
    check_settings,
    family_of,
    malformed,
    with_defaults,
)

ALWAYS = [
    "--normalization",
    "RMSNorm",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
]


DELTA_NETS = "gated_delta_net"
"""The --experimental-attention-variant of models with gated delta nets."""
DELTA_NET_SIZES = {
    f"--linear-{size}": f"linear_{size.replace('-', '_')}"
    for size in ("conv-kernel-dim", "key-head-dim", "value-head-dim", "num-key-heads", "num-value-heads")
}
"""Flag -> its key of config.json, by which Megatron's argument is called, too."""
SPARSE = "dsa"
"""The --experimental-attention-variant of models whose attention takes the keys that an indexer chooses."""
INDEXER_SIZES = {
    "--dsa-indexer-n-heads": "index_n_heads",
    "--dsa-indexer-head-dim": "index_head_dim",
    "--dsa-indexer-topk": "index_topk",
}
"""Flag -> its key of config.json."""
INTERLEAVED_INDEXER = ("glm_moe_dsa",)
"""Families whose indexer rotates neighbouring numbers, and not halves."""


def add_missing_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add those of ADDED that Megatron's parser lacks; it hands every argument of a field's name
    on to that field.
    """
    group = parser.add_argument_group(
        "latent attention", "what Megatron's own flags leave out of its configuration"
    )
    for flag, (default, text) in ADDED.items():
        if flag not in parser._option_string_actions:
            group.add_argument(flag, type=float, default=default, help=f"{text} (default: {default})")
    return parser


def model_flags(config: Config) -> list[str]:
    """Megatron's command line for a model, as a list of words.

    Args:
        config: the model's config.json.

    Raises:
        ValueError: the architecture is not supported, a setting is not known, or no flag makes
            Megatron compute it.
    """
    check_settings(config)
    return flags_despite_settings(config)


def flags_despite_settings(config: Config) -> list[str]:
    """As `model_flags`, of a model with settings that `not_trained` refuses: the flags of all others."""
    wrong = malformed(config)
    if wrong:
        raise ValueError("\n  ".join(wrong))
    kind, parts = family_of(config), parts_of(with_defaults(config))
    known = {"model_type", *DEFAULTS[kind], *ROPE}
    config = {key: value for key, value in with_defaults(config).items() if key in known}
    flags = [
        "--num-layers",
        config["num_hidden_layers"],
        "--hidden-size",
        config["hidden_size"],
        "--ffn-hidden-size",
        config.get("intermediate_size") or config["moe_intermediate_size"],
        "--num-attention-heads",
        config["num_attention_heads"],
        "--vocab-size",
        config["vocab_size"],
        "--max-position-embeddings",
        config["max_position_embeddings"],
        "--norm-epsilon",
        config["rms_norm_eps"],
        *ALWAYS,
        *(_gpt_oss(config) if stacked_experts in parts else ["--swiglu", "--disable-bias-linear"]),
    ]
    if not is_tied(config):
        flags.append("--untie-embeddings-and-output-weights")
    if qkv_bias in parts and output_bias not in parts:
        flags.append("--add-qkv-bias")
    if gated_attention in parts:
        flags += _delta_nets(config)
    if qk_norms in parts or latent_attention in parts:
        flags.append("--qk-layernorm")
    flags += _latent_attention(config) if latent_attention in parts else _grouped_attention(config)
    flags += rope_flags(config, DEFAULTS[kind], latent=latent_attention in parts)
    if indexer in parts:
        flags += _indexer(config, kind, fused_rope="--no-rope-fusion" not in flags)
    if num_experts(config) is not None:
        flags += [*_experts(config), *_router(config, biased=router_bias in parts), *_dense_layers(config)]
    if shared_experts in parts and config["n_shared_experts"]:
        width = config["n_shared_experts"] * config["moe_intermediate_size"]
        flags += ["--moe-shared-expert-intermediate-size", width]
    if gated_shared_expert in parts:
        flags += [
            "--moe-shared-expert-intermediate-size",
            config["shared_expert_intermediate_size"],
            "--moe-shared-expert-gate",
        ]
    return [str(flag) for flag in flags]


def _gpt_oss(config: Config) -> list:
    """Biases of all linear layers, a clamped activation, sinks, and windows."""
    within = window_layers(config)
    pattern = [int(layer in within) for layer in range(config["num_hidden_layers"])]
    return [
        "--quick-geglu",
        "--glu-linear-offset",
        "1.0",
        "--activation-func-clamp-value",
        config["swiglu_limit"],
        "--softmax-type",
        "learnable",
        "--window-size",
        f"{config['sliding_window'] - 1},0",  # Megatron counts the tokens before a query
        "--window-attn-skip-freq",
        f"[{','.join(map(str, pattern))}]",
        "--no-bias-dropout-fusion",  # Megatron's grouped experts refuse it beside biases
        "--no-bias-gelu-fusion",  # fused, an expert by itself is clamped before its bias is added
    ]


def _delta_nets(config: Config) -> list:
    """Gated delta nets and, every so many layers, attention whose output is gated; norms of 1 + weight."""
    linear = linear_layers(config)
    pattern = [int(layer in linear) for layer in range(config["num_hidden_layers"])]
    flags = [word for flag, key in DELTA_NET_SIZES.items() for word in (flag, config[key])]
    return [
        "--attention-output-gate",
        "--apply-layernorm-1p",
        "--experimental-attention-variant",
        DELTA_NETS,
        "--linear-attention-freq",
        f"[{','.join(map(str, pattern))}]",
        *flags,
    ]


def _grouped_attention(config: Config) -> list:
    heads = config["num_attention_heads"]
    return [
        "--group-query-attention",
        "--num-query-groups",
        config["num_key_value_heads"],
        "--kv-channels",
        config.get("head_dim") or config["hidden_size"] // heads,
    ]


def _latent_attention(config: Config) -> list:
    latent_attention(config)  # raises for what Megatron can't express
    return [
        "--multi-latent-attention",
        "--q-lora-rank",
        config["q_lora_rank"],
        "--kv-lora-rank",
        config["kv_lora_rank"],
        "--qk-head-dim",
        config["qk_nope_head_dim"],
        "--qk-pos-emb-head-dim",
        config["qk_rope_head_dim"],
        "--v-head-dim",
        config["v_head_dim"],
    ]


def _indexer(config: Config, kind: str, *, fused_rope: bool) -> list:
    """Sparse attention and its indexer.

    The indexer's Hadamard rotation is left out, as in transformers: scores are the same without it, and
    Megatron's needs bfloat16 and a kernel. The epsilon is 1e-6 in transformers and servers, whatever
    rms_norm_eps is.
    """
    return [
        "--experimental-attention-variant",
        SPARSE,
        *(word for flag, key in INDEXER_SIZES.items() for word in (flag, config[key])),
        "--dsa-indexer-k-norm-epsilon",
        1e-6,
        "--no-dsa-indexer-rotate-activation",
        *(["--dsa-indexer-rope-interleaved"] if kind in INTERLEAVED_INDEXER else []),
        *(["--no-rope-fusion"] if fused_rope else []),  # Megatron refuses the fused kernel here
    ]


def _experts(config: Config) -> list:
    return [
        "--num-experts",
        num_experts(config),
        "--moe-router-topk",
        config["num_experts_per_tok"],
        "--moe-ffn-hidden-size",
        config.get("moe_intermediate_size") or config["intermediate_size"],
        "--moe-router-load-balancing-type",
        "none",
        "--moe-router-dtype",
        "fp32",
        "--moe-token-dispatcher-type",
        "alltoall",
    ]


def _router(config: Config, *, biased: bool) -> list:
    """The router's score function, its normalisation over the top k, and groups of experts."""
    # Mixtral has no such key
    best, renormalised = config["num_experts_per_tok"], config.get("norm_topk_prob", True)
    if not biased:
        if renormalised and best == 1:
            raise ValueError(
                "config.json: num_experts_per_tok is 1 with scores that are normalised over the top k, "
                "which Megatron refuses; use a model with more experts for a token"
            )
        return [] if renormalised else ["--moe-router-pre-softmax"]
    if not renormalised:
        raise ValueError(
            "config.json: norm_topk_prob is false, and Megatron always normalises sigmoid scores over the "
            "top k; use a model with norm_topk_prob true"
        )
    if best == 1:
        raise ValueError(
            "config.json: num_experts_per_tok is 1 with norm_topk_prob true, and Megatron does not "
            "normalise the score of one expert; use a model with more experts for a token"
        )
    flags = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    if config["routed_scaling_factor"] != 1:
        flags += ["--moe-router-topk-scaling-factor", config["routed_scaling_factor"]]
    return [*flags, *_expert_groups(config)]


def _expert_groups(config: Config) -> list:
    groups, chosen, experts_of_all = config["n_group"], config["topk_group"], num_experts(config)
    if chosen > groups or experts_of_all % groups:
        raise ValueError(
            f"config.json: n_group {groups}, topk_group {chosen} and n_routed_experts {experts_of_all} do "
            "not fit each other; correct them"
        )
    if groups == 1:
        return []
    best = config["num_experts_per_tok"] // chosen
    if best != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok / topk_group is {best}: Megatron would rank a group by its "
            f"best {best} experts, {config['model_type']} ranks it by 2; use a model with n_group 1, or with "
            "twice as many experts for a token as groups"
        )
    return ["--moe-router-num-groups", groups, "--moe-router-group-topk", chosen]


def _dense_layers(config: Config) -> list:
    """The flag for layers without experts, if there are any: 1 for a layer of experts, 0 for a dense one."""
    with_experts = expert_layers(config)
    pattern = [int(layer in with_experts) for layer in range(config["num_hidden_layers"])]
    return [] if all(pattern) else ["--moe-layer-freq", f"[{','.join(map(str, pattern))}]"]

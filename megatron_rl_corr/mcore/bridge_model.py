"""Megatron's model as Megatron-Bridge describes it: its flags, and a model provider for pretrain scripts.

`bridge_model` is for the model_provider of Megatron's pretrain(), in the place of the script's own: families
such as Gemma 2 have layers that no flag of Megatron makes. Megatron's flags say as ever how the model is laid
out over ranks, and its precision and kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn import functional

from megatron_rl_corr.mcore.bridge_names import auto_bridge
from megatron_rl_corr.mcore.checks.policy_flags import COMPARED
from megatron_rl_corr.models.hf_checkpoint import read_model

PLAIN_SPECS = ("default_layer_spec", "get_gpt_decoder_block_spec")
"""Bridge's layers that are Megatron's own, which its flags make too."""
PLAIN_PROVIDERS = ("GPTModelProvider", "MLAModelProvider", "MistralModelProvider")
"""Bridge's providers that build Megatron's GPTModel from its configuration alone."""
BESIDE_FLAGS = (
    "activation_func",
    "add_bias_linear",
    "gated_linear_unit",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "num_moe_experts",
    "original_max_position_embeddings",
    "softmax_scale",
    "yarn_correction_range_round_to_int",
)
ARCHITECTURE = (*(flag.removeprefix("--").replace("-", "_") for flag in COMPARED), *BESIDE_FLAGS)
"""Fields of Megatron's configuration that say what a model computes, by their flags' names or others: they
are Bridge's, and the flags' must be equal.
"""
WITHOUT_TP = {
    "minimax_m2_layer_spec": "cuts the norms of queries and keys over ranks, where their gradients are wrong "
    "(Megatron adds up over ranks those of all norms of queries and keys)",
    "olmoe_layer_spec": "takes the norms of queries and keys over all heads, of which a rank has a part",
}
"""Bridge's layers that are not right on tensor-parallel ranks -> why."""
BRIDGES_OWN = ("mtp_num_layers", "hidden_dropout", "attention_dropout")
"""Further fields that are set here, and not by flags."""


def provider_of(hf_config: Mapping[str, Any]) -> Any:
    """Bridge's provider of a model: a TransformerConfig with a method that builds the model.

    Args:
        hf_config: the model's config.json.

    Raises:
        ValueError: as `auto_bridge`; or Bridge's model is of a kind whose log-probs this package can't take.
    """
    found = auto_bridge(hf_config).to_megatron_provider(load_weights=False)
    if not isinstance(found, TransformerConfig) or "transformer_layer_spec" not in vars(found):
        raise ValueError(
            f"config.json: model_type {hf_config['model_type']!r} is a {type(found).__name__} in "
            "Megatron-Bridge, and not a model of Megatron's transformer layers alone; use another model"
        )
    return found


def is_plain(provider: Any) -> bool:
    """True if Megatron's flags build the same layers as Bridge."""
    return type(provider).__name__ in PLAIN_PROVIDERS and _layers(provider) in PLAIN_SPECS


def _layers(provider: Any) -> str:
    """The name of the function that makes the layers' specification."""
    spec = provider.transformer_layer_spec
    return (spec.func if isinstance(spec, partial) else spec).__name__


def run_problems(args: argparse.Namespace, provider: Any) -> list[str]:
    """A line for each of a run's flags that Bridge's model is not proven with.

    Args:
        args: Megatron's, with the launcher's.
        provider: of `provider_of`.
    """
    if is_plain(provider):
        return []
    kind, lines = _layers(provider), []
    if kind in WITHOUT_TP and args.tensor_model_parallel_size > 1:
        lines.append(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: Megatron-Bridge's {kind} "
            f"{WITHOUT_TP[kind]}; use 1"
        )
    if not args.rollout_pad_sequences:
        lines.append(
            f"no --rollout-pad-sequences: Megatron-Bridge's {kind} is not proven with packed sequences; "
            "give it"
        )
    if args.context_parallel_size > 1:
        lines.append(
            f"--context-parallel-size {args.context_parallel_size}: Megatron-Bridge's {kind} is not proven "
            "with it; use 1"
        )
    return lines


def configured_provider(args: argparse.Namespace) -> Any:
    """Bridge's provider of the run's model, laid out as Megatron's arguments say, and checked by Megatron.

    Args:
        args: Megatron's, with the launcher's.

    Raises:
        ValueError: as `provider_of`.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    provider = provider_of(read_model(args.rollout_hf_checkpoint))
    by_flags = core_transformer_config_from_args(args)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} & vars(provider).keys()
    for name in fields - {*ARCHITECTURE, *BRIDGES_OWN}:
        value = vars(by_flags)[name]
        # what no flag sets is Bridge's
        if name in vars(args) or value != _default(name):
            setattr(provider, name, value)
    provider.mtp_num_layers = None
    provider.hidden_dropout = provider.attention_dropout = 0.0
    provider.vocab_size, provider.should_pad_vocab = args.padded_vocab_size, False
    provider.seq_length = args.max_position_embeddings or args.seq_length
    provider.finalize()
    return provider


def _default(name: str) -> Any:
    field = next(one for one in dataclasses.fields(TransformerConfig) if one.name == name)
    return field.default


def bridge_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """A chunk of the model of --rollout-hf-checkpoint, built by Megatron-Bridge: for Megatron's pretrain().

    Args:
        pre_process, post_process: whether the chunk has the embedding, and the output layer.
        vp_stage: number of the chunk on this pipeline rank.
        config: not used; what Megatron's flags say is taken from its arguments.
        pg_collection: process groups; None: Megatron's.

    Raises:
        ValueError: as `provider_of`.
    """
    from megatron.training import get_args

    provider = configured_provider(get_args())
    provider._pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)


def model_problems(chunk: nn.Module, expected: Any) -> list[str]:
    """Lines for what a chunk of a model computes otherwise than Bridge's.

    Args:
        chunk: unwrapped.
        expected: of `configured_provider`.
    """
    if not isinstance(chunk.config, type(expected)) and not is_plain(expected):
        return [
            f"{type(expected).__name__}: Megatron-Bridge builds this family of layers of its own, which no "
            "flag of Megatron makes; hand megatron_rl_corr.mcore.bridge_model.bridge_model to pretrain() as "
            "model_provider"
        ]
    own = {field.name for field in dataclasses.fields(expected)}
    own -= {field.name for field in dataclasses.fields(TransformerConfig)}
    compared = (*ARCHITECTURE, *own) if isinstance(chunk.config, type(expected)) else ARCHITECTURE
    return [
        f"{name}: the script's model has {vars(chunk.config)[name]}, and Megatron-Bridge's "
        f"{vars(expected)[name]}; give the flags of `megatron-rl-corr model-flags`, or build it by "
        "megatron_rl_corr.mcore.bridge_model.bridge_model"
        for name in compared
        if name in vars(chunk.config)
        and name in vars(expected)
        and not name.startswith("_")
        and _plain(vars(chunk.config)[name]) != _plain(vars(expected)[name])
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, partial):  # of which two are never equal
        return value.func, value.args, value.keywords
    return list(value) if isinstance(value, tuple) else value


def provider_flags(provider: Any) -> list[str]:
    """Megatron's command line for Bridge's model, as far as Megatron has flags for it.

    Args:
        provider: of `provider_of`.
    """
    has = vars(provider)
    flags: list[Any] = [
        *("--num-layers", has["num_layers"], "--hidden-size", has["hidden_size"]),
        *("--ffn-hidden-size", has["ffn_hidden_size"], "--num-attention-heads", has["num_attention_heads"]),
        *("--vocab-size", provider.vocab_size, "--max-position-embeddings", provider.seq_length),
        *("--normalization", has["normalization"], "--norm-epsilon", has["layernorm_epsilon"]),
        *("--attention-dropout", 0, "--hidden-dropout", 0),
        *_activation(provider),
        *_switches(provider),
    ]
    if has.get("multi_latent_attention"):
        flags += ["--multi-latent-attention", *_given(has, LATENT), "--rope-type", has["rope_type"]]
    else:
        groups = has["num_query_groups"] or has["num_attention_heads"]
        head = has["kv_channels"] or has["hidden_size"] // has["num_attention_heads"]
        flags += ["--group-query-attention", "--num-query-groups", groups, "--kv-channels", head]
    flags += ["--position-embedding-type", provider.position_embedding_type]
    if isinstance(has["rotary_base"], int | float):  # Gemma 3 has one for each kind of layer
        flags += ["--rotary-base", int(has["rotary_base"]), "--rotary-percent", has["rotary_percent"]]
    if has["window_size"] is not None and isinstance(has["window_size"], tuple | list):
        flags += ["--window-size", ",".join(map(str, has["window_size"]))]
        skip = has["window_attn_skip_freq"]
        flags += [] if skip is None else ["--window-attn-skip-freq", _listed(skip)]
    if has["num_moe_experts"]:
        flags += ["--num-experts", has["num_moe_experts"], *_given(has, EXPERTS)]
        flags += ["--moe-router-load-balancing-type", "none", "--moe-router-dtype", "fp32"]
        flags += ["--moe-token-dispatcher-type", "alltoall"]
        # some of Bridge's mappings have no names for experts one by one
        flags += ["--moe-grouped-gemm"] if provider.moe_grouped_gemm else []
        if has["moe_layer_freq"] != 1:
            flags += ["--moe-layer-freq", _listed(has["moe_layer_freq"])]
    return [str(word) for word in flags]


def flags_of(path: str) -> list[str]:
    """`provider_flags` of a Hugging Face folder's model. Raises ValueError as `provider_of`."""
    return provider_flags(provider_of(read_model(path)))


LATENT = {
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
    "--rotary-scaling-factor": "rotary_scaling_factor",
    "--mscale": "mscale",
    "--mscale-all-dim": "mscale_all_dim",
}
EXPERTS = {
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-router-score-function": "moe_router_score_function",
    "--moe-router-topk-scaling-factor": "moe_router_topk_scaling_factor",
    "--moe-router-num-groups": "moe_router_num_groups",
    "--moe-router-group-topk": "moe_router_group_topk",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
}
SWITCHES = {
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "rotary_interleaved": "--rotary-interleaved",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
}


def _given(has: Mapping[str, Any], flags: Mapping[str, str]) -> list[Any]:
    return [word for flag, name in flags.items() if has.get(name) is not None for word in (flag, has[name])]


def _switches(provider: Any) -> list[str]:
    flags = [flag for name, flag in SWITCHES.items() if vars(provider).get(name)]
    flags += [] if provider.add_bias_linear else ["--disable-bias-linear"]
    return flags + (
        [] if provider.share_embeddings_and_output_weights else ["--untie-embeddings-and-output-weights"]
    )


def _activation(provider: Any) -> list[str]:
    """The flag of an activation; none where Megatron has none, as for a gated GELU."""
    function, gated = provider.activation_func, provider.gated_linear_unit
    known = {
        (functional.silu, True): "--swiglu",
        (squared_relu, False): "--squared-relu",
        (quick_gelu, True): "--quick-geglu",
    }
    return [known[function, gated]] if (function, gated) in known else []


def _listed(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)

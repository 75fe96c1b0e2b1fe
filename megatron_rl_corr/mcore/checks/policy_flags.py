"""Megatron's flags by their effect on the policy: refused, compared with config.json, or
ignored for a reason.

Each flag is listed once, under the first name that Megatron's parser has for it. Flags that are not listed
do not reach a layer of the model: optimizer, data, checkpoints, logs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_rl_corr.models.hybrid import expert_layers
from megatron_rl_corr.models.megatron_flags import DELTA_NET_SIZES, DELTA_NETS, INDEXER_SIZES, SPARSE

ALLOW = "--rollout-allow-model-differences"


class Refused(NamedTuple):
    """A flag that no run with rollouts can have."""

    flag: str
    why: str
    instead: str = "leave it out"
    where: Callable[[Any, argparse.Namespace], bool] = lambda value, args: bool(value)
    """where(value, all arguments): whether this value of the flag is refused."""


BY_THE_BATCH = {"sinkhorn", "quantile_balancing"}
NO_DROPOUT = "servers sample without dropout and log-probs are scored without it, but training has it"
IN_PIECES = "parameters are cut over data-parallel ranks, and weights can't be loaded into the pieces"
INTERLEAVED = (
    "rows of gate and up projection take turns in blocks; weights are loaded and sent as gate, then up"
)
GROUPED = "all experts of a layer are one parameter, which has no table of names"
QUANTISED = "the model computes with weights that are quantised otherwise than those sent"

OTHER_POLICY = (
    Refused("--attention-dropout", NO_DROPOUT, "give --attention-dropout 0"),
    Refused("--hidden-dropout", NO_DROPOUT, "give --hidden-dropout 0"),
    Refused(
        "--moe-input-jitter-eps", "the routers see noise that is new in each pass, and servers have none"
    ),
    Refused(
        "--moe-expert-capacity-factor",
        "which tokens an expert drops depends on the other tokens of the microbatch, and servers drop none",
    ),
    Refused(
        "--moe-pad-expert-input-to-capacity", "experts drop what is above a capacity, and servers do not"
    ),
    Refused(
        "--moe-expert-rank-capacity-factor",
        "which tokens a rank drops depends on the other tokens of the microbatch, and servers drop none",
    ),
    Refused("--moe-router-force-load-balancing", "tokens go to random experts"),
    Refused("--moe-router-force-biased", "tokens go to random experts"),
    Refused(
        "--moe-router-load-balancing-type",
        "training chooses experts by a rule of the whole microbatch, or of a bias that servers do not have",
        "use none, aux_loss, seq_aux_loss or global_aux_loss",
        lambda value, args: not BY_THE_BATCH.isdisjoint([value] if isinstance(value, str) else value),
    ),
    Refused(
        "--fp8-recipe",
        "with --fp8-format a tensor's scale comes from the batches before, so that one sample has another "
        "log-prob in scoring than in training",
        "use --fp8-recipe tensorwise, blockwise or mxfp8",
        lambda value, args: args.fp8 is not None and value == "delayed",
    ),
    Refused("--te-precision-config-file", "it may give the scoring pass another precision than training"),
    Refused("--kitchen-config-file", QUANTISED),
    Refused("--kitchen-recipe-number", QUANTISED, where=lambda value, args: value is not None),
    Refused("--use-kitchen-attention", "attention is quantised in a way that no server has"),
)
"""Flags with which a policy other than the sampled one is trained, whatever config.json has."""

OTHER_LAYOUT = (
    Refused(
        "--fp8-param-gather", "parameters are kept in FP8, and weights are neither loaded into those nor sent"
    ),
    Refused(
        "--fp4-param-gather", "parameters are kept in FP4, and weights are neither loaded into those nor sent"
    ),
    Refused("--use-megatron-fsdp", IN_PIECES, "use --use-distributed-optimizer"),
    Refused("--use-torch-fsdp2", IN_PIECES, "use --use-distributed-optimizer"),
    Refused(
        "--tensor-parallel-num-weight-shards",
        "more shards than tensor-parallel ranks: weights can't be loaded into them",
        where=lambda value, args: value not in (None, args.tensor_model_parallel_size),
    ),
    Refused(
        "--expert-tensor-parallel-num-weight-shards",
        "more shards than expert tensor-parallel ranks: weights can't be loaded into them",
        where=lambda value, args: value not in (None, args.expert_tensor_parallel_size),
    ),
    Refused("--moe-mlp-glu-interleave-size", INTERLEAVED, where=lambda value, args: value is not None),
    Refused(
        "--moe-shared-expert-glu-interleave-size", INTERLEAVED, where=lambda value, args: value is not None
    ),
    Refused("--moe-single-grouped-weight", GROUPED),
    Refused("--moe-single-grouped-bias", GROUPED),
    Refused("--use-grouped-gemm-for-dense-mlp", "a dense layer's parameters have names that no table knows"),
    Refused(
        "--use-grouped-gemm-for-shared-expert", "a shared expert's parameters have names that no table knows"
    ),
    Refused("--moe-use-legacy-grouped-gemm", GROUPED),
    Refused("--mla-down-proj-fusion", "both down projections are one parameter, which has no table of names"),
    Refused(
        "--transformer-impl",
        "its layers are for inference",
        "use transformer_engine or local",
        lambda value, args: value == "inference_optimized",
    ),
    Refused("--use-legacy-models", "weights are loaded into megatron-core's models, and sent from those"),
    Refused(
        "--hybrid-context-parallel",
        "samples are cut over a number of ranks that rollouts' batches do not know",
    ),
    Refused("--overlap-moe-expert-parallel-comm", "the corrected step has no schedule for it"),
)
"""Weights could not be loaded from the checkpoint, or would be sent as something else."""

REFUSED = OTHER_POLICY + OTHER_LAYOUT

INDEXER_SETTINGS = {
    "--dsa-indexer-topk-freq": "dsa_indexer_topk_freq",
    "--dsa-indexer-skip-topk-offset": "dsa_indexer_skip_topk_offset",
    "--dsa-indexer-rope-interleaved": "dsa_indexer_rope_interleaved",
    "--no-dsa-indexer-scoring-relu": "dsa_indexer_scoring_relu",
    "--dsa-indexer-k-norm-epsilon": "dsa_indexer_k_norm_epsilon",
}
"""Flags that say which keys an indexer chooses, beside its sizes -> the argument."""

COMPARED = (
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--normalization",
    "--apply-layernorm-1p",
    "--norm-epsilon",
    "--qk-layernorm",
    "--qk-l2-norm",
    "--swiglu",
    "--squared-relu",
    "--quick-geglu",
    "--glu-linear-offset",
    "--activation-func-clamp-value",
    "--position-embedding-type",
    "--rotary-base",
    "--rotary-percent",
    "--rotary-interleaved",
    "--rotary-seq-len-interpolation-factor",
    "--use-rope-scaling",
    "--rope-scaling-factor",
    "--no-rope-freq",
    "--softmax-type",
    "--window-size",
    "--window-attn-skip-freq",
    "--attention-output-gate",
    "--experimental-attention-variant",
    "--linear-attention-freq",
    *DELTA_NET_SIZES,
    *INDEXER_SIZES,
    *INDEXER_SETTINGS,
    "--multi-latent-attention",
    "--q-lora-rank",
    "--kv-lora-rank",
    "--qk-head-dim",
    "--qk-pos-emb-head-dim",
    "--v-head-dim",
    "--rope-type",
    "--rotary-scaling-factor",
    "--mscale",
    "--mscale-all-dim",
    "--beta-fast",
    "--beta-slow",
    "--yarn-original-max-position-embeddings",
    "--yarn-beta-fast",
    "--yarn-beta-slow",
    "--no-yarn-correction-range-round-to-int",
    "--num-experts",
    "--moe-layer-freq",
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--moe-router-score-function",
    "--moe-router-pre-softmax",
    "--moe-router-topk-scaling-factor",
    "--moe-router-num-groups",
    "--moe-router-group-topk",
    "--moe-router-enable-expert-bias",
    "--moe-shared-expert-intermediate-size",
    "--moe-shared-expert-gate",
    "--moe-apply-probs-on-input",
    "--moe-latent-size",
    "--use-mup",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--heterogeneous-layers-config-path",
    "--heterogeneous-layers-config-encoded-json",
    "--spec",
)
"""Flags that change log-probs: the run's must be those of config.json, and Megatron's defaults
where it has none.
"""


def _query_groups(args: argparse.Namespace) -> int | None:
    if args.multi_latent_attention:
        return None
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _head_size(args: argparse.Namespace) -> int | None:
    if args.multi_latent_attention:
        return None
    return args.hidden_size // args.num_attention_heads if args.kv_channels is None else args.kv_channels


def _expert_layers(args: argparse.Namespace) -> list[int] | None:
    """1 for each layer with experts, 0 for a dense one; None without experts."""
    if not args.num_experts:
        return None
    if _hybrid_layers(args) is not None:
        return _hybrid_layers(args)
    pattern = args.moe_layer_freq
    return pattern if isinstance(pattern, list) else [int(i % pattern == 0) for i in range(args.num_layers)]


def _hybrid_layers(args: argparse.Namespace) -> list[int] | None:
    """1 for each layer with experts of a HybridModel that is GPTModel's in other layers; None
    for other models.
    """
    pattern = vars(args).get("hybrid_layer_pattern")  # from 0.17 on
    return None if pattern is None else expert_layers(pattern)


def _window_layers(args: argparse.Namespace) -> list[int] | None:
    """1 for each layer that attends within a window, 0 for one that sees all; None without a window."""
    skip = args.window_attn_skip_freq
    if args.window_size is None:
        return None
    if isinstance(skip, list):
        return skip
    return [int(skip is None or layer % skip != 0) for layer in range(1, args.num_layers + 1)]


def _of_yarn(name: str, default: float) -> Callable[[argparse.Namespace], Any]:
    """The value of an argument of YaRN outside of latent attention; None elsewhere: it has no effect."""

    def value(args: argparse.Namespace) -> Any:
        if args.position_embedding_type != "yarn" or args.multi_latent_attention:
            return None
        given = vars(args)[name]
        return default if given is None else given

    return value


def _dense_size(args: argparse.Namespace) -> int | None:
    layers = _expert_layers(args)
    return None if layers is not None and all(layers) else args.ffn_hidden_size


def _linear_layers(args: argparse.Namespace) -> list[int] | None:
    """1 for each layer whose attention is a gated delta net; None for a model without such."""
    pattern = _of_delta_nets("linear_attention_freq")(args)
    if isinstance(pattern, int):
        return [int((layer + 1) % pattern != 0) for layer in range(args.num_layers)]
    return pattern


def _of_delta_nets(name: str) -> Callable[[argparse.Namespace], Any]:
    """The value of an argument of gated delta nets; None for a model without such: it has no effect."""

    def value(args: argparse.Namespace) -> Any:
        return vars(args)[name] if args.experimental_attention_variant == DELTA_NETS else None

    return value


def _of_indexer(name: str) -> Callable[[argparse.Namespace], Any]:
    """The value of an argument of an indexer; None for a model without one: it has no effect."""

    def value(args: argparse.Namespace) -> Any:
        return vars(args)[name] if args.experimental_attention_variant == SPARSE else None

    return value


EFFECTIVE: dict[str, Callable[[argparse.Namespace], Any]] = {
    # A hybrid pattern of pairs is GPTModel's layers; what its --spec makes of them, the names of
    # parameters tell.
    "--num-layers": lambda args: (
        args.num_layers if _hybrid_layers(args) is None else len(_hybrid_layers(args))
    ),
    "--hybrid-layer-pattern": lambda args: (
        args.hybrid_layer_pattern if _hybrid_layers(args) is None else None
    ),
    "--spec": lambda args: args.spec if _hybrid_layers(args) is None else None,
    "--num-query-groups": _query_groups,
    "--kv-channels": _head_size,
    "--add-qkv-bias": lambda args: args.add_qkv_bias or args.add_bias_linear,
    "--ffn-hidden-size": _dense_size,
    "--moe-layer-freq": _expert_layers,
    "--moe-ffn-hidden-size": lambda args: args.moe_ffn_hidden_size if args.num_experts else None,
    "--moe-router-topk-scaling-factor": lambda args: args.moe_router_topk_scaling_factor or 1.0,
    "--window-attn-skip-freq": _window_layers,
    "--yarn-original-max-position-embeddings": _of_yarn("yarn_original_max_position_embeddings", 4096),
    "--yarn-beta-fast": _of_yarn("yarn_beta_fast", 32.0),
    "--yarn-beta-slow": _of_yarn("yarn_beta_slow", 1.0),
    "--no-yarn-correction-range-round-to-int": _of_yarn("yarn_correction_range_round_to_int", True),
    "--linear-attention-freq": _linear_layers,
    **{flag: _of_delta_nets(name) for flag, name in DELTA_NET_SIZES.items()},
    **{flag: _of_indexer(flag.lstrip("-").replace("-", "_")) for flag in INDEXER_SIZES},
    **{flag: _of_indexer(name) for flag, name in INDEXER_SETTINGS.items()},
    "--rope-type": lambda args: args.rope_type or ("yarn" if args.multi_latent_attention else "rope"),
}
"""What Megatron makes of a flag, with others and with its default; elsewhere it is the flag's value."""

IGNORED: dict[str, tuple[str, ...]] = {
    "the same function in other kernels, which round otherwise": (
        "--attention-backend",
        "--flash-attention-version",
        "--use-flash-attn",
        "--no-masked-softmax-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        "--no-rope-fusion",
        "--no-persist-layer-norm",
        "--no-gradient-accumulation-fusion",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl",
        "--use-fused-weighted-squared-relu",
        "--fused-residual-rmsnorm",
        "--use-transformer-engine-op-fuser",
        "--use-te-activation-func",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--no-dsa-indexer-rotate-activation",  # of queries and keys alike: their products stay
        "--dsa-kernel-backend",
        "--batch-invariant-mode",
        "--deterministic-mode",
        "--enable-experimental",
        "--disable-jit-fuser",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--cuda-graph-impl",
        "--cuda-graph-warmup-steps",
        "--cuda-graph-modules",
        "--cuda-graph-scope",
        "--test-mode",
        "--onnx-safe",
    ),
    "precision: the mismatch that is measured and corrected": (
        "--fp16",
        "--bf16",
        "--attention-softmax-in-fp32",
        "--dsa-indexer-k-norm-fp32",
        "--apply-query-key-layer-scaling",
        "--fp32-residual-connection",
        "--disable-bf16-reduced-precision-matmul",
        "--moe-router-dtype",
        "--fp16-lm-cross-entropy",
        "--fp8-format",
        "--fp8-margin",
        "--fp8-interval",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
        "--no-fp8-wgrad",
        "--fp8-output-proj",
        "--fp8-quantizer-factory",
        "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16",
        "--num-layers-at-end-in-bf16",
        "--fp4-format",
        "--fp4-recipe",
        "--fp4-quantizer-factory",
        "--moe-router-padding-for-quantization",
        "--moe-router-padding-for-fp8",
    ),
    "how the same model is laid out over ranks, and what they exchange when": (
        "--tensor-model-parallel-size",
        "--sequence-parallel",
        "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-comm-backend",
        "--pipeline-model-parallel-layout",
        "--context-parallel-size",
        "--hierarchical-context-parallel-sizes",
        "--max-seqlen-per-dp-cp-rank",
        "--cp-comm-type",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--no-overlap-p2p-communication",
        "--overlap-p2p-communication-warmup-flush",
        "--use-ring-exchange-p2p",
        "--tp-comm-overlap",
        "--tp-comm-overlap-cfg",
        "--disable-tp-comm-bulk-wgrad",
        "--disable-tp-comm-bulk-dgrad",
        "--disable-tp-comm-overlap-ag",
        "--disable-tp-comm-overlap-rs",
        "--tp-comm-overlap-rs-dgrad",
        "--disable-tp-comm-split-ag",
        "--disable-tp-comm-split-rs",
        "--tp-comm-bootstrap-backend",
        "--symmetric-ar-type",
        "--moe-token-dispatcher-type",
        "--moe-enable-deepep",
        "--moe-flex-dispatcher-backend",
        "--moe-permute-fusion-into-hybridep",
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        "--moe-flex-dispatcher-num-sms",
        "--moe-deepep-num-sms",
        "--moe-hybridep-num-sms",
        "--moe-hybridep-num-blocks-permute",
        "--moe-hybridep-num-blocks-unpermute",
        "--moe-hybridep-num-sms-preprocessing",
        "--moe-ncclep-static-shape",
        "--moe-ncclep-zero-copy",
        "--moe-shared-expert-overlap",
        "--high-priority-a2a-comm-stream",
        "--delay-wgrad-compute",
        "--overlap-dispatch-backward-with-experts-wgrad",
        "--ep-overlap-early-attn-memory-release",
        "--defer-embedding-wgrad-compute",
        "--wgrad-deferral-limit",
        "--no-barrier-with-level-1-timing",
        "--moe-extended-tp",
        "--no-async-tensor-model-parallel-allreduce",
    ),
    "memory: what is kept, offloaded or computed again": (
        "--recompute-granularity",
        "--recompute-method",
        "--recompute-num-layers",
        "--recompute-modules",
        "--recompute-activations",
        "--moe-layer-recompute",
        "--distribute-saved-activations",
        "--mlp-chunks-for-training",
        "--no-clone-scatter-output-in-embedding",
        "--cpu-offloading-num-layers",
        "--cpu-offloading-retain-pinned-cpu-buffers",
        "--fine-grained-activation-offloading",
        "--offload-modules",
        "--min-offloaded-tensor-size",
        "--delay-offload-until-cuda-graph",
        "--delta-offload-bytes-across-pp-ranks",
        "--activation-offload-fraction",
        "--fine-grained-offloading-max-inflight-offloads",
        "--moe-paged-stash",
        "--moe-paged-stash-page-size",
        "--moe-paged-stash-buffer-size-factor-cuda",
        "--moe-paged-stash-buffer-size-factor-cpu",
    ),
    "initial weights, over which the checkpoint's are loaded": (
        "--no-initialization",
        "--use-cpu-initialization",
        "--init-method-std",
        "--embedding-init-method-std",
        "--init-model-with-meta-device",
        "--init-method-xavier-uniform",
    ),
    "the gradient or the step, not the forward pass": (
        "--calculate-per-token-loss",
        "--moe-aux-loss-coeff",
        "--moe-z-loss-coeff",
        "--moe-router-bias-update-rate",
        "--dsa-indexer-loss-coeff",  # refused by check_sparse_attention
        "--dsa-indexer-use-sparse-loss",
        "--qk-clip",
        "--qk-clip-alpha",
        "--qk-clip-threshold",
    ),
    "a limit, or vocabulary that no token has": (
        "--max-position-embeddings",
        "--seq-length",
        "--vocab-size",
        "--padded-vocab-size",
        "--no-pad-vocab-size",
        "--make-vocab-size-divisible-by",
        "--vocab-extra-ids",
    ),
    "Megatron's own inference, or its logs": (
        "--flash-decode",
        "--mlp-chunks-for-prefill",
        "--nccl-all-reduce-for-prefill",
        "--inference-rng-tracker",
        "--inference-cuda-graph-scope",
        "--inference-fuse-tp-communication",
        "--inference-disable-triton-nvls-kernels",
        "--inference-grouped-gemm-backend",
        "--inference-moe-disable-fused-quant-kernels",
        "--inference-moe-token-dispatcher-type",
        "--moe-pad-experts-for-cuda-graph-inference",
        "--cache-mla-latents",
        "--moe-per-layer-logging",
        "--log-max-attention-logit",
        "--config-logger-dir",
        "--moe-enable-routing-replay",
    ),
    "layers beside the policy, which mcore/mtp.py refuses where they would change it": ("--mtp-num-layers",),
    "no effect on its own: a part of, or nothing without, flags that are compared or refused": (
        "--group-query-attention",
        "--use-rotary-position-embeddings",
        "--no-position-embedding",
        "--openai-gelu",
        "--apply-residual-connection-post-layernorm",
        "--moe-token-drop-policy",
        "--moe-router-quantile-balancing-ema",
        "--kitchen-attention-backend",
        "--mup-width-mult",
        "--mup-base-hidden-size",
        "--mup-embedding-mult",
        "--mup-output-mult",
        "--mup-base-head-dim",
        "--mup-attn-scale-power",
        "--mtp-loss-scaling-factor",
        "--mtp-use-repeated-layer",
        "--mtp-detach-heads",
        "--mtp-standalone",
        "--mtp-hybrid-override-pattern",
        "--relative-attention-num-buckets",
        "--relative-attention-max-distance",
        "--mrope-section",
        "--is-hybrid-model",
        "--mamba-state-dim",
        "--mamba-head-dim",
        "--mamba-num-groups",
        "--mamba-num-heads",
        "--disable-mamba-mem-eff-path",
        "--mamba-training-ssm-states-dtype",
    ),
}
"""Why flags may be as they like -> the flags."""

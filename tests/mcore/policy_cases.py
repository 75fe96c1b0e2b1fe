"""For each flag that is compared with config.json, or ignored, what flips it: a model of
tiny_models, and words.
"""

from typing import NamedTuple


class Flip(NamedTuple):
    """Words that are added to the model's flags, from which `without` is taken; `both` is added
    before the flip too.
    """

    model: str
    words: str
    without: str = ""
    both: str = ""


DENSE, MOE, SHARED, LATENT, YARN = "llama", "qwen3_moe", "qwen2_moe", "deepseek_v3", "qwen3 yarn"

COMPARED = {
    "--num-layers": Flip(DENSE, "--num-layers 3"),
    "--hidden-size": Flip(DENSE, "--hidden-size 40"),
    "--ffn-hidden-size": Flip(DENSE, "--ffn-hidden-size 60"),
    "--num-attention-heads": Flip(DENSE, "--num-attention-heads 8"),
    "--num-query-groups": Flip(DENSE, "--num-query-groups 1"),
    "--kv-channels": Flip(DENSE, "--kv-channels 16"),
    "--untie-embeddings-and-output-weights": Flip(DENSE, "", "--untie-embeddings-and-output-weights"),
    "--disable-bias-linear": Flip(DENSE, "", "--disable-bias-linear"),
    "--add-qkv-bias": Flip(DENSE, "--add-qkv-bias"),
    "--normalization": Flip(DENSE, "--normalization LayerNorm"),
    "--norm-epsilon": Flip(DENSE, "--norm-epsilon 1e-2"),
    "--qk-layernorm": Flip(DENSE, "--qk-layernorm"),
    "--qk-l2-norm": Flip(DENSE, "--qk-l2-norm"),
    "--swiglu": Flip(DENSE, "", "--swiglu"),
    "--squared-relu": Flip(DENSE, "--squared-relu", "--swiglu"),
    "--quick-geglu": Flip(DENSE, "--quick-geglu", "--swiglu"),
    "--glu-linear-offset": Flip(DENSE, "--glu-linear-offset 0.5"),
    "--activation-func-clamp-value": Flip(DENSE, "--activation-func-clamp-value 0.5"),
    "--position-embedding-type": Flip(DENSE, "--position-embedding-type none"),
    "--rotary-base": Flip(DENSE, "--rotary-base 10000"),
    "--rotary-percent": Flip(DENSE, "--rotary-percent 0.5"),
    "--rotary-interleaved": Flip(DENSE, "--rotary-interleaved"),
    "--rotary-seq-len-interpolation-factor": Flip(DENSE, "--rotary-seq-len-interpolation-factor 4"),
    "--use-rope-scaling": Flip(DENSE, "", "--use-rope-scaling"),
    "--rope-scaling-factor": Flip(DENSE, "--rope-scaling-factor 1.5"),
    "--no-rope-freq": Flip(DENSE, "--no-rope-freq 2"),
    "--softmax-type": Flip(DENSE, "--softmax-type off-by-one"),
    "--window-size": Flip(DENSE, "--window-size 4,0"),
    "--window-attn-skip-freq": Flip(DENSE, "--window-attn-skip-freq 2", both="--window-size 4,0"),
    "--attention-output-gate": Flip(DENSE, "--attention-output-gate"),
    "--multi-latent-attention": Flip(LATENT, "", "--multi-latent-attention --rope-type"),
    "--q-lora-rank": Flip(LATENT, "--q-lora-rank 20"),
    "--kv-lora-rank": Flip(LATENT, "--kv-lora-rank 20"),
    "--qk-head-dim": Flip(LATENT, "--qk-head-dim 16"),
    "--qk-pos-emb-head-dim": Flip(LATENT, "--qk-pos-emb-head-dim 8"),
    "--v-head-dim": Flip(LATENT, "--v-head-dim 8"),
    "--rope-type": Flip(LATENT, "--rope-type rope"),
    "--rotary-scaling-factor": Flip(LATENT, "--rotary-scaling-factor 4"),
    "--mscale": Flip(LATENT, "--mscale 0.5"),
    "--mscale-all-dim": Flip(LATENT, "--mscale-all-dim 0.5"),
    "--beta-fast": Flip(LATENT, "--beta-fast 1"),
    "--beta-slow": Flip(LATENT, "--beta-slow 32"),
    "--yarn-original-max-position-embeddings": Flip(YARN, "--yarn-original-max-position-embeddings 16"),
    "--yarn-beta-fast": Flip(YARN, "--yarn-beta-fast 300"),
    "--yarn-beta-slow": Flip(YARN, "--yarn-beta-slow 20"),
    "--no-yarn-correction-range-round-to-int": Flip(YARN, "--no-yarn-correction-range-round-to-int"),
    "--num-experts": Flip(MOE, "--num-experts 6"),
    "--moe-layer-freq": Flip(SHARED, "--moe-layer-freq [1,0,0,1]"),
    "--moe-ffn-hidden-size": Flip(MOE, "--moe-ffn-hidden-size 16"),
    "--moe-router-topk": Flip(MOE, "--moe-router-topk 3"),
    "--moe-router-score-function": Flip(MOE, "--moe-router-score-function sigmoid"),
    "--moe-router-pre-softmax": Flip(MOE, "--moe-router-pre-softmax"),
    "--moe-router-topk-scaling-factor": Flip(
        MOE, "--moe-router-topk-scaling-factor 2.5", both="--moe-router-pre-softmax"
    ),
    "--moe-router-num-groups": Flip(LATENT, "--moe-router-num-groups 2"),
    "--moe-router-group-topk": Flip(LATENT, "--moe-router-group-topk 4"),
    "--moe-router-enable-expert-bias": Flip(LATENT, "", "--moe-router-enable-expert-bias"),
    "--moe-shared-expert-intermediate-size": Flip(SHARED, "--moe-shared-expert-intermediate-size 20"),
    "--moe-shared-expert-gate": Flip(SHARED, "", "--moe-shared-expert-gate"),
    "--moe-apply-probs-on-input": Flip(
        MOE, "--moe-apply-probs-on-input", both="--moe-router-topk 1 --moe-router-pre-softmax"
    ),
    "--use-mup": Flip(DENSE, "--use-mup --mup-base-hidden-size 16 --mup-output-mult 2"),
}
"""A flip of each compared flag that can be run without a GPU; the flag is among the words,
or in `without`.
"""

IGNORED = {
    "--disable-jit-fuser": Flip(DENSE, "--disable-jit-fuser"),
    "--enable-experimental": Flip(DENSE, "--enable-experimental"),
    "--no-bias-gelu-fusion": Flip(DENSE, "--no-bias-gelu-fusion"),
    "--apply-query-key-layer-scaling": Flip(DENSE, "--apply-query-key-layer-scaling"),
    "--moe-router-dtype": Flip(MOE, "--moe-router-dtype fp64"),
    "--moe-token-dispatcher-type": Flip(MOE, "--moe-token-dispatcher-type allgather"),
    "--wgrad-deferral-limit": Flip(DENSE, "--wgrad-deferral-limit 3"),
    "--recompute-granularity": Flip(
        MOE, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "--recompute-modules": Flip(MOE, "--recompute-granularity selective --recompute-modules core_attn moe"),
    "--recompute-activations": Flip(DENSE, "--recompute-activations"),
    "--moe-layer-recompute": Flip(MOE, "--moe-layer-recompute"),
    "--init-method-std": Flip(DENSE, "--init-method-std 0.5"),
    "--embedding-init-method-std": Flip(DENSE, "--embedding-init-method-std 0.5"),
    "--no-initialization": Flip(DENSE, "--no-initialization"),
    "--calculate-per-token-loss": Flip(MOE, "--calculate-per-token-loss"),
    "--moe-aux-loss-coeff": Flip(MOE, "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.5"),
    "--moe-z-loss-coeff": Flip(MOE, "--moe-z-loss-coeff 0.5"),
    "--moe-router-bias-update-rate": Flip(LATENT, "--moe-router-bias-update-rate 0.5"),
    "--qk-clip-alpha": Flip(DENSE, "--qk-clip-alpha 0.25 --qk-clip-threshold 2"),
    "--max-position-embeddings": Flip(DENSE, "--max-position-embeddings 99"),
    "--seq-length": Flip(DENSE, "--seq-length 64"),
    "--vocab-size": Flip(DENSE, "--vocab-size 95 --vocab-extra-ids 3"),
    "--make-vocab-size-divisible-by": Flip(DENSE, "--make-vocab-size-divisible-by 128"),
    "--flash-decode": Flip(DENSE, "--flash-decode"),
    "--inference-rng-tracker": Flip(
        MOE,
        "--inference-rng-tracker --nccl-all-reduce-for-prefill --moe-pad-experts-for-cuda-graph-inference",
    ),
    "--mlp-chunks-for-prefill": Flip(DENSE, "--mlp-chunks-for-prefill 4"),
    "--moe-per-layer-logging": Flip(MOE, "--moe-per-layer-logging"),
    "--moe-enable-routing-replay": Flip(MOE, "--moe-enable-routing-replay"),
    "--use-rotary-position-embeddings": Flip(
        DENSE, "--use-rotary-position-embeddings", "--position-embedding-type"
    ),
    "--no-position-embedding": Flip(DENSE, "--no-position-embedding"),
    "--apply-residual-connection-post-layernorm": Flip(DENSE, "--apply-residual-connection-post-layernorm"),
    "--openai-gelu": Flip(DENSE, "--openai-gelu"),
    "--moe-token-drop-policy": Flip(
        MOE, "--moe-token-drop-policy position --moe-router-quantile-balancing-ema 0.5"
    ),
    "--mup-output-mult": Flip(
        DENSE,
        "--mup-output-mult 3 --mup-embedding-mult 3 --mup-attn-scale-power 0.5 --mup-width-mult 2 "
        "--mup-base-head-dim 4 --mup-base-hidden-size 16",
    ),
    "--mtp-loss-scaling-factor": Flip(
        DENSE,
        "--mtp-loss-scaling-factor 0.7 --mtp-use-repeated-layer --mtp-detach-heads --mtp-standalone "
        "--mtp-hybrid-override-pattern M",
    ),
    "--relative-attention-num-buckets": Flip(
        DENSE, "--relative-attention-num-buckets 8 --relative-attention-max-distance 16"
    ),
    "--dsa-indexer-topk": Flip(
        LATENT,
        "--dsa-indexer-topk 2 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk-freq 2 "
        "--dsa-indexer-skip-topk-offset 1 --dsa-indexer-loss-coeff 0.5 --dsa-indexer-use-sparse-loss "
        "--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu "
        "--dsa-indexer-k-norm-epsilon 0.1 --dsa-indexer-k-norm-fp32 --dsa-kernel-backend tilelang",
    ),
    "--mamba-state-dim": Flip(
        DENSE,
        "--mamba-state-dim 16 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-num-heads 4 "
        "--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype fp32",
    ),
    "--is-hybrid-model": Flip(DENSE, "--is-hybrid-model"),
    "--mrope-section": Flip(DENSE, "--mrope-section 1 1 2"),
}
"""A flip of each ignored flag that can be run without a GPU on one rank; the words may flip
others of them too.
"""

TRAINING = {
    "--attention-dropout": Flip(DENSE, "--attention-dropout 0.1"),
    "--hidden-dropout": Flip(DENSE, "--hidden-dropout 0.1"),
    "--moe-input-jitter-eps": Flip(MOE, "--moe-input-jitter-eps 0.01"),
    "--moe-expert-capacity-factor": Flip(MOE, "--moe-expert-capacity-factor 1.0"),
    "--moe-router-force-load-balancing": Flip(MOE, "--moe-router-force-load-balancing"),
    "--moe-router-force-biased": Flip(MOE, "--moe-router-force-biased 0.5"),
    "--moe-router-load-balancing-type": Flip(MOE, "--moe-router-load-balancing-type sinkhorn"),
}
"""Refused flags whose forward pass in training mode can be run without a GPU."""

NOT_RUN = {
    "kernels and layers of Transformer Engine, or CUDA graphs, which need a GPU": (
        "--attention-backend",
        "--flash-attention-version",
        "--use-flash-attn",
        "--no-masked-softmax-fusion",
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
        "--batch-invariant-mode",
        "--deterministic-mode",
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--cuda-graph-impl",
        "--cuda-graph-warmup-steps",
        "--cuda-graph-modules",
        "--cuda-graph-scope",
        "--test-mode",
        "--onnx-safe",
        "--no-fp8-wgrad",
        "--fp8-format",
        "--fp8-margin",
        "--fp8-interval",
        "--fp8-amax-history-len",
        "--fp8-amax-compute-algo",
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
        "--moe-enable-deepep",
        "--moe-flex-dispatcher-backend",
        "--moe-permute-fusion-into-hybridep",
        "--moe-flex-dispatcher-num-sms",
        "--moe-hybridep-pad-uneven-dispatch-inputs",
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
        "--qk-clip",
        "--log-max-attention-logit",
        "--cache-mla-latents",
        "--no-clone-scatter-output-in-embedding",
        "--mlp-chunks-for-training",
        "--moe-latent-size",
    ),
    "another floating type, in which log-probs are rounded otherwise": (
        "--fp16",
        "--bf16",
        "--attention-softmax-in-fp32",
        "--fp32-residual-connection",
        "--fp16-lm-cross-entropy",
        "--disable-bf16-reduced-precision-matmul",
    ),
    "several ranks: tests/mcore/test_hf_models.py has the same logits in a layout of four": (
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
        "--defer-embedding-wgrad-compute",
        "--no-barrier-with-level-1-timing",
        "--distribute-saved-activations",
    ),
    "layers beside the policy: tests/mcore/test_mtp.py has the policy's logits and gradients with them": (
        "--mtp-num-layers",
    ),
    "gone from this release": (
        "--moe-extended-tp",
        "--no-async-tensor-model-parallel-allreduce",
        "--kitchen-attention-backend",
        "--hybrid-override-pattern",
    ),
    "norms of 1 + weight, which Megatron's own layers do not have: tests/mcore/test_hf_models.py has them": (
        "--apply-layernorm-1p",
    ),
    "sizes and places of gated delta nets, by whose shapes weights are refused": (
        "--linear-attention-freq",
        "--linear-conv-kernel-dim",
        "--linear-key-head-dim",
        "--linear-value-head-dim",
        "--linear-num-key-heads",
        "--linear-num-value-heads",
    ),
    "models of another kind, which the names of weights refuse": (
        "--experimental-attention-variant",
        "--hybrid-layer-pattern",
        "--heterogeneous-layers-config-path",
        "--heterogeneous-layers-config-encoded-json",
        "--spec",
    ),
    "part of --num-query-groups' flip, given by every flip, or without a value that this machine can have": (
        "--group-query-attention",
        "--use-cpu-initialization",
        "--init-model-with-meta-device",
        "--init-method-xavier-uniform",
        "--padded-vocab-size",
        "--no-pad-vocab-size",
        "--inference-cuda-graph-scope",
        "--config-logger-dir",
    ),
    "nothing but for --transformer-impl inference_optimized, which is refused": (
        "--inference-fuse-tp-communication",
        "--inference-disable-triton-nvls-kernels",
        "--inference-grouped-gemm-backend",
        "--inference-moe-disable-fused-quant-kernels",
        "--inference-moe-token-dispatcher-type",
    ),
}
"""Why no test flips a flag here -> the compared and ignored flags."""

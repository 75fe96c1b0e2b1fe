"""The flags that make a planned layout: Megatron's, the run's, and the servers'."""

from __future__ import annotations

from megatron_rl_corr.commands.planner.serving import ServingMemory
from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from megatron_rl_corr.models.architectures import Config, num_experts


def training_flags(
    config: Config, layout: TrainLayout, workload: Workload, *, colocated: bool = False
) -> list[str]:
    """Flags of Megatron and of the run, beside those of `models.megatron_flags.model_flags`.

    Args:
        config: the model's config.json.
        layout: of the GPUs that train.
        workload: lengths and batch sizes.
        colocated: servers are on the same GPUs.
    """
    # Gradient accumulation fusion, on by default, is a kernel of Apex, which `make setup` does not install.
    flags: list[str | int] = ["--bf16", "--no-gradient-accumulation-fusion"]
    for flag, size in (
        ("--tensor-model-parallel-size", layout.tensor),
        ("--pipeline-model-parallel-size", layout.pipeline),
        ("--context-parallel-size", layout.context),
        ("--expert-model-parallel-size", layout.expert),
    ):
        flags += [flag, size] if size > 1 else []
    if layout.tensor > 1:
        flags.append("--sequence-parallel")
    if num_experts(config) is not None:
        # Megatron's default for the experts is the tensor-parallel size of the other layers.
        flags += ["--expert-tensor-parallel-size", layout.expert_tensor, "--moe-grouped-gemm"]
    if layout.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    if layout.offload_optimizer:
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    if layout.recompute == "full":
        flags += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            1,
        ]
    elif layout.recompute == "selective":
        flags += ["--recompute-granularity", "selective"]
    flags += [
        "--seq-length",
        workload.seq_length,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        workload.global_batch_size,
        "--rollout-group-size",
        workload.group_size,
        "--rollout-max-new-tokens",
        workload.max_new_tokens,
    ]
    if workload.microbatch_tokens != workload.seq_length:
        flags += ["--rollout-max-tokens-per-microbatch", workload.microbatch_tokens]
    if layout.linear_logprobs:
        flags.append("--rollout-linear-logprobs")
    if num_experts(config) is not None:
        flags += ["--router-replay", "R3"]
    if colocated:
        flags += ["--rollout-colocate", "--rollout-weight-transport", "tensor"]
    return [str(flag) for flag in flags]


def server_flags(
    config: Config, serving: ServingMemory, fraction: float, *, colocated: bool = False
) -> list[str]:
    """SGLang's flags for one server, beside its model and address.

    Args:
        config: the model's config.json.
        serving: its size.
        fraction: --mem-fraction-static.
        colocated: the trainer is on the same GPUs.
    """
    flags = [
        "--dtype",
        "bfloat16",
        "--tp-size",
        str(serving.tensor),
        "--mem-fraction-static",
        f"{fraction:g}",
    ]
    flags += ["--enable-memory-saver"] if colocated else []
    return flags + (["--enable-return-routed-experts"] if num_experts(config) is not None else [])

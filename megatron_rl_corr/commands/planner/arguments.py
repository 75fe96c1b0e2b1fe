"""The options of megatron-rl-corr plan; the standard library alone, as the command's help is."""

from __future__ import annotations

import argparse

SERVER_RESERVE_GIB = 4.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    add = parser.add_argument
    add("--hf-checkpoint", metavar="DIR", required=True, help="folder that holds the model's config.json")
    add(
        "--gpus", metavar="N", type=int, required=True, help="all GPUs, those that train and those that serve"
    )
    add("--serve-gpus", metavar="S", type=int, help="those of them that serve (default: half; 0: none)")
    add(
        "--colocate",
        action="store_true",
        help="all GPUs train and serve, in turn, as with --rollout-colocate",
    )
    add(
        "--gpus-per-node",
        metavar="N",
        type=int,
        default=8,
        help="default 8; tensor parallelism and a server stay on a node",
    )
    add("--gpu-memory-gib", metavar="GIB", type=float, default=80.0, help="of each GPU (default 80)")
    add(
        "--reserve-gib",
        metavar="GIB",
        type=float,
        default=6.0,
        help="of a GPU that trains, for CUDA, NCCL, workspaces, fragments and a push (default 6)",
    )
    add(
        "--server-reserve-gib",
        metavar="GIB",
        type=float,
        help="with --colocate, of every GPU for the server's process, whose CUDA context, NCCL, CUDA graphs "
        f"and workspaces stay when it has released its memory (default {SERVER_RESERVE_GIB:g}, not measured)",
    )
    add("--max-prompt-tokens", metavar="N", type=int, default=1024, help="longest prompt (default 1024)")
    add("--max-new-tokens", metavar="N", type=int, default=4096, help="longest response (default 4096)")
    add(
        "--max-tokens-per-microbatch",
        metavar="N",
        type=int,
        help="as --rollout-max-tokens-per-microbatch (default: one longest sequence)",
    )
    add("--global-batch-size", metavar="N", type=int, default=128, help="samples of an update (default 128)")
    add("--group-size", metavar="G", type=int, default=8, help="samples of a prompt (default 8)")
    layout = parser.add_argument_group("layout", "searched where it is not given")
    for name, dest in (
        ("tensor-model", "tensor"),
        ("pipeline-model", "pipeline"),
        ("context", "context"),
        ("expert-model", "expert"),
        ("expert-tensor", "expert_tensor"),
    ):
        layout.add_argument(f"--{name}-parallel-size", metavar="N", type=int, dest=dest)
    layout.add_argument(
        "--recompute", choices=["none", "selective", "full"], help="of activations (default: none, or full)"
    )
    layout.add_argument(
        "--optimizer-cpu-offload",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Adam on the host (default: where nothing else fits)",
    )
    layout.add_argument(
        "--no-distributed-optimizer", action="store_true", help="whole optimizer on every replica"
    )
    layout.add_argument(
        "--linear-logprobs", action="store_true", help="as --rollout-linear-logprobs: no logits held"
    )
    layout.add_argument(
        "--expert-imbalance",
        metavar="X",
        type=float,
        default=1.5,
        help="tokens of the busiest expert-parallel rank over the mean (default 1.5)",
    )
    layout.add_argument("--serve-tensor-parallel-size", metavar="N", type=int, help="GPUs of a server")
    layout.add_argument(
        "--mem-fraction-static", metavar="X", type=float, default=0.85, help="SGLang's (default 0.85)"
    )
    add("--json", action="store_true", help="print JSON, bytes in place of GiB")

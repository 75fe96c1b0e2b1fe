"""The parts of the check: one row each."""

from dataclasses import dataclass
from typing import Literal

TOTAL_S = 600
"""Limit of all parts together; one that has not ended by then is not run."""
REHEARSAL = 6
"""Times as long a rehearsal may take, in all and a part: what it runs on is no GPU, and may
have other work.
"""

SYNC_DEBUG, CUDA_IPC, NCCL = "sync-debug mode", "CUDA IPC", "NCCL"
FP8_SERVER, TIMINGS = "FP8 server", "GPU timings"
ONLY_ON_A_GPU = (SYNC_DEBUG, CUDA_IPC, NCCL, FP8_SERVER, TIMINGS)
"""All that a rehearsal without a GPU leaves out; the code around it runs there too."""


@dataclass(frozen=True)
class Part:
    """One part: a function of the device, which returns an Outcome or raises, in a process of its own."""

    name: str
    function: str
    """MODULE.FUNCTION in this folder."""
    shows: str
    limit_s: float
    """Longest time that it may take."""

    packages: tuple[str, ...] = ()
    """Beside torch: what must be installed."""
    gpu_packages: tuple[str, ...] = ()
    """What else must be installed where there is a GPU."""
    only_on_a_gpu: str = ""
    """What it leaves out without a GPU, of ONLY_ON_A_GPU."""
    runs_as: Literal["plain", "interpreter", "megatron"] = "plain"
    """Its process without a GPU: by Triton's interpreter, or with what Megatron needs there."""


_SERVED = ("sglang", "transformers", "safetensors", "aiohttp", "psutil", "numpy")
_MEGATRON = ("megatron.core", "numpy")
_TE = ("transformer_engine",)

PARTS = (
    Part(
        "triton",
        "triton_kernels.check",
        "Triton's log-probs, entropies and gradients are those of float64 and torch",
        120,
        ("triton", "numpy"),
        runs_as="interpreter",
    ),
    Part(
        "linear-head",
        "linear_head.check",
        "log-probs from hidden states, and both gradients, are those of float64",
        60,
        ("numpy",),
    ),
    Part(
        "host-sync",
        "host_sync.check",
        "from logits to their gradient, no loss and no preset waits for the device",
        90,
        ("numpy",),
        only_on_a_gpu=SYNC_DEBUG,
    ),
    Part(
        "host-sync-tokens",
        "host_sync.check_token_baseline",
        "nor does a step with the optimal token baseline",
        60,
        ("numpy", "safetensors"),
        only_on_a_gpu=SYNC_DEBUG,
    ),
    Part(
        "fp8-rounding",
        "fp8_rounding.check",
        "weights are rounded to FP8 and INT4 as in float64 on the CPU",
        60,
        ("numpy",),
    ),
    Part(
        "transformer-engine",
        "te_logprobs.check",
        "Megatron over Transformer Engine gives the recorded log-probs",
        120,
        _MEGATRON,
        _TE,
        runs_as="megatron",
    ),
    Part(
        "push-tensor",
        "pushes.check_tensor",
        "weights reach a real SGLang server by `tensor`",
        150,
        _SERVED,
        only_on_a_gpu=CUDA_IPC,
    ),
    Part(
        "push-distributed",
        "pushes.check_distributed",
        "weights reach a real SGLang server by `distributed`",
        150,
        _SERVED,
        only_on_a_gpu=NCCL,
    ),
    Part(
        "colocation",
        "colocation.check",
        "a real SGLang server releases its memory and gets it back with a push",
        150,
        _SERVED,
        only_on_a_gpu=CUDA_IPC,
    ),
    Part(
        "router-replay",
        "router_replay.check",
        "steps of a tiny MoE train the experts that the real server chose",
        300,
        (*_SERVED, "megatron.training"),
        _TE,
    ),
    Part(
        "fp8-server",
        "fp8_server.check",
        "weights reach a real SGLang server of an FP8 checkpoint",
        150,
        _SERVED,
        only_on_a_gpu=FP8_SERVER,
    ),
    Part(
        "benchmark-correction",
        "benchmark_runs.check_correction",
        "benchmarks/correction.py",
        120,
        ("numpy",),
        only_on_a_gpu=TIMINGS,
    ),
    Part(
        "benchmark-logprob",
        "benchmark_runs.check_logprob",
        "benchmarks/logprob.py",
        150,
        ("numpy", "triton"),
        only_on_a_gpu=TIMINGS,
    ),
    Part(
        "benchmark-packing",
        "benchmark_runs.check_packing",
        "benchmarks/packing.py",
        90,
        _MEGATRON,
        _TE,
        only_on_a_gpu=TIMINGS,
    ),
    Part(
        "benchmark-router-replay",
        "benchmark_runs.check_router_replay",
        "benchmarks/router_replay.py",
        90,
        _MEGATRON,
        _TE,
        only_on_a_gpu=TIMINGS,
    ),
)

"""Megatron alone in a process, for benchmarks of a whole step: on a GPU in Transformer Engine's
layers and bfloat16.

Without one in Megatron's own layers and float32, with the process's processor time, as the machine may
have other work.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def start() -> None:
    """The process group of this process."""
    from tools.local_server import free_port

    torch.set_num_threads(1)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)


def precision() -> dict:
    """Settings of TransformerConfig."""
    return (
        {"bf16": True, "params_dtype": torch.bfloat16}
        if DEVICE == "cuda"
        else {"attention_softmax_in_fp32": True}
    )


def layer_spec(experts: int | None = None):
    """Of dense layers, or of so many experts."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if DEVICE == "cuda":
        return specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None
        )
    return specs.get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm"
    )


def seconds(work: Callable[[], object]) -> float:
    """What the work takes: on a GPU until it is done there, else of the process's processor time."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - started
    started = time.process_time()
    work()
    return time.process_time() - started

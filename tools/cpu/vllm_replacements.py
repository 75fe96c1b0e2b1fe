"""Replacements for a process that runs vLLM 0.32 or 0.33 without a GPU."""

import ctypes
import multiprocessing
import os
import signal

import torch

from tools.cpu.replacement import NewEntry, Replacement
from tools.cpu.torch_gloo import ONE_DEVICE
from tools.process_group import PR_SET_PDEATHSIG

EARLY: list[Replacement] = [ONE_DEVICE]


def _ends_with_its_parent(original):
    def run_engine_core(*args, **kwargs) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it ended before the signal was armed
            os._exit(1)
        original(*args, **kwargs)

    return run_engine_core


def _forked(original):
    def get_mp_context():
        return multiprocessing.get_context("fork")

    return get_mp_context


def _triton_backend():
    """A backend without a compiler: what its kernels are called with goes to Triton's interpreter."""
    from triton.backends import Backend
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self):
            raise NotImplementedError("interpreted kernels are not tuned")

    return Backend(compiler=None, driver=InterpreterDriver)


def _sorts_instead(original):
    def apply_top_k_top_p_triton(
        logits: torch.Tensor, k, p, *, has_topp_only_rows: bool = True
    ) -> torch.Tensor:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    return apply_top_k_top_p_triton


LATE = [
    Replacement(
        "vllm.v1.engine.core",
        "EngineCoreProc.run_engine_core",
        _ends_with_its_parent,
        "the engine's process outlives a server that is killed",
    ),
    Replacement(
        "vllm.utils.system_utils",
        "get_mp_context",
        _forked,
        "vLLM's CPU platform spawns the engine's process, which imports for seconds what a fork has imported",
    ),
]

LATE_V2 = [
    *LATE,
    NewEntry(
        "triton.backends",
        "backends",
        "cpu",
        _triton_backend,
        "vLLM's V2 model runner wants a Triton for the CPU; its interpreter runs the kernels, slowly",
    ),
    Replacement(
        "vllm.v1.sample.ops.topk_topp_triton",
        "apply_top_k_top_p_triton",
        _sorts_instead,
        "Triton's interpreter cannot run this kernel; vLLM's own torch code computes the same",
    ),
]
"""Of the V2 model runner, which alone returns routed experts and sampling masks."""

"""The replacements of a process that serves SGLang without a GPU (SGLang 0.5.23)."""

from megatron_rl_corr.cpu.replacement import Replacement

# Imported all over SGLang, called only on a GPU; there is no wheel of it without CUDA.
STUB = "sgl_kernel"
STUB_WHY = "SGLang imports its GPU kernels by name; without them a stand-in can be imported but not called"

EARLY: list[Replacement] = []


def _skip_registration(original):
    def _cuda_host_register(*args, **kwargs) -> None:
        pass

    return _cuda_host_register


LATE = [
    Replacement(
        "sglang.srt.mem_cache.pool_host.common",
        "_cuda_host_register",
        _skip_registration,
        "pins host memory for copies from a GPU; --enable-return-routed-experts keeps its buffer on the host",
    ),
]

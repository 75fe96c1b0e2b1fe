"""Run real Megatron-core and real SGLang and vLLM servers on a machine without a GPU.

Importing this changes no process. `environment(engine)` returns the variables for a new process; there
`site/sitecustomize.py` installs an import hook, and the hook replaces the few functions that need CUDA;
the garbage collector runs less often. With a GPU nothing is replaced. `python -m tools.cpu` lists every
replacement with its reason.
"""

from tools.cpu.process_environment import (
    environment,
    gpu_available,
    megatron_arguments,
    replacements,
    sglang_arguments,
    transformer_engine,
    vllm_arguments,
)

__all__ = [
    "environment",
    "gpu_available",
    "megatron_arguments",
    "replacements",
    "sglang_arguments",
    "transformer_engine",
    "vllm_arguments",
]

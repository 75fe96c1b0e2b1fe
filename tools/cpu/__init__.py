"""What lets real Megatron-core and a real SGLang server run on a machine without a GPU.

Nothing here changes the process that imports it. `environment(engine)` makes the variables for a new
process; in that process `site/sitecustomize.py` installs an import hook, and the hook replaces the few
functions that insist on CUDA. With a GPU all of it is inert. `python -m tools.cpu` lists every
replacement with its reason.
"""

from tools.cpu.process_environment import (
    environment,
    gpu_available,
    replacements,
    sglang_arguments,
)

__all__ = ["environment", "gpu_available", "replacements", "sglang_arguments"]

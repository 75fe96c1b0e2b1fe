"""The CUDA compiler that `make setup` lays beside a GPU's packages; servers compile kernels as they need them."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def with_toolkit(base: Mapping[str, str], prefix: str | Path = sys.prefix) -> dict[str, str]:
    """An environment in which servers find the compiler of the lock: CUDA_HOME, and ninja on PATH.

    Without CUDA_HOME they take /usr/local/cuda, of whatever version. One that is set is left. Where prefix/cuda is no
    folder, as without a GPU, nothing changes.

    Args:
        base: the environment to begin with.
        prefix: of the Python that has the lock's packages.
    """
    toolkit = Path(prefix) / "cuda"
    if not toolkit.is_dir():
        return dict(base)
    path = os.pathsep.join([str(Path(prefix) / "bin"), base.get("PATH", os.defpath)])
    return {"CUDA_HOME": str(toolkit), **base, "PATH": path}

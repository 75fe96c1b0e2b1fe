"""The CUDA compiler that `make setup` lays beside a GPU's packages; servers compile kernels
as they need them.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def with_toolkit(base: Mapping[str, str], prefix: str | Path = sys.prefix) -> dict[str, str]:
    """An environment in which servers find the compiler of the lock: CUDA_HOME, and ninja on PATH.

    Without CUDA_HOME they take /usr/local/cuda, of whatever version. One that is set is left. Where
    prefix/cuda is no folder, as without a GPU, nothing changes.

    Args:
        base: the environment to begin with.
        prefix: of the Python that has the lock's packages.
    """
    toolkit = Path(prefix) / "cuda"
    if not toolkit.is_dir():
        return dict(base)
    path = os.pathsep.join([str(Path(prefix) / "bin"), base.get("PATH", os.defpath)])
    return {"CUDA_HOME": str(toolkit), **base, "PATH": path}


def with_libraries(base: Mapping[str, str], prefix: str | Path = sys.prefix) -> dict[str, str]:
    """An environment in which a program finds the CUDA of the lock before it is a Python that
    knows where they are.

    SGLang's memory saver is loaded so (LD_PRELOAD), and needs libcudart: the server does not start without.

    Args:
        base: the environment to begin with.
        prefix: as of `with_toolkit`.
    """
    libraries = Path(prefix) / "cuda/lib"
    if not libraries.is_dir():
        return dict(base)
    path = os.pathsep.join(filter(None, [str(libraries), base.get("LD_LIBRARY_PATH", "")]))
    return {**base, "LD_LIBRARY_PATH": path}

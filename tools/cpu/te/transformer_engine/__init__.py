"""A stand-in for Transformer Engine 2.20 on a machine without a GPU: its names and arguments,
computed by torch.

What a GPU is needed for (fp8, fused attention's own options, overlapped communication) raises
NotImplementedError.
"""

import os
import sys
from importlib.machinery import PathFinder

import torch

__version__ = "2.20.2"
STAND_IN = True
"""Tells this package from the real one."""


def _check_place() -> None:
    """Raises RuntimeError, which Megatron does not take for a missing package, where the
    real one could run.
    """
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    found = "torch finds a GPU" if torch.cuda.is_available() else None
    if PathFinder.find_spec(__name__, others) is not None:
        found = "the real transformer_engine is installed"
    if found is not None:
        raise RuntimeError(
            f"a stand-in for Transformer Engine is on the path, and {found}: take {here} off PYTHONPATH"
        )


_check_place()

from transformer_engine import common, pytorch  # noqa: E402, F401

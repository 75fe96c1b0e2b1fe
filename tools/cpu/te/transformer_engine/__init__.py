"""A stand-in for Transformer Engine 2.20 on a machine without a GPU: its names and arguments, computed by torch.

What a GPU is needed for (fp8, fused attention's own options, overlapped communication) raises NotImplementedError.
"""

__version__ = "2.20.2"
STAND_IN = True
"""Tells this package from the real one."""

from transformer_engine import common, pytorch  # noqa: E402, F401

"""The names that Megatron takes from transformer_engine.pytorch."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers  # noqa: F401
from transformer_engine.pytorch.attention import DotProductAttention  # noqa: F401
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker  # noqa: F401
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init  # noqa: F401
from transformer_engine.pytorch.module import (  # noqa: F401
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

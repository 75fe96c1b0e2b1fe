"""The layers that Megatron's Transformer Engine spec is made of."""

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # noqa: F401
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear  # noqa: F401
from transformer_engine.pytorch.module.linear import LayerNormLinear, Linear  # noqa: F401
from transformer_engine.pytorch.module.norm import LayerNorm, RMSNorm  # noqa: F401

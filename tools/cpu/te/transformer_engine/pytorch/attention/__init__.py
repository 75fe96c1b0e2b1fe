"""Attention and rotary embedding, of whole and of packed rows."""

from transformer_engine.pytorch.attention.dot_product_attention import DotProductAttention  # noqa: F401

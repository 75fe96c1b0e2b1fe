"""Attention sinks for SGLang's torch_native backend, the one attention backend without a GPU.

gpt-oss has them. Its windows need --disable-hybrid-swa-memory, as that backend reads one pool alone.
"""

import functools

import torch
from torch import Tensor

from tools.cpu.attention import attend
from tools.cpu.replacement import Replacement

BACKEND = "sglang.srt.layers.attention.torch_native_backend"
_SINKS: list[Tensor] = []
"""Those of the layer that is computed at this moment."""


def _with_sinks(original):
    @functools.wraps(original)
    def forward(self, *arguments, sinks: Tensor | None = None, **settings):
        if sinks is None:
            return original(self, *arguments, **settings)
        _SINKS.append(sinks)
        try:
            return original(self, *arguments, **settings)
        finally:
            _SINKS.pop()

    return forward


def _attend(original):
    @functools.wraps(original)
    def scaled_dot_product_attention(query, key, value, attn_mask=None, **settings):
        if not _SINKS:
            return original(query, key, value, attn_mask=attn_mask, **settings)
        queries, keys = query.shape[-2], key.shape[-2]
        visible = torch.ones(queries, keys, dtype=torch.bool) if attn_mask is None else attn_mask
        if settings["is_causal"]:
            visible = visible.tril()
        return attend(query, key, value, visible, sinks=_SINKS[-1], dropout_p=0.0, scale=settings["scale"])

    return scaled_dot_product_attention


def _exempt(original):
    def is_so() -> bool:
        return True

    return is_so


_WHY = (
    "gpt-oss is refused with torch_native for want of sinks, but for an engine that brings its own attention"
)
LATE = [
    Replacement(BACKEND, "TorchNativeAttnBackend.forward_extend", _with_sinks, "it takes no sinks"),
    Replacement(BACKEND, "TorchNativeAttnBackend.forward_decode", _with_sinks, "it takes no sinks"),
    Replacement(BACKEND, "scaled_dot_product_attention", _attend, "it has no score without a key"),
    Replacement("sglang.srt.arg_groups.model_hook", "is_mps", _exempt, _WHY),
    Replacement("sglang.srt.arg_groups.model_hook", "use_mlx", _exempt, _WHY),
]

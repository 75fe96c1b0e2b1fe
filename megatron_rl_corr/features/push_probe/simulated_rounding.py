"""Simulates the rounding of a number type in the model's forward pass.

Two right implementations of one model differ in rounding alone. How far that moves a log-prob depends on
the weights: a sure policy moves more than a random one, and a token whose router stands near a tie moves a
hundred times as far as its neighbours. So the trainer asks its own model: it computes the same text again
while the output of each layer is changed by as much as rounding changes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_rl_corr.mcore import compat


@contextmanager
def simulated_rounding(model: list, relative_error: float, draw: int) -> Iterator[None]:
    """Within, the outputs of the model's layers are off by a root mean square of `relative_error`.

    x becomes x (1 + e), with e uniform in +-sqrt(3) * relative_error. A value's own bits and `draw` decide on
    e, not a random generator, so ranks that hold copies of a value change it alike: routers of
    tensor-parallel ranks go on agreeing.

    Args:
        model: this rank's chunks.
        relative_error: root mean square of the relative error of an operation.
        draw: another number makes other changes.
    """
    step = math.sqrt(3.0) * relative_error

    def change(module: nn.Module, inputs: Any, output: Any) -> Any:
        # (output, bias), (hidden states, context), (probabilities, routing map)
        if isinstance(output, tuple):
            return _changed(output[0], step, draw), *output[1:]
        return _changed(output, step, draw)

    with ExitStack() as hooks:
        for chunk in compat.unwrapped(model):
            for module in _rounding_modules(chunk):
                hooks.callback(module.register_forward_hook(change).remove)
        yield


def _rounding_modules(chunk: nn.Module) -> list[nn.Module]:
    """Modules whose output an engine rounds: those that have weights of their own, layers, and
    the output layer.
    """
    tied = getattr(chunk, "output_layer", None)  # without a weight where embeddings are tied
    return [
        module
        for module in chunk.modules()
        if module is tied
        or isinstance(module, TransformerLayer)
        or any(True for _ in module.parameters(recurse=False))
    ]


def _changed(values: Any, step: float, draw: int) -> Any:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return values
    wide = values.float()
    bits = wide.view(torch.int32).long() + draw * 0x9E3779B1
    # Two rounds of multiply and shift: every bit of the value reaches the bits that decide.
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = ((bits ^ (bits >> 15)) * factor) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    return (wide * (1 + step * (bits.float() * 2**-31 - 1))).to(values.dtype)

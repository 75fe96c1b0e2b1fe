"""Megatron's HybridModel as GPTModel's layers: a pattern of `*E` and `*-`, whose every pair is one
transformer layer.

HybridModel has one layer for each sign of --hybrid-layer-pattern: * attention, - MLP, E experts; |
ends a pipeline stage. Example: "*-*E|*E*E" is a model of four transformer layers, the first of them
dense, on two stages.
"""

from __future__ import annotations

import re

from torch import nn

_PAIRS = re.compile(r"(\*[-E])+")


def expert_layers(pattern: str) -> list[int] | None:
    """1 for each transformer layer with experts, 0 for a dense one; None if the pattern has other
    layers than those.
    """
    signs = pattern.replace("|", "")
    return [int(sign == "E") for sign in signs[1::2]] if _PAIRS.fullmatch(signs) else None


def layers_per_block(chunk: nn.Module) -> int:
    """How many layers of a model chunk make one transformer layer: 2 of HybridModel's, 1 of GPTModel's.

    Raises:
        ValueError: the pattern has other layers, or a pipeline stage ends between an attention and its MLP.
    """
    pattern = vars(chunk).get("hybrid_layer_pattern")
    if pattern is None:
        return 1
    remedy = "use pairs of * and - or E, as *E*E, and put | between pairs"
    if expert_layers(pattern) is None:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: weights are loaded and sent of attention (*) and the MLP (-) "
            f"or the experts (E) behind it alone; {remedy}"
        )
    numbers = [layer.layer_number for layer in chunk.decoder.layers]
    if numbers and (numbers[0] % 2 == 0 or len(numbers) % 2):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: a pipeline stage has layers {numbers[0]} to {numbers[-1]}, "
            f"and so ends or begins within a pair; {remedy}"
        )
    return 2


def gpt_name(name: str) -> str:
    """HybridModel's name of a parameter as GPTModel's: decoder.layers.5.mlp.router.weight is layer 2's."""
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.", 1)
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{int(m[1]) // 2}.", name)

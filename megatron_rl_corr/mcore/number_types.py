"""What the trainer computes in."""

from __future__ import annotations

import argparse

import torch

QUANTIZED = {"fp8": "fp8", "fp4": "int4"}
"""By Megatron's argument, the type of the same rounding: a value of FP4 has as many bits as one of int4."""


def trained_type(args: argparse.Namespace) -> str:
    """The coarsest type of the trainer's products, a key of `evidence.ROUNDINGS`. Example: "bfloat16".

    Args:
        args: Megatron's; --fp8-format and --fp4-format count as what they multiply in, whatever the
            parameters' type.
    """
    for name in reversed(QUANTIZED):
        if vars(args).get(name):
            return QUANTIZED[name]
    dtype = str(args.params_dtype).removeprefix("torch.")
    if dtype == "float32" and torch.cuda.is_available():
        return "tf32"  # Transformer Engine's products of float32
    return dtype


def trains_quantized(args: argparse.Namespace) -> bool:
    """True if it multiplies in fewer than 16 bits."""
    return trained_type(args) in QUANTIZED.values()

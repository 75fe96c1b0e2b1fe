"""Rounding of pushed weights on this device: the CPU's numbers bit for bit, and those of float64 to
float32's rounding.

A GPU converts to float8_e4m3fn by an instruction of its own.
"""

import torch
from torch import Tensor

from megatron_rl_corr.weight_sync import rounding
from tools.gpu_check.outcome import Finding, Outcome, at_most, require

SHAPE = (2, 300, 420)
"""Experts, rows and columns; 128 divides neither rows nor columns."""
SLACK = 1e-5
"""What float32 adds to half a step: the rounding of scale, quotient and product, 2^-24 each."""


def check(device: str) -> Outcome:
    findings = []
    for name in rounding.ROUNDINGS:
        for dtype in (torch.float32, torch.bfloat16):
            findings += compare(name, weights().to(dtype), device)
    return Outcome(findings)


def weights() -> Tensor:
    """Blocks of unlike sizes, one of zeros, and numbers from the largest to below the smallest of float8."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(SHAPE, generator=generator) * 10 ** (2 * torch.randn(SHAPE, generator=generator))
    made[0, :128, :128] = 0
    made[1, 128:256] *= 1000
    return made


def compare(name: str, weight: Tensor, device: str) -> list[Finding]:
    """One rounding of one weight.

    Raises:
        DoesNotHold: a number is not the CPU's, or further from the weight than the nearest one in float64.
    """
    rounded = rounding.ROUNDINGS[name](weight.to(device)).cpu()
    require(rounded.dtype == weight.dtype, f"{name} turns {weight.dtype} into {rounded.dtype}")
    on_the_cpu = rounding.ROUNDINGS[name](weight)
    title = f"{name} of {str(weight.dtype).removeprefix('torch.')}"
    unlike = int((rounded != on_the_cpu).sum())
    findings = [at_most(f"{title}: numbers unlike the CPU's, of {weight.numel()}", unlike, 0)]
    scale = scales(name, weight)
    nearest = (
        _nearest_float8(weight.double() / scale)
        if name == "fp8_blockwise"
        else ((weight.double() / scale).round().clamp(-7, 7))
    )
    excess = (rounded.double() - weight.double()).abs() - (nearest * scale - weight.double()).abs()
    # A 16-bit result is rounded once more: by up to 2^-8 of its size.
    once_more = rounded.double().abs() * (2.0**-8 if weight.dtype == torch.bfloat16 else 0.0)
    beyond = ((excess - once_more) / scale).max().item()
    findings.append(
        at_most(f"{title}: further off than float64's nearest, in scales", max(beyond, 0.0), 448 * SLACK)
    )
    return findings


def scales(name: str, weight: Tensor) -> Tensor:
    """The scale of each number, by loops over blocks, in float64; 1 where all of a block is 0."""
    height, largest = (128, 448.0) if name == "fp8_blockwise" else (1, 7.0)
    found = torch.empty(weight.shape, dtype=torch.float64)
    for expert in range(weight.shape[0]):
        for top in range(0, weight.shape[1], height):
            for left in range(0, weight.shape[2], 128):
                block = weight[expert, top : top + height, left : left + 128].double()
                size = block.abs().max() / largest
                found[expert, top : top + height, left : left + 128] = size if size > 0 else 1.0
    return found


def _nearest_float8(x: Tensor) -> Tensor:
    """The number of 4 exponent bits (bias 7), 3 bits behind the point and at most 448 that is
    nearest, ties to even.
    """
    exponent = torch.frexp(x).exponent - 1  # 2^exponent <= |x| < 2^(exponent + 1)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=-6) - 3)
    return (x / step).round().mul(step).clamp(-448, 448)

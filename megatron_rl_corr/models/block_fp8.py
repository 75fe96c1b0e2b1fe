"""Weights in blocks of float8 with a scale each, as FP8 checkpoints store them, and back.

One implementation quantises what FP8 servers are sent and rounds what foresees them
(weight_sync/rounding.py). N rows and K columns of a weight.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Rows and columns of a block with one scale: `weight_block_size` of FP8 checkpoints."""
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""

ScaleFormat = Literal["float32", "ue8m0"]
"""Any number, or a power of two; both are stored in float32."""


def quantise_blockwise(weight: Tensor, scale_format: ScaleFormat = "float32") -> tuple[Tensor, Tensor]:
    """Each block b of 128 x 128 numbers as float8_e4m3fn(w / s_b), with s_b = max |w| of the block / 448.

    As ue8m0, s_b is rounded up to a power of two. The last block of a row or column is smaller where 128 does
    not divide it. A block of zeros has the scale 1.

    Args:
        weight: [..., N, K], of any floating dtype; blocks never cross what stands before the
            last two dimensions.
        scale_format: of the scales.

    Returns:
        values [..., N, K] float8_e4m3fn; scales [..., ceil(N / 128), ceil(K / 128)] float32, by which values
        are multiplied. A block with a number that is not finite has the scale NaN and is NaN.

    Source: Fp8Quantize of transformers (integrations/finegrained_fp8.py), bit for bit where 128 divides
    both; blocks beyond as in DeepGEMM's per_block_cast_to_fp8. Two exceptions. It makes NaN of zeros in a
    block whose largest number is below 1.4e-36; here the block becomes zeros. It rounds log2 of a scale,
    which may lose the last bit; here powers of two are exact.
    """
    rows, columns = weight.shape[-2:]
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N/128, 128, K/128, 128]
    largest = blocks.abs().amax(dim=(-3, -1))  # [..., N/128, K/128]
    # Multiplied rather than divided, as the reference does: a quotient would have another last bit.
    factor = LARGEST / torch.where(largest == 0, LARGEST, largest)
    if scale_format == "ue8m0":
        scales = _power_of_two_above(1 / factor)
        factor = 1 / scales
    else:
        factor = torch.where(factor.isinf(), 1.0, factor)
        scales = 1 / factor
    finite = largest.isfinite()
    factor, scales = torch.where(finite, factor, torch.nan), torch.where(finite, scales, torch.nan)
    # A product may round past the largest number, which float8 would turn into NaN.
    values = (blocks * factor[..., :, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous(), scales


def dequantise_blockwise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that values and scales stand for, multiplied in float32: v * s_b.

    Args:
        values: [..., N, K] float8_e4m3fn.
        scales: [..., ceil(N / 128), ceil(K / 128)].
        dtype: of what is returned.

    Returns:
        [..., N, K].
    """
    rows, columns = values.shape[-2:]
    of_numbers = scales.float().repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)
    return (values.float() * of_numbers[..., :columns]).to(dtype)


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x, of 2^-126 to 2^127, from the bits of float32."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)

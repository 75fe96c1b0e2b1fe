"""Products of an output layer in 16 bits, with sums and results in float32: on a GPU at the speed of 16 bits.

A product of two 16-bit numbers is exact in float32, so float32 copies of both factors are not needed,
whose products take a GPU more than ten times as long; but a GPU's sums of 16-bit products cut off what
float32 cannot hold, where those of float32 are rounded. A float32 factor, the logits' gradient, is cut
into bfloat16 pieces, whose sum it is, and each piece is multiplied. M x K times K x N.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECES = 2
"""bfloat16 numbers that a float32 number is split into: what two leave of it, 2^-18, is of the size of an
exp's own error.
"""


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """out = left right, or with `add` out += left right; out may be wider than left, and left than right.

    All is computed in the type of out: where 16-bit factors make float32, without copies on a GPU.
    """
    if out.dtype == torch.float32 and left.dtype == right.dtype and sums_in_float32(left):
        _multiply_wide(left, right, out, add)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=int(add), out=out)


def pieces(wide: Tensor, narrow: Tensor) -> Iterator[Tensor]:
    """Terms of `wide` to multiply with `narrow` one after the other; `wide` is overwritten.

    On a GPU bfloat16's, if that is the type of `narrow`; else `wide` itself. float16 cannot hold
    small gradients.
    """
    if wide.dtype != torch.float32 or narrow.dtype != torch.bfloat16 or not sums_in_float32(narrow):
        yield wide
        return
    for number in range(PIECES):
        piece = wide.to(torch.bfloat16)
        if number + 1 < PIECES:
            wide -= piece
        yield piece


def sums_in_float32(factor: Tensor) -> bool:
    """True if its device multiplies 16-bit factors of this type into float32: an NVIDIA GPU,
    from torch 2.8 on.
    """
    known = torch.version.cuda is not None and "dtype_out" in torch.ops.aten.addmm.overloads()
    return known and factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16)


def _multiply_wide(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    torch.addmm(out, left, right, beta=int(add), out_dtype=out.dtype, out=out)

"""Rounds weights that are pushed as quantised rollouts round theirs, and sends them in the
dtype that they had.

So any server samples from the policy that a quantised one would compute with, as far as its weights go:
activations, and keys and values, stay as that server has them. The trainer's own weights are never
changed. N rows and K columns of a weight, G groups of columns, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.models.block_fp8 import dequantise_blockwise, quantise_blockwise
from megatron_rl_corr.models.quantization import is_linear_weight

INT4_GROUP = 128
"""Columns of a row with one scale: `group_size` of W4A16 checkpoints."""
INT4_MAX = 7.0


def is_rounded(name: str, tensor: Tensor) -> bool:
    """True if a quantised rollout has this tensor quantised: a linear layer's weight, but for the
    layers it spares.

    Args:
        name: Hugging Face's.
        tensor: [N, K], or [E, N, K] of fused experts; a vector is never quantised.
    """
    return tensor.ndim >= 2 and is_linear_weight(name)


def round_fp8_blockwise(weight: Tensor) -> Tensor:
    """Each block b of 128 x 128 numbers as float8_e4m3fn(w / s_b) * s_b: what
    `quantise_blockwise` stands for.

    Args:
        weight: [..., N, K]; blocks never cross what stands before the last two dimensions.

    Returns:
        The same shape and dtype. A block of zeros stays one; one with a number that is not
        finite becomes NaN.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, and README_WEIGHTS.md of its repository.
    """
    return dequantise_blockwise(*quantise_blockwise(weight), weight.dtype)


def round_int4_group(weight: Tensor) -> Tensor:
    """Each group g of 128 columns of a row as round(w / s_g) * s_g, with s_g = max |w| of the group / 7.

    The integers are -7 to 7, rounded half to even; the last group of a row is smaller where 128 does not
    divide it. Scales are float32.

    Args:
        weight: [..., N, K]; K is the layer's input.

    Returns:
        The same shape and dtype. A group of zeros stays one; one with a number that is not
        finite becomes NaN.

    Source: symmetric W4A16 with groups, as the INT4 rollouts of slime and miles round (int4_qat).
    Observers of compressed-tensors divide by 7.5 and use -8 too.
    """
    columns = weight.shape[-1]
    # [..., N, G, 128]
    groups = pad(weight.float(), (0, -columns % INT4_GROUP)).unflatten(-1, (-1, INT4_GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # By a tensor: a GPU multiplies by the reciprocal of a number, which rounds twice.
    scale = largest / largest.new_full((), INT4_MAX)
    # 1 where there is nothing to divide, or a scale of float32 would be 0.
    scale = torch.where(scale == 0, 1.0, scale)
    rounded = (groups / scale).round().clamp(-INT4_MAX, INT4_MAX) * scale
    return rounded.flatten(-2)[..., :columns].to(weight.dtype).contiguous()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_blockwise": round_fp8_blockwise,
    "int4_group": round_int4_group,
}
"""What --rollout-push-rounding takes beside none."""


def rounded_units(units: Iterable[list[NamedTensor]], rounding: str) -> Iterator[list[NamedTensor]]:
    """The units of an exporter with each tensor that `is_rounded` rounded, as new tensors.

    They are whole, so that borders of blocks do not depend on how the trainer's ranks share a weight.

    Args:
        units: of `StageExporter.units`.
        rounding: a key of ROUNDINGS, or "none".
    """
    if rounding == "none":
        yield from units
        return
    round_weight = ROUNDINGS[rounding]
    for unit in units:
        yield [(name, round_weight(tensor) if is_rounded(name, tensor) else tensor) for name, tensor in unit]

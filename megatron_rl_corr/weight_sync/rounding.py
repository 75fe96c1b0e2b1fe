"""Rounds weights that are pushed as quantised rollouts round theirs, and sends them in the dtype that they had.

So any server samples from the policy that a quantised one would compute with, as far as its weights go: activations,
and keys and values, stay as that server has them. The trainer's own weights are never changed. N rows and K columns of
a weight, G groups of columns, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rl_corr.engines.types import NamedTensor

FP8_BLOCK = 128
"""Rows and columns of a block with one scale: `weight_block_size` of DeepSeek-V3's checkpoints."""
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn."""
INT4_GROUP = 128
"""Columns of a row with one scale: `group_size` of W4A16 checkpoints."""
INT4_MAX = 7.0

_KEPT = re.compile(r"embed|lm_head|norm|bias|router|(^|\.)gate\.weight$|shared_expert_gate")
"""Names of tensors that quantised checkpoints keep in 16 bits, and that servers therefore do not quantise."""


def is_rounded(name: str, tensor: Tensor) -> bool:
    """Whether a quantised rollout has this tensor quantised: a linear layer's weight, but for the layers it spares.

    Embeddings, the output layer, norms, biases and the gates of routers and shared experts are spared, as slime's
    tools/convert_hf_to_fp8.py and the published FP8 checkpoints of Qwen3 and DeepSeek-V3 do.

    Args:
        name: Hugging Face's.
        tensor: [N, K], or [E, N, K] of fused experts; a vector is never quantised.
    """
    return tensor.ndim >= 2 and _KEPT.search(name) is None


def round_fp8_blockwise(weight: Tensor) -> Tensor:
    """Each block b of 128 x 128 numbers as float8_e4m3fn(w / s_b) * s_b, with s_b = max |w| of the block / 448.

    The last block of a row or column is smaller where 128 does not divide it. Scales are float32.

    Args:
        weight: [..., N, K]; blocks never cross what stands before the last two dimensions.

    Returns:
        The same shape and dtype. A block of zeros stays one; one with a number that is not finite becomes NaN.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3.2, and README_WEIGHTS.md of its repository.
    """
    rows, columns = weight.shape[-2:]
    padded = pad(weight.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))  # [..., N/128, 128, K/128, 128]
    scale = _scale(blocks.abs().amax(dim=(-3, -1), keepdim=True), FP8_MAX)
    # Division may round past the largest number, which float8 would turn into NaN.
    rounded = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).flatten(-3, -2)[..., :rows, :columns].to(weight.dtype).contiguous()


def round_int4_group(weight: Tensor) -> Tensor:
    """Each group g of 128 columns of a row as round(w / s_g) * s_g, with s_g = max |w| of the group / 7.

    The integers are -7 to 7, rounded half to even; the last group of a row is smaller where 128 does not divide it.
    Scales are float32.

    Args:
        weight: [..., N, K]; K is the layer's input.

    Returns:
        The same shape and dtype. A group of zeros stays one; one with a number that is not finite becomes NaN.

    Source: symmetric W4A16 with groups, as the INT4 rollouts of slime and miles round (int4_qat). Observers of
    compressed-tensors divide by 7.5 and use -8 too.
    """
    columns = weight.shape[-1]
    groups = pad(weight.float(), (0, -columns % INT4_GROUP)).unflatten(-1, (-1, INT4_GROUP))  # [..., N, G, 128]
    scale = _scale(groups.abs().amax(dim=-1, keepdim=True), INT4_MAX)
    rounded = (groups / scale).round().clamp(-INT4_MAX, INT4_MAX) * scale
    return rounded.flatten(-2)[..., :columns].to(weight.dtype).contiguous()


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_blockwise": round_fp8_blockwise, "int4_group": round_int4_group,
}  # fmt: skip
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


def _scale(largest: Tensor, most: float) -> Tensor:
    """What a block is divided by; 1 where there is nothing to divide, or a scale of float32 would be 0."""
    scale = largest / most
    return torch.where(scale == 0, 1.0, scale)

"""Rotary position embedding, fused in the real package."""

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.positions import positions_of_rank


def _rotated(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The first angles.shape[-1] of t's last dimension turned in float32, the rest as it is."""
    turned, rest = t[..., : angles.shape[-1]].float(), t[..., angles.shape[-1] :]
    if interleaved:
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    angles = angles.float()
    return torch.cat(((turned * angles.cos() + across * angles.sin()).to(t.dtype), rest), dim=-1)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
) -> Tensor:
    """t [s, b, h, d], or packed [t, h, d] with cu_seqlens of the whole row; freqs [s or more, 1, 1, d]."""
    assert start_positions is None and tensor_format in ("sbhd", "thd")
    if tensor_format == "sbhd":
        return _rotated(t, freqs[: len(t)], interleaved)
    boundaries = cu_seqlens.tolist()
    starts = torch.tensor(boundaries[:-1]).repeat_interleave(cu_seqlens.diff().cpu())
    own = positions_of_rank(cp_rank, cp_size, boundaries)
    turned = _rotated(t[: len(own)], freqs[own - starts[own], 0], interleaved)
    return torch.cat((turned, t[len(own) :]))

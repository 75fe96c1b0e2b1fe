"""How far each sampled token's log-prob in training is from the server's, in units in the last place.

N tokens of this rank. p is the trainer's log-prob, rounded to the server's number type, q the server's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.reduce.metrics import MaxOfPresent, Metric, Min, Sum

FIRST = "exact/first"
"""The key of the first token that is apart, which is not logged."""
_SAMPLES, _POSITIONS = 14, 23
"""Bits of a key for a replica's samples and for positions: with 2^16 replicas a float64 holds it exactly."""


def ulps_apart(p: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor:
    """|p - q| / u, u = eps 2^floor(log2 max(|p|, |q|, 1)): the type's spacing at the larger of both, and at 1
    for smaller ones, as a log-softmax subtracts numbers of that size.

    Example: of float32 -0.5 and the next number, 5.96e-8 apart, 0.5; -2 and the next number, 2.
    0 exactly where both are the same number of the type. NaN or inf where one is not finite.

    Args:
        p: [N] float32.
        q: [N] float32.
        dtype: of the server's log-probs.

    Returns:
        [N] float64.
    """
    wide_p, wide_q = p.to(dtype).double(), q.double()
    _, exponent = torch.frexp(torch.maximum(wide_p.abs(), wide_q.abs()).clamp(min=1.0))
    spacing = torch.finfo(dtype).eps * torch.exp2((exponent - 1).double())
    return (wide_p - wide_q).abs() / spacing


def token_keys(replica: int, seq_ids: Tensor, positions: Tensor, sampled: Tensor) -> Tensor:
    """[T + 1] int64: a number of each sampled token in the order of replicas, samples, positions; -1 of
    others, and behind them -1, of padding.

    Args:
        replica: data-parallel rank.
        seq_ids: [T] int64.
        positions: [T] int64.
        sampled: [T] bool.
    """
    keys = ((replica << _SAMPLES) + seq_ids << _POSITIONS) + positions
    return torch.cat([keys.where(sampled, -1), keys.new_full((1,), -1)])


def place_of_key(key: int) -> tuple[int, int, int]:
    """(replica, sample, position) of a token of `token_keys`."""
    rest, position = divmod(key, 1 << _POSITIONS)
    return *divmod(rest, 1 << _SAMPLES), position


def exact_metrics(
    p: Tensor, q: Tensor, keys: Tensor, *, allowed: float, dtype: torch.dtype
) -> dict[str, Metric]:
    """What the comparison found, this rank's share, by logged name.

    Args:
        p, q: [N] float32.
        keys: [N] int64; -1: it was not sampled.
        allowed: ulps up to which a token counts as equal.
        dtype: of the server's log-probs.
    """
    sampled = keys >= 0
    ulps = ulps_apart(p, q, dtype)
    known = sampled & ulps.isfinite()
    apart = sampled & ~(ulps <= allowed)
    count = known.sum(dtype=torch.float64)
    distance = (p.to(dtype).double() - q.double()).abs()
    first = torch.where(apart, keys.double(), torch.inf)
    none = first.new_full((1,), torch.inf)
    zero = none.new_zeros(1)

    def largest(values: Tensor) -> MaxOfPresent:
        return MaxOfPresent(torch.stack([torch.cat([torch.where(known, values, 0.0), zero]).amax(), count]))

    return {
        "exact/tokens": Sum(sampled.sum(dtype=torch.float64)[None]),
        "exact/tokens_apart": Sum(apart.sum(dtype=torch.float64)[None]),
        "exact/tokens_unknown": Sum((sampled & ~known).sum(dtype=torch.float64)[None]),
        "exact/ulps_max": largest(ulps),
        "exact/log_ratio_max": largest(distance),
        FIRST: Min(torch.cat([first, none]).amin()[None]),
    }

"""Importance weights: a level (token, sequence, geometric) and a mode (truncate, clip, mask).

T tokens, S sequences; D = log pi_train - log pi_rollout per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.segments import to_tokens

LOG_CLAMP = 20.0
"""exp(+-20) = 4.9e8 and 2.1e-9: beyond it float32 sums lose every other token (verl's bound too)."""


def raw_weights(level: str, log_ratio: Tensor, seq_sum: Tensor, seq_count: Tensor, seq_ids: Tensor) -> Tensor:
    """The unbounded weight of each token, [T] float32.

    token: e^D. sequence: e^(sum of D over the sequence). geometric: e^(mean of D over the sequence).
    log_ratio [T] is D, clamped; seq_sum, seq_count [S] are its sum and its number of valid tokens.
    """
    if level == "token":
        log_weight = log_ratio
    elif level == "sequence":
        log_weight = to_tokens(seq_sum.clamp(-LOG_CLAMP, LOG_CLAMP).float(), seq_ids)
    elif level == "geometric":
        log_weight = to_tokens((seq_sum / seq_count.clamp(min=1)).float(), seq_ids)
    else:
        raise ValueError(f"unknown weight level {level!r}")
    return log_weight.exp()


def bound_weights(mode: str, weights: Tensor, lower: float | None, upper: float) -> Tensor:
    """truncate: min(w, upper). clip: into [lower, upper]. mask: w inside [lower, upper], else 0 (IcePop)."""
    if mode == "truncate":
        return weights.clamp(max=upper)
    if mode == "clip":
        return weights.clamp(lower, upper)
    if mode == "mask":
        return torch.where(out_of_bounds(weights, lower, upper), 0.0, weights)
    raise ValueError(f"unknown weight mode {mode!r}")


def out_of_bounds(weights: Tensor, lower: float | None, upper: float) -> Tensor:
    """Whether each weight lies outside the closed interval [lower, upper]; bool [T]."""
    above = weights > upper
    return above if lower is None else above | (weights < lower)

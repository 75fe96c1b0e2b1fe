"""Importance weights: a level (token, sequence, geometric, turn) and a mode (truncate, clip, mask).

T tokens, S sequences, U turns; D = log pi_train - log pi_rollout per token, clamped to +-20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig

LOG_CLAMP = 20.0
"""exp(+-20) = 4.9e8 and 2.1e-9: beyond it float32 sums lose every other token (verl's bound too)."""


def segment_weights(log_weight: Tensor, ids: Tensor, out: Tensor) -> None:
    """e^(log_weight of the token's segment, clamped) for each token: [S], [T] -> out [T]."""
    torch.index_select(log_weight.clamp(-LOG_CLAMP, LOG_CLAMP).exp_(), 0, ids, out=out)


def bound_weights(config: RolloutCorrectionConfig, raw: Tensor, valid: Tensor, out_of_bounds: Tensor) -> Tensor:
    """The weights that the loss uses, float32 [T], 0 where valid [T] is 0; out_of_bounds [T] gets 1 where w was.

    truncate: min(w, upper). clip: w into [lower, upper]. mask: w inside the closed interval, else 0 (IcePop). Compared
    in float32: log-probs are no finer, and a weight on the bound must be found on it.
    """
    weights = raw.float()
    bounded = weights.clamp(config.rollout_is_lower, config.rollout_is_upper)
    torch.ne(weights, bounded, out=out_of_bounds)
    if config.rollout_is_mode == "mask":
        bounded = torch.addcmul(raw, raw, out_of_bounds, value=-1)
    return torch.mul(bounded, valid, out=weights)

"""Importance weights: a level (token, sequence, geometric, turn) and a mode (truncate, clip, mask).

T tokens, S sequences, U turns; D = log pi_train - log pi_rollout per token, unclamped but in exponents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.rejection import as_float32_meets

LOG_CLAMP = 20.0
"""exp(+-20) = 4.9e8 and 2.1e-9: beyond it float32 sums lose every other token (verl's bound too)."""

OUTLIER = 2.610868638
"""Where k3 = e^D - 1 - D reaches 10: in clamped metrics no ratio counts for more than e^2.61 = 13.6."""


def bound_weights(config: RolloutCorrectionConfig, weight: Tensor, valid: Tensor, out_of_bounds: Tensor) -> None:
    """Bound the weights that the loss uses, 0 where valid is 0, in place; out_of_bounds gets 1 where w was.

    truncate: min(w, upper). clip: w into [lower, upper]. mask: w inside the closed interval, else 0 (IcePop).
    All are float64, [T], or [U] of weights that the tokens of a unit share.
    """
    lower, upper = config.rollout_is_lower, config.rollout_is_upper
    if lower is None:
        torch.gt(weight, as_float32_meets(upper, 1), out=out_of_bounds)
    else:
        inside = weight.clamp(as_float32_meets(lower, -1), as_float32_meets(upper, 1))
        torch.ne(weight, inside, out=out_of_bounds)
    if config.rollout_is_mode == "mask":
        weight.addcmul_(weight, out_of_bounds, value=-1)
    else:
        weight.clamp_(lower, upper)
    if config.rollout_is_mode == "clip":
        weight.mul_(valid)


def unit_weights(config: RolloutCorrectionConfig, less_one: Tensor, present: Tensor) -> Tensor:
    """[3, U] float64: the bounded weight of each unit, 0 where it has no valid token; 1 where a bound acted; present.

    less_one [U]: w - 1; present [U]: 1 for a unit with valid tokens, else 0.
    """
    out = torch.empty(3, len(present), dtype=torch.float64, device=present.device)
    weight, out_of_bounds, _ = out
    torch.addcmul(present, less_one, present, out=weight)
    bound_weights(config, weight, present, out_of_bounds)
    out[2].copy_(present)
    return out

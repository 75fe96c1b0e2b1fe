"""DPPO with the binary total-variation trust region: a token that has moved too far, in probability, is left out.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio, record
from megatron_rl_corr.core.metrics import Metric

RATIO_CAP = 20.0
"""A rare token's ratio may be huge inside the region, since its probability has hardly moved; verl's cap too."""


def dppo_tv(
    inputs: PolicyLossInputs, config: RolloutCorrectionConfig, *, metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w sg(min(r, 20)) A log pi_theta per token inside the region, else 0; r = pi_theta / pi_old; the region is
    pi_theta - pi_old <= high where A > 0, >= -low elsewhere.

    [T]. So the region bounds the move in the direction of the update only. Source: DPPO, arXiv:2602.04879 (binary TV).
    """
    mask, (low, high) = inputs.mask, config.clip
    now = inside(mask, inputs.logprobs)
    constant = now.detach()
    old = inside(mask, inputs.old_logprobs)
    moved = moved_log_ratio(constant, old, mask)
    gain = constant.exp() - old.exp()
    advantages = inside(mask, inputs.advantages)
    outside = torch.where(advantages > 0, gain > high, gain < -low)
    factor = as_exponent(moved).exp().clamp(max=RATIO_CAP) * inside(mask, inputs.correction.weights) * advantages
    loss = -inside(~outside, factor) * now
    record(metrics, mask, loss, moved, clip_fraction=outside)
    return loss

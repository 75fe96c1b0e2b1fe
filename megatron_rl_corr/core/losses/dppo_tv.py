"""DPPO with the binary total-variation trust region: a token that has moved too far, in
probability, is left out.

T tokens. `inside_region` is the loss of any such region; dppo_kl has another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, record
from megatron_rl_corr.reduce.metrics import Metric

RATIO_CAP = 20.0
"""A rare token's ratio may be huge inside the region, since its probability has hardly moved. verl's cap is
its `clip_ratio_c`: 3 in its settings, 10000 in its script of this loss, 20 where none is given."""


def dppo_tv(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w sg(min(r, 20)) A log pi_theta per token inside the region, else 0; r = pi_theta / pi_old; the region
    is pi_theta - pi_old <= high where A > 0, >= -low elsewhere.

    [T]. So the region bounds the move in the direction of the update only. Source: DPPO,
    arXiv:2602.04879 (binary TV).
    """
    low, high = config.clip

    def outside(now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        gain = now.exp() - old.exp()
        return torch.where(advantages > 0, gain > high, gain < -low)

    return inside_region(outside, inputs, metrics=metrics)


def inside_region(
    outside: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: PolicyLossInputs,
    *,
    metrics: dict[str, Metric] | None,
) -> Tensor:
    """-w sg(min(r, 20)) A log pi_theta per token, 0 for those outside a trust region, or the mask: [T].

    Args:
        outside: which tokens have left the region, bool [T], of log pi_theta, log pi_old and
            advantages, [T] each.
        inputs: log-probs, advantages, weights and mask.
        metrics: the loss adds its own to it; None: none.
    """
    mask = inputs.mask
    now, old, advantages = (
        inside(mask, x) for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
    )
    constant = now.detach()
    moved, gone = constant - old, outside(constant, old, advantages)
    factor = (
        as_exponent(moved).exp().clamp(max=RATIO_CAP) * inside(mask, inputs.correction.weights) * advantages
    )
    loss = -inside(~gone, factor) * now
    record(metrics, mask, loss, moved, clip_fraction=gone)
    return loss

"""PPO's clipped surrogate with dual clip, weighted by the rollout correction; also GRPO's,
Dr.GRPO's and DAPO's.

T tokens. They differ from PPO in the clip's bounds, the advantage and the aggregation (config/losses.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio, record
from megatron_rl_corr.reduce.metrics import Metric


def ppo_clip(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w s per token, s = min(r A, clip(r, 1 - low, 1 + high) A), at least c A where A < 0; r =
    pi_theta / pi_old.

    [T], 0 outside correction.mask; w, the weight of pi_old against pi_rollout, is constant in the step.
    With clip_sat_tail low and high of a token are multiplied by its kappa in [0, 1] (core/clip_scale.py). Of
    the two the advantage's sign selects one: the other never acts. So the interval lies within PPO's, and
    the surrogate is at most PPO's.

    Sources: PPO, arXiv:1707.06347, eq. 7; the dual clip c, arXiv:1912.09729, eq. 5; unequal bounds, DAPO,
    arXiv:2503.14476; SAT, arXiv:2607.18722.
    """
    moved = moved_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.mask)
    scale = inputs.correction.clip_scale
    return clipped_surrogate(as_exponent(moved).exp(), moved, inputs, config, scale=scale, metrics=metrics)


def clipped_surrogate(
    ratio: Tensor,
    moved: Tensor,
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    scale: Tensor | None = None,
    metrics: dict[str, Metric] | None,
) -> Tensor:
    """The loss of `ppo_clip` for any ratio, a token's or its sequence's: [T], 0 outside the mask.

    Args:
        ratio: [T] float32, with the gradient.
        moved: [T] log pi_theta - log pi_old, for the metrics.
        inputs: advantages, weights and mask.
        config: the clip's bounds.
        scale: [T] float32 in [0, 1], the bounds' factor; None: 1.
        metrics: the loss adds its own to it; None: none.
    """
    mask, (low, high) = inputs.mask, config.clip
    advantages = inside(mask, inputs.advantages)
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    fractions = {}
    if scale is not None:
        of_ppo = clipped < free
        clipped = ratio.clamp(1.0 - low * scale, 1.0 + high * scale) * advantages
        fractions["sat_tail_fraction"] = mask & (scale < 1)
        fractions["sat_clip_fraction"] = (clipped < free) & ~of_ppo
    surrogate = torch.minimum(free, clipped)
    fractions["clip_fraction"] = clipped < free
    if config.kind.dual_clip and config.clip_ratio_c is not None:
        # Where A >= 0 the surrogate is not negative: a floor of 0 leaves it alone.
        floor = advantages.clamp(max=0.0) * config.clip_ratio_c
        fractions["dual_clip_fraction"] = surrogate < floor
        surrogate = torch.maximum(surrogate, floor)
    loss = -inside(mask, inputs.correction.weights) * surrogate
    record(metrics, mask, loss, moved, **fractions)
    return loss

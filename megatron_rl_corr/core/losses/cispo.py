"""CISPO: the log-prob, weighted by a clipped ratio that carries no gradient: no token is cut off.

T tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio, record
from megatron_rl_corr.reduce.metrics import Metric


def cispo(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w sg(clip(r, 1 - low, 1 + high)) A log pi_theta per token, r = pi_theta / pi_old; [T], 0
    outside the mask.

    Source: MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    mask, (low, high) = inputs.mask, config.clip
    moved = moved_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs, mask)
    ratio = as_exponent(moved).exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    factor = inside(mask, clipped * inputs.correction.weights * inputs.advantages.float())
    loss = -factor * inside(mask, inputs.logprobs)
    record(metrics, mask, loss, moved, clip_fraction=clipped != ratio)
    return loss

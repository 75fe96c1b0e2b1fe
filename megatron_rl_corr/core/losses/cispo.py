"""CISPO: the log-prob, weighted by a clipped ratio that carries no gradient: no token is cut off.

T tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.ratio import as_exponent, inside, moved_log_ratio, record
from megatron_rl_corr.core.metrics import Metric


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, correction: Correction,
    config: RolloutCorrectionConfig, *, metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w sg(clip(r, 1 - low, 1 + high)) A log pi_theta per token, r = pi_theta / pi_old; [T], 0 outside the mask.

    Source: MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5.
    """
    mask, (low, high) = correction.mask, config.clip
    moved = moved_log_ratio(logprobs.detach(), old_logprobs, mask)
    ratio = as_exponent(moved).exp()
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    factor = inside(mask, clipped * correction.weights * advantages.float())
    loss = -factor * inside(mask, logprobs)
    record(metrics, mask, loss, moved, clip_fraction=clipped != ratio)
    return loss

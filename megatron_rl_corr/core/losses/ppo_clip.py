"""PPO's clipped surrogate, weighted by the rollout correction.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.metrics import Mean, Metric
from megatron_rl_corr.core.weights import LOG_CLAMP


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, correction: Correction,
    config: RolloutCorrectionConfig, *, metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w min(r A, clip(r, 1 - low, 1 + high) A) per token, r = pi_theta / pi_old; 0 outside correction.mask.

    w, the weight of pi_old against pi_rollout, is constant in the step. Source: PPO, arXiv:1707.06347, eq. 7.
    """
    mask = correction.mask
    log_ratio = torch.where(mask, logprobs.float() - old_logprobs.float(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)
    ratio = log_ratio.exp()
    advantages = torch.where(mask, advantages.float(), 0.0)
    low, high = config.clip
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    loss = -torch.where(mask, correction.weights, 0.0) * torch.minimum(free, clipped)
    if metrics is not None:
        moved = log_ratio.detach()
        columns = torch.stack([
            loss.detach(), (clipped < free).float(), moved.expm1() - moved, mask.float(),
        ])
        total, was_clipped, k3, count = columns.sum(dim=1, dtype=torch.float64).unbind()
        metrics["policy"] = Mean(torch.stack([total, count]))
        metrics["clip_fraction"] = Mean(torch.stack([was_clipped, count]))
        metrics["old_new_k3_kl"] = Mean(torch.stack([k3, count]))
    return loss

"""Terms that may be added to a policy loss: KL penalties, and an entropy bonus.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.kl import reference_kl, sampler_kl
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio
from megatron_rl_corr.reduce.metrics import Mean, Metric, Sum


def kl_penalties(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    ref_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    metrics: dict[str, Metric] | None,
) -> Tensor | None:
    """The sum of the KL penalties of each token, times their coefficients, [T]; None without one.

    A token whose reference log-prob is not finite has no penalty against the reference.

    Args:
        inputs: of the policy loss.
        config: coefficients and kinds.
        ref_logprobs, rollout_logprobs: [T], without gradient.
        metrics: reference_kl, sampler_kl and reference_missing are added to it; None: none.

    Raises:
        ValueError: log-probs that a penalty needs are missing.
    """
    total, mask = None, inputs.mask
    if config.kl_loss_coef:
        if ref_logprobs is None:
            raise ValueError("`kl_loss_coef` needs a reference policy; pass ref_logprobs")
        known = mask & ref_logprobs.isfinite()
        kl = reference_kl(
            inputs.logprobs, ref_logprobs, known, config.kl_loss_type, ratio=_sampling_ratio(inputs, config)
        )
        total = config.kl_loss_coef * kl
        if metrics is not None:
            metrics["reference_kl"] = _mean_over(kl, known)
            metrics["reference_missing"] = Sum((mask & ~known).sum(dtype=torch.float64)[None])
    if config.sampler_kl_coef:
        if rollout_logprobs is None:
            raise ValueError(
                "`sampler_kl_coef` needs the log-probs of the policy that sampled; pass rollout_logprobs"
            )
        kl = sampler_kl(inputs.logprobs, rollout_logprobs, mask, config.sampler_kl_type)
        total = config.sampler_kl_coef * kl + (0.0 if total is None else total)
        if metrics is not None:
            metrics["sampler_kl"] = _mean_over(kl, mask)
    return total


def _sampling_ratio(inputs: PolicyLossInputs, config: RolloutCorrectionConfig) -> Tensor:
    """pi_theta / the policy that sampled, [T], constant: r times the weight, which stands for
    pi_old / pi_rollout.

    In bypass mode pi_old is pi_rollout, and r alone is that ratio.
    """
    moved = as_exponent(moved_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs, inputs.mask)).exp()
    return moved if config.bypass_mode else moved * inputs.correction.weights


def _mean_over(values: Tensor, mask: Tensor) -> Mean:
    return Mean(torch.stack([values.detach(), mask.float()]).sum(dim=1, dtype=torch.float64))


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """Entropy of each kept token's distribution, [T]; 0 outside the mask."""
    return inside(mask, entropy)


def mean_entropy(entropy: Tensor, mask: Tensor) -> Mean:
    """The mean of `entropy` [T] over the tokens of the mask."""
    seen = torch.stack([entropy_bonus(entropy.detach(), mask), mask.float()])
    return Mean(seen.sum(dim=1, dtype=torch.float64))

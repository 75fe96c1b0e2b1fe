"""Policy losses by name: per token, unreduced, one file each."""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.ppo_clip import ppo_clip
from megatron_rl_corr.core.metrics import Metric

_LOSSES = {"ppo_clip": ppo_clip}


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    correction: Correction,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """The loss of each token [T], 0 where correction.mask is False; sum it, divide by a global denominator.

    logprobs [T] carries the gradient; old_logprobs, advantages [T] do not. With `metrics`, it adds its own.
    """
    if name not in _LOSSES:
        raise ValueError(f"--rollout-loss: unknown loss {name!r}; known: {', '.join(sorted(_LOSSES))}")
    return _LOSSES[name](logprobs, old_logprobs, advantages, correction, config, metrics=metrics)

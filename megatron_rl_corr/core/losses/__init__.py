"""Policy losses by name: per token, unreduced, one formula a file; `token_coefficients` says how they are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.cispo import cispo
from megatron_rl_corr.core.losses.dppo_tv import dppo_tv
from megatron_rl_corr.core.losses.gspo import gspo
from megatron_rl_corr.core.losses.penalties import entropy_bonus, reference_kl
from megatron_rl_corr.core.losses.ppo_clip import ppo_clip
from megatron_rl_corr.core.losses.reinforce import reinforce
from megatron_rl_corr.core.metrics import Mean, Metric

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups

# GRPO, Dr.GRPO and DAPO are PPO's loss, RLOO is REINFORCE's, with other advantages, clips and averages.
_LOSSES = {
    "ppo_clip": ppo_clip, "grpo": ppo_clip, "dr_grpo": ppo_clip, "dapo": ppo_clip,
    "gspo": gspo, "cispo": cispo, "dppo_tv": dppo_tv,
    "reinforce": reinforce, "rloo": reinforce,
}  # fmt: skip


def policy_loss(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    correction: Correction,
    config: RolloutCorrectionConfig,
    *,
    seq_ids: Tensor | None = None,
    num_sequences: int | None = None,
    groups: ParallelGroups | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """The loss of each token [T], with its penalties, 0 where correction.mask is False.

    logprobs [T], and entropy [T] for an entropy bonus, carry the gradient; old_logprobs, advantages, ref_logprobs [T]
    do not. gspo needs seq_ids [T] in [0, num_sequences), and groups where sequences are split over cp. With
    `metrics`, it adds its own. ValueError for an unknown name or a missing input.
    """
    if name not in _LOSSES:
        raise ValueError(f"--rollout-loss: unknown loss {name!r}; known: {', '.join(sorted(_LOSSES))}")
    sequences = {}
    if name == "gspo":
        if seq_ids is None or num_sequences is None:
            raise ValueError("--rollout-loss gspo looks at whole sequences; pass seq_ids and num_sequences")
        sequences = {"seq_ids": seq_ids, "num_sequences": num_sequences, "groups": groups}
    loss = _LOSSES[name](logprobs, old_logprobs, advantages, correction, config, **sequences, metrics=metrics)
    if config.kl_loss_coef:
        if ref_logprobs is None:
            raise ValueError("--rollout-kl-loss-coef needs a reference policy; pass ref_logprobs")
        kl = reference_kl(logprobs, ref_logprobs, correction.mask, config.kl_loss_type)
        loss = loss + config.kl_loss_coef * kl
        if metrics is not None:
            sums = torch.stack([kl.detach(), correction.mask.float()]).sum(dim=1, dtype=torch.float64)
            metrics["reference_kl"] = Mean(sums)
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("--rollout-entropy-coef needs the entropy of each token's distribution; pass entropy")
        loss = loss - config.entropy_coef * entropy_bonus(entropy, correction.mask)
    return loss

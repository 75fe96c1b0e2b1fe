"""Estimates of a KL from the log-probs of sampled tokens: in the loss, with a gradient, and in the reward.

T tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import KL_TYPES
from megatron_rl_corr.core.losses.ratio import K3_CLAMP, as_exponent, bounded_log_ratio, inside
from megatron_rl_corr.core.segments import segment_sums
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective


def kl_estimate(d: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi || pi_ref) from d = log pi - log pi_ref of a sampled token, elementwise, float32.

    k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d, at most 10. In k2 and k3 d is clamped to +-20, beyond which they
    have no gradient: one absurd log-prob (-1e30) would else make its square infinite, and the update with
    it. Under samples of pi the mean of k1 and of k3 is the KL. Source: Schulman, "Approximating KL
    divergence" (2020).

    Args:
        d: any shape.
        kind: k1, k2 or k3.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * bounded_log_ratio(d).square()
    if kind == "k3":
        d = as_exponent(d)
        return ((-d).expm1() + d).clamp(max=K3_CLAMP)
    raise ValueError(f"an estimate of a KL is k1, k2 or k3, got {kind!r}")


def reference_kl(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str, *, ratio: Tensor | None = None
) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) per token, [T] float32, with gradient in logprobs; 0
    outside the mask.

    k1, k2 and k3 are those of `kl_estimate`. k3+ has the value of k3 and the gradient of k2, d grad log
    pi_theta. Where pi_theta has sampled, the mean of that gradient is the gradient of the KL; of k1's own it
    is 0, of k3's it is the
    gradient of KL(pi_ref || pi_theta). unbiased is ratio x k3+, for samples of older weights: grad (ratio x
    k3) = ratio (k3 + 1 - e^-d) grad log pi_theta = ratio x d grad log pi_theta, written so that no e^-d is
    subtracted from itself.

    Sources: verl's k3+; DeepSeek-V3.2, arXiv:2512.02556, eq. 7 (unbiased).

    Args:
        logprobs: [T] log pi_theta, with the gradient.
        ref_logprobs: [T] log pi_ref.
        mask: [T] bool.
        kind: one of config.losses.KL_TYPES.
        ratio: [T] pi_theta / the policy that sampled, constant; for unbiased.

    Raises:
        ValueError: an unknown kind.
    """
    d = inside(mask, logprobs.float() - ref_logprobs.float())
    if kind not in KL_TYPES:
        raise ValueError(f"`kl_loss_type` must be {', '.join(KL_TYPES)}, got {kind!r}")
    if kind not in ("k3+", "unbiased"):
        return kl_estimate(d, kind)
    square, value = kl_estimate(d, "k2"), kl_estimate(d.detach(), "k3")
    through = square - square.detach() + value
    return through if kind == "k3+" else inside(mask, ratio) * through


def sampler_kl(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """How far pi_theta is from the policy that sampled, per token, [T] float32, with gradient; 0
    outside the mask.

    With D = log pi_theta - log pi_rollout, clamped to +-20: squared is D^2, k3 is e^D - 1 - D, at most 10,
    whose mean is KL(pi_rollout || pi_theta). Source: Kimi K2.5, arXiv:2602.02276 (squared).

    Args:
        logprobs: [T] log pi_theta, with the gradient.
        rollout_logprobs: [T] log pi_rollout.
        mask: [T] bool.
        kind: squared or k3.
    """
    d = inside(mask, logprobs.float() - rollout_logprobs.float())
    return bounded_log_ratio(d).square() if kind == "squared" else kl_estimate(-d, "k3")


@torch.no_grad()
@collective
def reward_kl(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    seq_ids: Tensor,
    *,
    num_sequences: int,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
) -> Tensor:
    """What the KL to the reference takes from each reward: kl_reward_coef x the sum over its
    tokens, [S] float64.

    A token whose log-prob is not finite on either side adds nothing; d is clamped to +-20, for k1 too, as one
    absurd log-prob would else be all that its group's advantages show. One all-reduce over context-parallel
    ranks. Advantages are those of r - this. What all samples of a group lose alike is gone with the group's
    mean; with grpo, a group of equal rewards is spread by its KL alone, to a standard deviation of 1 whatever
    the coefficient.

    Args:
        logprobs: [T] log pi_old.
        ref_logprobs: [T] log pi_ref.
        mask: [T] bool, the sampled tokens.
        seq_ids: [T] int64 in [0, S).
        num_sequences: S.
        config: kl_reward_coef and kl_reward_type.
        groups: the ranks of the batch.
    """
    known = mask & logprobs.isfinite() & ref_logprobs.isfinite()
    kl = kl_estimate(
        as_exponent(inside(known, logprobs.float() - ref_logprobs.float())), config.kl_reward_type
    )
    [total] = groups.all_reduce_cp(segment_sums({"kl": lambda: kl}, seq_ids, num_sequences))
    return config.kl_reward_coef * total

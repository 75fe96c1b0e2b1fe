"""Terms that may be added to a policy loss: a KL penalty against a reference policy, and an entropy bonus.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.losses.ratio import K3_CLAMP, as_exponent, inside
from megatron_rl_corr.core.metrics import Mean


def reference_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) per token, [T] float32, with gradient in logprobs; 0 outside the mask.

    With d = log pi_theta - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d, at most 10 (d clamped to +-20 in the
    exponent alone). The gradient's mean is that of the KL for k2 only; k1's own gradient has mean 0.

    Source: Schulman, "Approximating KL divergence" (2020).

    Args:
        logprobs: [T] log pi_theta, with the gradient.
        ref_logprobs: [T] log pi_ref.
        mask: [T] bool.
        kind: k1, k2 or k3.

    Raises:
        ValueError: an unknown kind.
    """
    d = inside(mask, logprobs.float() - ref_logprobs.float())
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return (as_exponent(-d).expm1() + d).clamp(max=K3_CLAMP)
    raise ValueError(f"`kl_loss_type` must be k1, k2 or k3, got {kind!r}")


def entropy_bonus(entropy: Tensor, mask: Tensor) -> Tensor:
    """Entropy of each kept token's distribution, [T]; 0 outside the mask."""
    return inside(mask, entropy)


def mean_entropy(entropy: Tensor, mask: Tensor) -> Mean:
    """The mean of `entropy` [T] over the tokens of the mask."""
    seen = torch.stack([entropy_bonus(entropy.detach(), mask), mask.float()])
    return Mean(seen.sum(dim=1, dtype=torch.float64))

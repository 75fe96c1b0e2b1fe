"""Score centering: a term of the policy loss that removes the drift which the mismatch gives its gradient.

T tokens, V ids of the vocabulary, H the K of them that the sampler found likeliest at a token. At one prefix
p is the distribution that trains, q the one that sampled, w(v) the importance weight of id v, 1 without one.

The gradient of a token, w(y) A grad log p(y) with y drawn from q, has the expectation
A * sum_V m_v grad log p_v, m = w q, where A is the same for all y. Sampled from p it would be 0, since
sum_V p_v grad log p_v = 0; sampled from q it is a drift that no baseline removes, as it does not depend on y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs
from megatron_rl_corr.core.ratios import LOG_CLAMP
from megatron_rl_corr.core.weights import bounded
from megatron_rl_corr.reduce.metrics import Mean, Metric

LEAST_TAIL = 1e-6
"""Mass of p outside of H, at least, in the ratio of the two tails."""


@dataclass(frozen=True)
class TopPolicies:
    """Log-probs of the K ids of H at each token."""

    logprobs: Tensor
    """[T, K] log p, with the gradient."""
    rollout_logprobs: Tensor
    """[T, K] log q."""


def score_centering(
    top: TopPolicies,
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """A C per token, to be added to the loss: C = sum_H sg(m_v - alpha p_v) log p_v; [T], 0 outside the mask.

    Its gradient is the drift, which the policy loss, -w A log p(y), has with the other sign. On H the drift
    is exact. Outside q is taken for rho p with one rho, (1 - sum_H q) / max(1 - sum_H p, 1e-6), so that the
    tails have their masses: there m = alpha p, and sum_tail p grad log p = -sum_H p grad log p. So the error
    is what q / p varies by in the tail, times its mass; with H the whole vocabulary there is none.

    m = q and alpha = rho without weights. The weight of an id is bounded as that of a sampled token is:
    truncated or clipped into [lo, hi], m = clamp(p, lo q, hi q) and alpha = clamp(1, lo rho, hi rho);
    masked (IcePop), m = p where p / q is in [lo, hi], else 0, and alpha = 1 where 1 / rho is, else 0.

    Source: score centering, arXiv:2609.20807.

    Args:
        top: of the T tokens.
        inputs: advantages and mask; its weights are not read, but are those of `config`.
        config: no weights, or those of tokens.
        metrics: the masses of both tails and the size of the drift are added to it; None: none.
    """
    log_p, log_q = top.logprobs.detach().double(), top.rollout_logprobs.double()
    p, q = log_p.exp(), log_q.exp()
    train_tail, rollout_tail = ((1 - mass.sum(dim=1)).clamp(min=0) for mass in (p, q))
    rho = rollout_tail / train_tail.clamp(min=LEAST_TAIL)
    m, alpha = q, rho
    if config.rollout_is is not None:
        ratios = (log_p - log_q).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        m = q * _bounded(config, ratios)
        alpha = rho * _bounded(config, rho.reciprocal())
    coefficients = m - alpha[:, None] * p
    # A log-prob of -inf is a constant. Selected, as 0 times it is NaN.
    used = inputs.mask[:, None] & log_p.isfinite()
    factors = torch.where(used, coefficients * inputs.advantages.double()[:, None], 0.0).float()
    term = (factors * torch.where(used, top.logprobs.float(), 0.0)).sum(dim=1)
    if metrics is not None:
        drift = torch.where(used, coefficients, 0.0).abs().sum(dim=1)
        columns = {"train_tail": train_tail, "rollout_tail": rollout_tail, "drift": drift}
        count = inputs.mask.sum(dtype=torch.float64)
        for name, values in columns.items():
            total = torch.where(inputs.mask, values, 0.0).sum()
            metrics[f"centering_{name}"] = Mean(torch.stack([total, count]))
    return term


def _bounded(config: RolloutCorrectionConfig, ratios: Tensor) -> Tensor:
    """Weights of these ratios p / q, of any shape."""
    return bounded(config, ratios, torch.ones_like(ratios, dtype=torch.bool))[0]

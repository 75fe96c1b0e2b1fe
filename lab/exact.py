"""True gradients, and what an estimator's bias and variance are: sums over all responses, in float64.

S responses of T tokens, P parameters (of one policy), N responses in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.policies import World, expected_reward

Objective = Callable[[World, Tensor, Tensor], Tensor]
"""(world, theta [B, ...], rewards [S]) -> J [B]."""


def true_gradient(
    world: World, theta: Tensor, rewards: Tensor, objective: Objective = expected_reward
) -> Tensor:
    """grad J: [B, P] of theta [B, C, V], or of what the objective takes; J the expected reward."""
    leaf = theta.detach().clone().requires_grad_()
    objective(world, leaf, rewards).sum().backward()
    return leaf.grad.flatten(start_dim=1)


def ascent(
    world: World,
    theta: Tensor,
    rewards: Tensor,
    *,
    steps: int,
    rate: float,
    objective: Objective = expected_reward,
) -> list[Tensor]:
    """The tables [B, C, V], or other weights, of exact gradient ascent on J, from theta on: steps + 1."""
    found = [theta]
    for _ in range(steps):
        theta = theta + rate * true_gradient(world, theta, rewards, objective).view_as(theta)
        found.append(theta)
    return found


@dataclass(frozen=True)
class Moments:
    """An estimator against the truth g, as shares of |g|^2; its mean over a batch of N is unbiased or not by
    `bias2`, and scatters by `variance` / N.

    Example: bias2 = 0.01 is a bias of a tenth of the gradient's length.
    """

    bias2: float
    """|E g_hat - g|^2 / |g|^2."""
    variance: float
    """(E |g_hat|^2 - |E g_hat|^2) / |g|^2 of one response."""
    along: float
    """E g_hat . g / |g|^2: how much of the step goes where it should."""

    @property
    def mean2(self) -> float:
        """|E g_hat|^2 / |g|^2: from |m - g|^2 = |m|^2 - 2 m g + |g|^2."""
        return self.bias2 + 2 * self.along - 1

    def error(self, batch: int) -> float:
        """E |mean of N - g|^2 / |g|^2 = bias2 + variance / N; that of a step that does nothing is 1."""
        return self.bias2 + self.variance / batch

    def direction_error(self, batch: int) -> float:
        """The least of it over all factors of the step: 1 - along^2 / (mean2 + variance / N).

        What an optimiser that sets the step's size by itself can make of the estimator; 1 where it has
        nothing of g.
        """
        power = self.mean2 + self.variance / batch
        return 1.0 - self.along**2 / power if power > 0 and self.along > 0 else 1.0


def moments(pulls: Tensor, scores: Tensor, probabilities: Tensor, truth: Tensor) -> Moments:
    """Of the estimate g_hat(y) = sum_t c_t psi_t with y drawn from these probabilities.

    Args:
        pulls: c, [S, T].
        scores: psi, [S, T, P].
        probabilities: mu(y), [S]; they sum to 1.
        truth: g, [P].
    """
    estimates = torch.einsum("st,stp->sp", pulls, scores)
    mean, power = probabilities @ estimates, probabilities @ estimates.square().sum(dim=1)
    norm2 = truth.square().sum()
    return Moments(
        ((mean - truth).square().sum() / norm2).item(),
        ((power - mean.square().sum()) / norm2).item(),
        ((mean * truth).sum() / norm2).item(),
    )


@dataclass(frozen=True)
class Distance:
    """How far sampler and trainer are apart, from whole distributions."""

    tv: float
    """max over prefixes of TV(p, mu) of the next token: Delta of the laws."""
    chi2: float
    """max over prefixes of chi2(p || mu); inf where mu lacks a token of p."""
    kl: float
    """KL(mu || p) of a token, the mean over sampled places."""
    ess: float
    """E_mu[w]^2 / E_mu[w^2], w the product over the response: the share of a large batch that carries it."""


def distance(world: World, p: Tensor, mu: Tensor) -> Distance:
    """Of log-probs of next tokens [W, V] both."""
    rho2 = (2 * p - mu).exp().masked_fill(mu == -torch.inf, torch.inf).sum(dim=-1)
    log_p, log_mu = (world.token_logprobs(one[None])[0] for one in (p, mu))
    drawn = log_mu.sum(dim=1).exp()
    gap = torch.where(drawn[:, None] > 0, log_mu - log_p, 0.0).mean(dim=1)
    log_p, log_mu = log_p.sum(dim=1), log_mu.sum(dim=1)
    first = torch.where(drawn > 0, log_p.exp(), 0.0).sum()
    second = torch.where(drawn > 0, (2 * log_p - log_mu).exp(), 0.0).sum()
    return Distance(
        (p.exp() - mu.exp()).abs().sum(dim=-1).max().item() / 2,
        rho2.max().item() - 1,
        (drawn @ gap).item(),
        (first.square() / second).item(),
    )

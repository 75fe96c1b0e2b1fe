"""Estimators whose samples depend on each other, by Monte Carlo: bias and variance of whole batches.

Batch normalisation, M2PO, the batch filter and the optimal token baseline make of a response something that
depends on the others, so that no sum over single responses is their expectation. M batches of N responses
of T tokens, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.estimators import Arm, Samples, corrected, pull_of_tokens
from lab.map import Case
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.token_baseline import gradient_energies, reward_sums, token_advantages

BLOCKS = 20
"""Of the jackknife that gives standard errors."""
FIXED = "fixed"
"""The baseline E_p[r], which no batch has."""


@dataclass(frozen=True)
class Sampled:
    """Moments of a batch's estimate with their standard errors, as shares of |g|^2."""

    bias2: float
    bias2_se: float
    variance: float
    """Of the whole batch's estimate, already divided by N."""
    variance_se: float
    """Both by a jackknife over BLOCKS blocks."""

    @property
    def error(self) -> float:
        """bias2 + variance, as `Moments.error`."""
        return self.bias2 + self.variance


def sampled_moments(
    case: Case, arm: Arm, *, batch: int, batches: int, seed: int, baseline: str = FIXED
) -> Sampled:
    """Monte Carlo of an arm on M batches drawn from the sampler.

    Args:
        case: one policy, listed.
        batch: N.
        batches: M, a multiple of BLOCKS.
        seed: of the draws.
        baseline: fixed, or an advantage of the package of whole responses, with the batch for its group.

    Raises:
        ValueError: batches is no multiple of BLOCKS.
    """
    if batches % BLOCKS:
        raise ValueError(f"batches must be a multiple of {BLOCKS}, got {batches}")
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(batches):
        drawn = torch.multinomial(case.probabilities, batch, replacement=True, generator=generator)
        pulls = _pulls(case, _part(case.samples, drawn), arm, drawn, baseline)
        steps.append(torch.einsum("st,stp->p", pulls, case.scores[drawn]) / batch)
    return _jackknifed(torch.stack(steps), case.truth)


def _part(samples: Samples, drawn: Tensor) -> Samples:
    return Samples(
        samples.train_logprobs[drawn],
        samples.rollout_logprobs[drawn],
        samples.advantages[drawn],
        samples.later_turn,
        samples.routing[drawn],
    )


def _pulls(case: Case, samples: Samples, arm: Arm, drawn: Tensor, baseline: str) -> Tensor:
    """[N, T]; advantages are over the kept responses where the batch has a baseline of its own."""
    if arm.config.advantage_by_token:
        correction = corrected(samples, arm.config)
        samples = _with(samples, _token_advantages(case, samples, correction, drawn))
        return pull_of_tokens(samples, arm.config, correction)
    if baseline == FIXED:
        return pull_of_tokens(samples, arm.config)

    def compared(kept: Tensor | None) -> Samples:
        ids = torch.zeros(len(drawn), dtype=torch.int64)
        rewards = samples.advantages  # any constant less: group baselines do not see it
        found = group_advantages(rewards, ids, num_groups=1, kind=baseline, in_baseline=kept)
        return _with(samples, found.double())

    correction = corrected(compared(None), arm.config)
    return pull_of_tokens(compared(correction.kept_sequences), arm.config, correction)


def _with(samples: Samples, advantages: Tensor) -> Samples:
    return Samples(
        samples.train_logprobs,
        samples.rollout_logprobs,
        advantages,
        samples.later_turn,
        samples.routing,
    )


def _token_advantages(case: Case, samples: Samples, correction, drawn: Tensor) -> Tensor:
    """The optimal token baseline, with the batch for its group: [N, T]."""
    count, length = samples.train_logprobs.shape
    counted, weights = correction.mask, correction.weights.double()
    energies = gradient_energies(samples.train_logprobs.reshape(-1), case.collisions[drawn].reshape(-1))
    own = torch.where(counted, weights.square() * energies.double(), 0.0)
    running = own.view(count, length).cumsum(dim=1).reshape(-1)
    cells = torch.arange(length).repeat(count)
    rewards = samples.advantages[:, None].expand(count, length).reshape(-1)
    sums = reward_sums(rewards, running, counted, cells, length)
    found = token_advantages(rewards, sums, counted, cells, length=length)
    return found.double().view(count, length)


def _jackknifed(steps: Tensor, truth: Tensor) -> Sampled:
    """Of M estimates [M, P]: |mean - g|^2, less the part that its own scatter adds, and the scatter."""

    def both(part: Tensor) -> Tensor:
        mean, scatter = part.mean(dim=0), part.var(dim=0).sum()
        return (
            torch.stack([(mean - truth).square().sum() - scatter / len(part), scatter]) / truth.square().sum()
        )

    parts = steps.view(BLOCKS, -1, steps.shape[1])
    without = torch.stack(
        [both(torch.cat([parts[:one], parts[one + 1 :]]).flatten(end_dim=1)) for one in range(BLOCKS)]
    )
    errors = ((without - without.mean(dim=0)).square().sum(dim=0) * (BLOCKS - 1) / BLOCKS).sqrt()
    bias2, variance = both(steps).tolist()
    return Sampled(bias2, errors[0].item(), variance, errors[1].item())

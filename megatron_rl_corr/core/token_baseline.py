"""The optimal token baseline (OTB): at every position of a group's responses, their rewards weighed by
gradient so far; and what the same energies tell of the gradient's variance.

T tokens, S sequences, G groups (prompts), L positions of a response. Source: OTB, arXiv:2602.07078, and
verl's estimators optimal_token_baseline and tir_optimal_token_baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.reduce.metrics import Metric

SMALLEST_ENERGY = 1e-8
"""Added to the energy of each response, so that responses whose tokens were all certain count alike."""


def gradient_energies(logprobs: Tensor, collisions: Tensor) -> Tensor:
    """Squared norm of the gradient of a token's log-prob in its logits, 1 - 2 p + sum_v p_v^2: [T] float32.

    Made as (1 - p)^2 + (sum_v p_v^2 - p^2), which keeps the digits of a p near 1 and is never negative. The
    factor 1 / temperature^2 is left out: a baseline does not depend on it.

    Args:
        logprobs: [T] float32, log p of the sampled token.
        collisions: [T] float32, sum_v p_v^2 of its distribution.
    """
    p_less_one = logprobs.double().expm1()
    others = collisions.double() - (p_less_one + 1).square()
    return (p_less_one.square() + others.clamp(min=0)).float()


def reward_sums(rewards: Tensor, energies: Tensor, counted: Tensor, cells: Tensor, num_cells: int) -> Tensor:
    """Sums over the responses that count at each position of their group: W r, W and 1, float64
    [3, G L].

    Sums add up over ranks that have other tokens. W has SMALLEST_ENERGY added.

    Args:
        rewards: [T] float, of each token's response; where it does not count it may be NaN.
        energies: [T] float64, W: sum of the response's energies up to this token, this one too.
        counted: [T] bool: the token counts.
        cells: [T] int64, group x L + position; anything in [0, G L) where the token does not count.
        num_cells: G L.
    """
    weights = torch.where(counted, energies.clamp(min=0) + SMALLEST_ENERGY, 0.0)
    rows = torch.stack([weights * torch.where(counted, rewards.double(), 0.0), weights, counted.double()])
    return rows.new_zeros(3, num_cells).index_add_(1, cells, rows)


def token_advantages(rewards: Tensor, sums: Tensor, counted: Tensor, cells: Tensor, *, length: int) -> Tensor:
    """r - B of each token, [T] float32; B = sum W r / sum W over the responses of its group that
    have its position.

    Where fewer than two have it, B is 0, as in verl: there is nothing to compare with, and a baseline of the
    response's own reward would leave its end without a gradient. A group in which no two responses have any
    position in common, as where all but one were rejected, has no baseline at all, and advantages of 0. B is
    rounded to float32, so equal rewards give exactly 0.

    Args:
        rewards, counted, cells: as in `reward_sums`.
        sums: its result, over all ranks.
        length: L.
    """
    weighed, weights, responses = sums[:, cells].unbind()
    baseline = torch.where(responses >= 2, weighed / weights.clamp(min=SMALLEST_ENERGY), 0.0).float()
    compares = sums[2].view(-1, length).amax(1) >= 2
    return torch.where(counted & compares[cells // length], rewards.float() - baseline, 0.0)


class TotalPower(Metric):
    """Mean over sequences of sum_t (w A)^2 energy; values = [sum, sequences]."""

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        """The mean, and of how many sequences it is."""
        total, sequences = values
        return {name: total / max(sequences, 1), SEQUENCES: sequences}


SIGNAL = "variance_proxy/proxy1_signal_strength"
POWER = "variance_proxy/proxy2_total_power"
NOISE = "variance_proxy/proxy3_pure_noise"
SEQUENCES = "variance_proxy/sequences"


@torch.no_grad()
def total_power(
    energies: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, sequences: Tensor, *, owner: bool
) -> dict[str, Metric]:
    """E ||g||^2 of a response's policy gradient g in its logits: mean over sequences of sum_t (w_t
    A_t)^2 energy_t.

    Args:
        energies: [T] of `gradient_energies`.
        advantages, weights: [T].
        mask: [T] bool: in the loss.
        sequences: [S] bool: no rule of whole sequences rejected it, and it may be trained.
        owner: this rank counts whole sequences; of those that share them one does.
    """
    power = torch.where(mask, (weights * advantages).double().square() * energies, 0.0).sum()
    counted = sequences.sum(dtype=torch.float64)
    return {POWER: TotalPower(torch.stack([power, counted if owner else torch.zeros_like(counted)]))}


def variance_proxies(numbers: dict[str, float], grad_norm: float | None) -> dict[str, float]:
    """What an update's gradient norm adds to its total power P of n sequences: S = norm^2, and
    (P - S) / (n - 1).

    Args:
        numbers: the update's metrics.
        grad_norm: before clipping; None: there was no update.

    Returns:
        {} without a total power or an update; the last is 0 where S is above P.
    """
    if POWER not in numbers or grad_norm is None:
        return {}
    signal, others = grad_norm**2, numbers[SEQUENCES] - 1
    return {SIGNAL: signal} | ({NOISE: max((numbers[POWER] - signal) / others, 0.0)} if others > 0 else {})


_ONLY = "--rollout-advantage otb"

METRICS = in_group(
    "Loss and gradient",
    MetricSpec(
        SIGNAL,
        "signal of the update: squared norm of its gradient, before clipping",
        "grad_norm^2",
        only_with=_ONLY,
    ),
    MetricSpec(
        POWER,
        "signal and noise: mean squared norm of a response's gradient in its logits",
        "mean over sequences of sum_t (w A)^2 (1 - 2 p + sum_v p_v^2)",
        "gradient power",
        UsualRange(
            "the energy of the gradient is not a number",
            "Look for rewards that are not finite, and for NaN in the log-probs of the scoring pass.",
            low=0,
        ),
        only_with=_ONLY,
    ),
    MetricSpec(
        NOISE,
        "estimated variance of the gradient; if it rises and rewards do not: larger groups",
        "max(proxy2 - proxy1, 0) / (sequences - 1)",
        only_with=_ONLY,
    ),
    MetricSpec(SEQUENCES, "sequences that the total power is the mean of", "count", only_with=_ONLY),
)

"""PPO's clipped loss by hand: both sides of the clip, weights, masks, metrics, gradients."""

import math

import pytest
import torch

from megatron_rl_corr.config import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses import policy_loss

NAN, INF = float("nan"), float("inf")
CONFIG = RolloutCorrectionConfig(clip_ratio_low=0.2, clip_ratio_high=0.3)


def correction_of(weights: list[float], mask: list[bool]) -> Correction:
    weights, mask = torch.tensor(weights), torch.tensor(mask)
    count = mask.sum().double()
    return Correction(weights, mask, mask, torch.ones(1, dtype=torch.bool), count, count)


def loss_and_gradient(ratios, advantages, weights, mask=None, metrics=None):
    """Losses and their gradients in log pi_theta, with pi_old = e^-2."""
    mask = [True] * len(ratios) if mask is None else mask
    logprobs = (torch.tensor(ratios).log() - 2).requires_grad_()
    losses = policy_loss(
        "ppo_clip", logprobs, torch.full((len(ratios),), -2.0), torch.tensor(advantages),
        correction_of(weights, mask), CONFIG, metrics=metrics,
    )
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        # d(-r A)/d log pi = -r A where the surrogate is not clipped, 0 where it is.
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.6, 0.0),  # clipped at 1.3
        (1.5, -2.0, 3.0, 3.0),  # a bad token that grew: never clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (0.5, 2.0, -1.0, -1.0),  # a good token that shrank: never clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_ppo_clip_when_inside_or_outside_the_clip_then_by_hand(ratio, advantage, loss, gradient, weight):
    losses, gradients = loss_and_gradient([ratio], [advantage], [weight])
    assert losses == pytest.approx([weight * loss], rel=1e-6)
    assert gradients == pytest.approx([weight * gradient], rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_ppo_clip_when_a_masked_token_holds_garbage_then_loss_and_gradient_are_zero_there(bad):
    mask = torch.tensor([True, False, True])
    now = torch.tensor([-1.0, bad, -2.0], requires_grad=True)
    metrics = {}
    losses = policy_loss(
        "ppo_clip", now, torch.tensor([-1.0, bad, -2.0]), torch.tensor([1.0, bad, -1.0]),
        correction_of([2.0, bad, 0.5], mask.tolist()), CONFIG, metrics=metrics,
    )
    losses.sum().backward()
    assert losses.tolist() == [-2.0, 0.0, 0.5]
    assert now.grad.tolist() == [-2.0, 0.0, 0.5]
    assert metrics["policy"].value() == -0.75 and metrics["old_new_k3_kl"].value() == 0


def test_ppo_clip_when_a_weight_is_zero_then_no_gradient_but_the_token_still_counts():
    metrics = {}
    losses, gradients = loss_and_gradient(
        [1.0, 1.5, 1.0, 1.5], [1.0, 1.0, 1.0, -1.0], [0.0, 1.0, 1.0, 1.0], metrics=metrics
    )
    assert losses == pytest.approx([0.0, -1.3, -1.0, 1.5]) and gradients == pytest.approx([0, 0, -1, 1.5])
    assert metrics["policy"].value() == pytest.approx(-0.8 / 4)
    # Of the two ratios outside the clip only the second token's surrogate is cut.
    assert metrics["clip_fraction"].value() == 0.25
    # r - 1 - ln r at 1.5, twice
    assert metrics["old_new_k3_kl"].value() == pytest.approx((0.5 - math.log(1.5)) / 2, rel=1e-5)
    assert not any(metric.values.requires_grad for metric in metrics.values())


def test_ppo_clip_when_the_policy_ran_away_then_the_ratio_stops_at_e20():
    metrics = {}
    now = torch.tensor([-1.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0])
    losses = policy_loss(
        "ppo_clip", now, old, torch.tensor([-1.0, 1.0]), correction_of([1.0, 1.0], [True, True]), CONFIG,
        metrics=metrics,
    )
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-5)
    assert now.grad.isfinite().all()
    assert metrics["old_new_k3_kl"].value() == pytest.approx((math.exp(20) - 21 + 19) / 2, rel=1e-6)


def test_policy_loss_when_the_name_is_unknown_then_the_known_ones():
    with pytest.raises(ValueError) as raised:
        policy_loss("gspo", *[torch.zeros(1)] * 3, correction_of([1.0], [True]), PRESETS["disabled"])
    assert str(raised.value) == "--rollout-loss: unknown loss 'gspo'; known: ppo_clip"

"""Every policy loss by hand: where it cuts and where it does not, weights, masks, penalties,
metrics, gradients.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.config.correction import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import AGGREGATIONS, LOSSES
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, Lengths
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.kl import reference_kl, reward_kl, sampler_kl
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.reduce.collectives import ParallelGroups

NAN, INF = float("nan"), float("inf")
CONFIG = RolloutCorrectionConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None)


def config_of(loss: str, **settings) -> RolloutCorrectionConfig:
    settings |= {"dr_grpo": {"loss_scale_length": 4}, "dro": {"dro_beta": 0.5}}.get(loss, {})
    return RolloutCorrectionConfig(loss=loss, **settings)


def correction_of(weights: list[float], mask: list[bool]) -> Correction:
    """All tokens are of one sequence."""
    weights, mask = torch.tensor(weights), torch.tensor(mask, dtype=torch.bool)
    count = mask.sum().double()
    lengths = Lengths("valid", count[None], (count > 0).double())
    one = torch.ones(1)
    return Correction(weights, mask, mask, one.bool(), count, count, lengths, one.double())


def loss_and_gradient(ratios, advantages, weights, mask=None, metrics=None, config=CONFIG, seq_ids=None):
    """Losses and their gradients in log pi_theta, with pi_old = e^-2."""
    mask = [True] * len(ratios) if mask is None else mask
    logprobs = (torch.tensor(ratios).log() - 2).requires_grad_()
    seq_ids = torch.zeros(len(ratios), dtype=torch.int64) if seq_ids is None else torch.tensor(seq_ids)
    losses = policy_loss(
        config.loss,
        logprobs,
        torch.full((len(ratios),), -2.0),
        torch.tensor(advantages),
        correction_of(weights, mask),
        config,
        metrics=metrics,
        seq_ids=seq_ids,
        num_sequences=4,
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
@pytest.mark.parametrize("loss_name", ["ppo_clip", "grpo", "dr_grpo", "dapo"])
def test_ppo_clip_when_inside_or_outside_the_clip_then_by_hand(
    loss_name, ratio, advantage, loss, gradient, weight
):
    config = config_of(loss_name, clip_ratio_low=0.2, clip_ratio_high=0.3)
    losses, gradients = loss_and_gradient([ratio], [advantage], [weight], config=config)
    assert losses == pytest.approx([weight * loss], rel=1e-6)
    assert gradients == pytest.approx([weight * gradient], rel=1e-6)


def test_dapo_when_no_clip_is_given_then_its_own_upper_bound():
    losses, _ = loss_and_gradient([1.5], [1.0], [1.0], config=config_of("dapo"))
    assert losses == pytest.approx([-1.28])


@pytest.mark.parametrize(
    "ratio, advantage, c, loss, gradient",
    [
        (2.9, -2.0, 3.0, 5.8, 5.8),
        (3.5, -2.0, 3.0, 6.0, 0.0),  # at most c |A|
        (3.5, -2.0, 5.0, 7.0, 7.0),
        (3.5, -2.0, None, 7.0, 7.0),
        (3.5, 2.0, 3.0, -2.4, 0.0),  # PPO's own clip; c is for bad tokens
        (0.1, 2.0, 3.0, -0.2, -0.2),
    ],
)
def test_dual_clip_when_a_bad_token_grew_beyond_c_then_its_loss_stops_there(
    ratio, advantage, c, loss, gradient
):
    config = RolloutCorrectionConfig(clip_ratio_c=c)
    metrics = {}
    losses, gradients = loss_and_gradient([ratio], [advantage], [1.0], config=config, metrics=metrics)
    assert losses == pytest.approx([loss], rel=1e-6) and gradients == pytest.approx([gradient], rel=1e-6)
    if c is None:
        assert "dual_clip_fraction" not in metrics
    else:
        assert metrics["dual_clip_fraction"].value() == (ratio > c and advantage < 0)


@pytest.mark.parametrize(
    "ratio, advantage, loss_at_log_pi, clipped",
    [
        # -min(r, 1.3) A log pi, no token's gradient is cut: -clip(r) A.
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.6, True),
        (1.5, -2.0, 2.6, True),
        (0.5, 2.0, -1.6, True),  # at least 0.8
    ],
)
def test_cispo_when_outside_the_clip_then_the_weight_stops_and_the_gradient_flows(
    ratio, advantage, loss_at_log_pi, clipped
):
    config, metrics = config_of("cispo", clip_ratio_low=0.2, clip_ratio_high=0.3), {}
    losses, gradients = loss_and_gradient([ratio], [advantage], [0.5], config=config, metrics=metrics)
    assert gradients == pytest.approx([0.5 * loss_at_log_pi], rel=1e-6)
    assert losses == pytest.approx([0.5 * loss_at_log_pi * (math.log(ratio) - 2)], rel=1e-6)
    assert metrics["clip_fraction"].value() == clipped


@pytest.mark.parametrize("loss_name", ["reinforce", "rloo"])
def test_reinforce_when_weighted_then_minus_w_a_log_pi(loss_name):
    metrics = {}
    losses, gradients = loss_and_gradient(
        [1.0, 7.0], [2.0, -1.0], [0.5, 3.0], config=config_of(loss_name), metrics=metrics
    )
    # log 7 in float32 is off by up to 2^-23, which the difference from 2 keeps and the weight triples.
    assert losses == pytest.approx([-0.5 * 2 * -2, 3 * (math.log(7) - 2)], rel=1e-6, abs=3 * 2**-23)
    assert gradients == pytest.approx([-1.0, 3.0], rel=1e-6)  # the ratio to pi_old does not act
    assert "clip_fraction" not in metrics


@pytest.mark.parametrize(
    "now, old, advantage, gradient",
    [
        (0.5, 0.4, 2.0, -2.5),  # r = 1.25; moved by 0.1
        (0.6, 0.4, 2.0, 0.0),  # by 0.2 > 0.15, in the direction of the update
        (0.6, 0.4, -2.0, 3.0),  # against it: the update brings it back
        (0.2, 0.4, -2.0, 0.0),
        (0.2, 0.4, 2.0, -1.0),
        (0.01, 0.0001, 2.0, -40.0),  # r = 100 inside the region: 20 at most
    ],
)
def test_dppo_tv_when_a_probability_moved_too_far_then_its_token_is_left_out(now, old, advantage, gradient):
    logprobs = torch.tensor([now]).log().requires_grad_()
    losses = policy_loss(
        "dppo_tv",
        logprobs,
        torch.tensor([old]).log(),
        torch.tensor([advantage]),
        correction_of([1.0], [True]),
        config_of("dppo_tv"),
        metrics=(metrics := {}),
    )
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([gradient], rel=1e-5)
    assert losses.tolist() == pytest.approx([gradient * math.log(now)], rel=1e-5)
    assert metrics["clip_fraction"].value() == (gradient == 0)


@pytest.mark.parametrize(
    "now, old, advantage, low, high, gradient",
    [
        # 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = 0.0204; 0.5 ln(0.5 / 0.4) + 0.5 ln(0.5 / 0.6) the same.
        (0.6, 0.5, 2.0, 0.02, 0.021, -2.4),  # r = 1.2; within high
        (0.6, 0.5, 2.0, 0.021, 0.02, 0.0),
        (0.4, 0.5, -2.0, 0.021, 0.02, 1.6),  # r = 0.8; within low
        (0.4, 0.5, -2.0, 0.02, 0.021, 0.0),
        (0.9, 0.5, -2.0, None, None, 3.6),  # far, on the inner side: the update brings it back
        (0.1, 0.5, 2.0, None, None, -0.4),
        (0.9, 0.5, 2.0, None, None, 0.0),  # 0.51 > 0.05, its own bound
        (0.9, 0.5, 0.0, None, None, 0.0),
        # 1e-4 ln 0.01 + 0.9999 ln(0.9999 / 0.99) = -0.00046 + 0.00994 = 0.0095; r = 100: 20 at most
        (0.01, 0.0001, 2.0, None, None, -40.0),
        # 0.99 ln(0.99 / 0.8) + 0.01 ln(0.01 / 0.2) = 0.211 - 0.030 = 0.18: r = 0.81 passes PPO's
        # clip, and this not
        (0.8, 0.99, -2.0, None, None, 0.0),
    ],
)
def test_dppo_kl_when_a_token_moved_outwards_too_far_then_it_is_left_out(
    now, old, advantage, low, high, gradient
):
    logprobs = torch.tensor([now]).log().requires_grad_()
    losses = policy_loss(
        "dppo_kl",
        logprobs,
        torch.tensor([old]).log(),
        torch.tensor([advantage]),
        correction_of([1.0], [True]),
        config_of("dppo_kl", clip_ratio_low=low, clip_ratio_high=high),
        metrics=(metrics := {}),
    )
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([gradient], rel=1e-5)
    assert losses.tolist() == pytest.approx([gradient * math.log(now)], rel=1e-5)
    assert metrics["clip_fraction"].value() == (gradient == 0 and advantage != 0)


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        # A > 0, t = 2: f = 2 s, s = sigmoid(2 (r - 1)); gradient -w A r 4 s (1 - s).
        (1.0, 2.0, -2.0, -2.0),  # s = 1/2: f = 1
        (1.5, 2.0, -2.9242343, -2.3593431),  # s = 1 / (1 + e^-1) = 0.7310586; 4 s (1 - s) = 0.7864477
        (0.5, 2.0, -1.0757657, -0.7864477),  # s = 0.2689414
        # A <= 0, t = 4: f = s
        (1.5, -2.0, 1.7615942, 1.2599230),  # s = 1 / (1 + e^-2) = 0.8807971; 4 s (1 - s) = 0.4199743
        (1.0, -2.0, 1.0, 2.0),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_sapo_when_the_ratio_leaves_1_then_the_gate_fades_as_its_temperature_says(
    ratio, advantage, loss, gradient, weight
):
    config, metrics = config_of("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=4.0), {}
    losses, gradients = loss_and_gradient([ratio], [advantage], [weight], config=config, metrics=metrics)
    assert losses == pytest.approx([weight * loss], rel=1e-6)
    assert gradients == pytest.approx([weight * gradient], rel=1e-6)
    assert "clip_fraction" not in metrics


def test_sapo_when_no_temperature_is_given_then_1_and_1_05():
    losses, _ = loss_and_gradient([1.0, 1.0], [1.0, -1.0], [1.0, 1.0], config=config_of("sapo"))
    assert losses == pytest.approx([-2.0, 2 / 1.05])


def test_dro_when_the_policy_moved_then_advantage_times_log_prob_and_a_squared_pull_back():
    # log pi_old = -2; beta = 0.5. Loss -w (A log pi - 0.25 d^2), gradient -w (A - 0.5 d), d = log r
    # = 0, 0.4, -1, 2.
    config = config_of("dro", dro_beta=0.5)
    losses, gradients = loss_and_gradient(
        [1.0, math.exp(0.4), math.exp(-1.0), math.exp(2.0)],
        [2.0, 2.0, 0.0, 1.0],
        [1.0, 0.25, 3.0, 1.0],
        config=config,
    )
    assert losses == pytest.approx([4.0, 0.25 * (3.2 + 0.04), 3 * 0.25, 1.0], rel=1e-5, abs=1e-6)
    # The last one is where it pulls as much as the advantage pushes: d = A / beta.
    assert gradients == pytest.approx([-2.0, -0.25 * 1.8, -3 * 0.5, 0.0], rel=1e-5, abs=1e-6)


def test_gspo_when_sequences_interleave_then_one_ratio_and_one_clip_for_each():
    # Sequence 0: ratios 2, 0.5, and 4 at a hole: geometric mean 1. Sequence 2: 1.5, 1.5 -> 1.5. Sequence 3:
    # 0.5, one token. Sequence 1 is empty.
    config, metrics = config_of("gspo", clip_ratio_low=0.2, clip_ratio_high=0.3), {}
    losses, gradients = loss_and_gradient(
        [2.0, 1.5, 4.0, 0.5, 1.5, 0.5],
        [1.0, 1.0, NAN, 1.0, -1.0, -1.0],
        [1.0, 1.0, NAN, 1.0, 2.0, 1.0],
        mask=[True, True, False, True, True, True],
        config=config,
        metrics=metrics,
        seq_ids=[0, 2, 0, 0, 2, 3],
    )
    # A token's own ratio of 2 or 0.5 does not matter: s = 1. 1.5 is clipped where A > 0, 0.5 where A < 0.
    assert losses == pytest.approx([-1.0, -1.3, 0.0, -1.0, 3.0, 0.8], rel=1e-5)
    assert gradients == pytest.approx([-1.0, 0.0, 0.0, -1.0, 3.0, 0.0], rel=1e-5)
    assert metrics["clip_fraction"].value() == pytest.approx(2 / 5)


def test_gspo_when_no_clip_is_given_then_its_own_narrow_one():
    losses, _ = loss_and_gradient([1.001], [1.0], [1.0], config=config_of("gspo"))
    assert losses == pytest.approx([-1.0004])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("loss_name", LOSSES)
def test_loss_when_a_masked_token_holds_garbage_then_loss_and_gradient_are_zero_there(loss_name, bad):
    mask = torch.tensor([True, False, True])
    now = torch.tensor([-1.0, bad, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, bad, 0.25], requires_grad=True)
    config = config_of(loss_name, kl_loss_coef=0.5, entropy_coef=0.1)
    losses = policy_loss(
        loss_name,
        now,
        torch.tensor([-1.0, bad, -2.0]),
        torch.tensor([1.0, bad, -1.0]),
        correction_of([2.0, bad, 0.5], mask.tolist()),
        config,
        metrics=(metrics := {}),
        seq_ids=torch.tensor([0, 0, 0]),
        num_sequences=1,
        ref_logprobs=torch.tensor([-1.0, bad, -2.0]),
        entropy=entropy,
    )
    losses.sum().backward()
    # At r = 1 every loss has the gradient -w A; k3 has none where the policies agree.
    assert now.grad.tolist() == [-2.0, 0.0, 0.5]
    assert entropy.grad.tolist() == pytest.approx([-0.1, 0.0, -0.1])
    assert losses[1] == 0 and losses.isfinite().all()
    assert all(math.isfinite(metric.value()) for metric in metrics.values())
    assert metrics["old_new_k3_kl"].value() == 0 and metrics["reference_kl"].value() == 0
    assert not any(metric.values.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("tokens", [0, 3])
def test_loss_when_everything_is_rejected_or_there_is_nothing_then_zero(loss_name, tokens):
    now = torch.full((tokens,), -1.0, requires_grad=True)
    losses = policy_loss(
        loss_name,
        now,
        torch.full((tokens,), -2.0),
        torch.ones(tokens),
        correction_of([1.0] * tokens, [False] * tokens),
        config_of(loss_name),
        metrics=(metrics := {}),
        seq_ids=torch.zeros(tokens, dtype=torch.int64),
        num_sequences=2,
    )
    losses.sum().backward()
    assert losses.tolist() == [0.0] * tokens and now.grad.tolist() == [0.0] * tokens
    assert math.isnan(metrics["policy"].value())


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


@pytest.mark.parametrize("loss_name", LOSSES)
def test_loss_when_the_policy_ran_away_then_finite(loss_name):
    metrics = {}
    now = torch.tensor([-1.0, -200.0], requires_grad=True)
    losses = policy_loss(
        loss_name,
        now,
        torch.tensor([-200.0, -1.0]),
        torch.tensor([-1.0, 1.0]),
        correction_of([1.0, 1.0], [True, True]),
        config_of(loss_name),
        metrics=metrics,
        seq_ids=torch.tensor([0, 1]),
        num_sequences=2,
    )
    losses.sum().backward()
    assert losses.isfinite().all() and now.grad.isfinite().all()
    assert metrics["old_new_k3_kl"].value() == pytest.approx((math.exp(20) - 2) / 2, rel=1e-6)


@pytest.mark.parametrize("loss_name", LOSSES)
def test_loss_metrics_when_a_token_became_impossible_then_its_divergence_is_not_clamped(loss_name):
    losses = policy_loss(
        loss_name,
        torch.tensor([-30.0]),
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
        correction_of([1.0], [True]),
        config_of(loss_name),
        metrics=(metrics := {}),
        seq_ids=torch.tensor([0]),
        num_sequences=1,
    )
    # e^-29 - 1 + 29: the exponent alone is clamped, at -20.
    assert metrics["old_new_k3_kl"].value() == pytest.approx(28.0, rel=1e-6) and losses.isfinite().all()
    assert metrics["old_new_k3_kl_clamped"].value() == 10.0


def test_gspo_when_one_token_moved_beyond_20_then_the_mean_takes_it_whole():
    # log r = -40 and 3 * 13.4 of a sequence: their mean is 0.05. Clamped at -20 the mean would be 5.05.
    old = torch.tensor([-1.0, -15.0, -15.0, -15.0])
    now = torch.tensor([-41.0, -1.6, -1.6, -1.6], requires_grad=True)
    losses = policy_loss(
        "gspo",
        now,
        old,
        torch.ones(4),
        correction_of([1.0] * 4, [True] * 4),
        config_of("gspo", clip_ratio_low=0.2, clip_ratio_high=0.3),
        seq_ids=torch.zeros(4, dtype=torch.int64),
        num_sequences=1,
    )
    assert losses.tolist() == pytest.approx([-math.exp(0.05)] * 4, rel=1e-5)


def test_ppo_clip_when_there_is_no_dual_clip_then_the_ratio_stops_at_e20():
    now = torch.tensor([-1.0, -200.0], requires_grad=True)
    losses = policy_loss(
        "ppo_clip",
        now,
        torch.tensor([-200.0, -1.0]),
        torch.tensor([-1.0, 1.0]),
        correction_of([1.0, 1.0], [True, True]),
        CONFIG,
    )
    assert losses.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-5)


@pytest.mark.parametrize(
    "kind, difference, value, gradient",
    [
        # difference = log pi_theta - log pi_ref
        ("k1", 0.5, 0.5, 1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k2", -2.0, 2.0, -2.0),
        ("k3", 0.5, math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
        ("k3", -2.0, math.exp(2.0) - 1 - 2.0, 1 - math.exp(2.0)),
        # e^2.6 - 3.6 = 9.86 is the last that counts below, e^-10.99 - 1 + 10.99 = 9.99 above
        ("k3", -2.6, math.exp(2.6) - 1 - 2.6, 1 - math.exp(2.6)),
        ("k3", 10.99, math.exp(-10.99) - 1 + 10.99, 1 - math.exp(-10.99)),
        ("k3", -2.62, 10.0, 0.0),  # e^2.62 - 3.62 = 10.1: clamped
        ("k3", 11.01, 10.0, 0.0),  # 10.01: clamped
        ("k3", -3.0, 10.0, 0.0),  # e^3 - 4 = 16.1: clamped
        ("k3", -100.0, 10.0, 0.0),
        # Exponents are clamped at 20, and d where it is squared: no gradient beyond.
        ("k1", -100.0, -100.0, 1.0),
        ("k2", -20.0, 200.0, -20.0),
        ("k2", -29.0, 200.0, 0.0),
        ("k3", 29.0, 10.0, 0.0),  # 28: clamped
        ("k3+", 0.5, math.exp(-0.5) - 1 + 0.5, 0.5),  # the value of k3, the gradient of k2
        ("k3+", -3.0, 10.0, -3.0),  # beyond the cap of the value the gradient goes on
        ("k3+", 12.0, 10.0, 12.0),
        # ratio 2: twice k3, and the gradient of r k3 = 2 (k3 + 1 - e^-d) = 2 d
        ("unbiased", 0.5, 2 * (math.exp(-0.5) - 1 + 0.5), 1.0),
        ("unbiased", 12.0, 20.0, 24.0),
        ("unbiased", -19.0, 20.0, -38.0),  # where k3 + 1 - e^-d in float32 would be nothing but rounding
    ],
)
def test_reference_kl_when_policies_differ_then_by_hand(kind, difference, value, gradient):
    logprobs = torch.tensor([difference - 1.0], requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([-1.0]), torch.tensor([True]), kind, ratio=torch.tensor([2.0]))
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([value], rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([gradient], rel=1e-5, abs=1e-6)


def test_penalties_when_coefficients_are_set_then_added_unweighted():
    config = RolloutCorrectionConfig(kl_loss_coef=0.1, kl_loss_type="k2", entropy_coef=0.01)
    arguments = (
        torch.tensor([-1.0]),
        torch.tensor([-1.0]),
        torch.tensor([2.0]),
        correction_of([3.0], [True]),
        config,
    )
    losses = policy_loss(
        "ppo_clip",
        *arguments,
        ref_logprobs=torch.tensor([-3.0]),
        entropy=torch.tensor([5.0]),
        metrics=(metrics := {}),
    )
    # -3 * 2 + 0.1 * 2^2 / 2 - 0.01 * 5
    assert losses.tolist() == pytest.approx([-6 + 0.2 - 0.05])
    assert metrics["reference_kl"].value() == pytest.approx(2.0)
    with pytest.raises(ValueError, match="`kl_loss_coef` needs a reference policy; pass ref_logprobs"):
        policy_loss("ppo_clip", *arguments, entropy=torch.tensor([5.0]))
    with pytest.raises(ValueError, match="`entropy_coef` needs the entropy of each token"):
        policy_loss("ppo_clip", *arguments, ref_logprobs=torch.tensor([-3.0]))


@pytest.mark.parametrize(
    "kind, difference, value, gradient",
    [
        ("squared", 0.5, 0.25, 1.0),
        ("squared", -20.0, 400.0, -40.0),
        ("squared", -30.0, 400.0, 0.0),
        ("k3", 0.5, math.exp(0.5) - 1.5, math.exp(0.5) - 1),
        ("k3", -2.0, math.exp(-2.0) + 1, math.exp(-2.0) - 1),
        ("k3", 2.6, math.exp(2.6) - 3.6, math.exp(2.6) - 1),
        ("k3", 3.0, 10.0, 0.0),
        ("k3", -12.0, 10.0, 0.0),
    ],
)
def test_sampler_kl_when_the_policy_has_moved_then_by_hand(kind, difference, value, gradient):
    logprobs = torch.tensor([difference - 1.0, 0.0], requires_grad=True)  # D = log pi_theta - log pi_rollout
    kl = sampler_kl(logprobs, torch.tensor([-1.0, math.nan]), torch.tensor([True, False]), kind)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([value, 0.0], rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([gradient, 0.0], rel=1e-5)


def test_unbiased_kl_when_older_weights_have_sampled_then_weighed_by_the_whole_ratio():
    # r = e^0.2, w = 3, d = 0.5; one token is rejected, one has no log-prob under the reference.
    given = [torch.tensor([x] * 3) for x in (-1.0, -1.2, 0.0)]
    config = RolloutCorrectionConfig(kl_loss_coef=0.1, kl_loss_type="unbiased")
    reference, k3 = torch.tensor([-1.5, -1.5, math.nan]), math.exp(-0.5) - 0.5
    for settings, weight in ((config, 3.0), (replace(config, bypass_mode=True), 1.0)):
        metrics, now = {}, given[0].clone().requires_grad_()
        losses = policy_loss(
            "ppo_clip",
            now,
            *given[1:],
            correction_of([3.0] * 3, [True, False, True]),
            settings,
            ref_logprobs=reference,
            metrics=metrics,
        )
        losses.sum().backward()
        ratio = math.exp(0.2) * weight
        assert losses.tolist() == pytest.approx([0.1 * ratio * k3, 0.0, 0.0], rel=1e-5)
        assert now.grad.tolist() == pytest.approx([0.1 * ratio * 0.5, 0.0, 0.0], rel=1e-5)
        assert metrics["reference_kl"].value() == pytest.approx(ratio * k3, rel=1e-5)
        assert metrics["reference_missing"].value() == 1


def test_kl_estimates_when_averaged_over_samples_then_their_gradient_is_that_of_the_kl_they_claim():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64)
    theirs = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(value_of):
        leaf = logits.clone().requires_grad_()
        value_of(leaf.log_softmax(0)).backward()
        return leaf.grad

    def mean_of(kind):  # the mean over the policy's own samples, of which id i comes with its probability
        share, all_ids = logits.softmax(0), torch.ones(7, dtype=torch.bool)
        return gradient(lambda own: (share * reference_kl(own, theirs, all_ids, kind)).sum())

    kl = gradient(lambda own: (own.exp() * (own - theirs)).sum())
    other_way = gradient(lambda own: (theirs.exp() * (theirs - own)).sum())
    for kind, expected in (("k1", torch.zeros(7)), ("k2", kl), ("k3+", kl), ("k3", other_way)):
        assert mean_of(kind).tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-6)

    # Older weights have sampled: unbiased, weighed by pi_theta / pi_older, still has the KL's
    # gradient; k3+ has not.
    older = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)

    def mean_of_older(kind):
        ratio, all_ids = (logits.log_softmax(0) - older).exp(), torch.ones(7, dtype=torch.bool)
        return gradient(
            lambda own: (older.exp() * reference_kl(own, theirs, all_ids, kind, ratio=ratio)).sum()
        )

    assert mean_of_older("unbiased").tolist() == pytest.approx(kl.tolist(), rel=1e-5, abs=1e-6)
    assert (mean_of_older("k3+") - kl).abs().max() > 0.1


def test_reward_kl_when_log_probs_are_missing_then_the_rest_is_summed():
    # d: 0.5, 1 | -0.2, and three tokens that do not count: not sampled, or not finite on one side
    old = torch.tensor([-1.0, -1.0, -1.2, -1.0, math.nan, -1.0])
    reference = torch.tensor([-1.5, -2.0, -1.0, -3.0, -1.0, -math.inf])
    mask, ids = torch.tensor([True, True, True, False, True, True]), torch.tensor([0, 0, 1, 1, 1, 1])
    k3 = [math.exp(-0.5) - 0.5 + math.exp(-1), math.exp(0.2) - 1.2]
    for kind, expected in (("k1", [1.5, -0.2]), ("k2", [0.625, 0.02]), ("k3", k3)):
        config = RolloutCorrectionConfig(kl_reward_coef=0.1, kl_reward_type=kind)
        taken = reward_kl(old, reference, mask, ids, num_sequences=2, config=config, groups=ParallelGroups())
        assert taken.tolist() == pytest.approx([0.1 * kl for kl in expected])
    # Beyond the cap a token of k3 costs 10, and no more: d = -3 and 12, where k3 is 16.1 and 11.
    config = RolloutCorrectionConfig(kl_reward_coef=0.1, kl_reward_type="k3")
    [taken] = reward_kl(
        torch.tensor([-4.0, -1.0]),
        torch.tensor([-1.0, -13.0]),
        mask[:2],
        ids[:2],
        num_sequences=1,
        config=config,
        groups=ParallelGroups(),
    )
    assert taken == pytest.approx(0.1 * 20)


def test_mean_entropy_when_tokens_are_masked_then_of_the_others():
    entropy = torch.tensor([0.5, NAN, 2.0], requires_grad=True)
    mean = mean_entropy(entropy, torch.tensor([True, False, True]))
    assert mean.values.tolist() == [2.5, 2.0] and mean.value() == 1.25
    assert mean.values.dtype == torch.float64 and not mean.values.requires_grad


def test_policy_loss_when_the_name_is_unknown_or_sequences_are_missing_then_told():
    arguments = (*[torch.zeros(1)] * 3, correction_of([1.0], [True]), PRESETS["disabled"])
    with pytest.raises(ValueError) as raised:
        policy_loss("ppo", *arguments)
    assert str(raised.value) == f"`loss`: unknown loss 'ppo'; known: {', '.join(sorted(LOSSES))}"
    for given in ({}, {"seq_ids": torch.zeros(1, dtype=torch.int64)}, {"num_sequences": 1}):
        with pytest.raises(ValueError, match="`loss` gspo looks at whole sequences; pass seq_ids and num_s"):
            policy_loss("gspo", *arguments, **given)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss_name", LOSSES)
def test_loss_when_tensors_hold_no_data_then_it_runs_since_nothing_is_read(loss_name, aggregation):
    norm = aggregation == "seq-mean-token-sum-norm"
    config = RolloutCorrectionConfig(
        loss=loss_name,
        loss_aggregation=aggregation,
        loss_scale_length=4 if norm else None,
        kl_loss_coef=0.1,
        sampler_kl_coef=0.1,
        entropy_coef=0.1,
        dro_beta=0.5 if loss_name == "dro" else None,
    )
    now, old, advantages, reference, entropy, weights = torch.zeros(6, 5, device="meta").unbind()
    now.requires_grad_()
    mask, seq_ids = now > 0, torch.zeros(5, dtype=torch.int64, device="meta")
    count = mask.sum().double()
    lengths = Lengths("valid", count.expand(2), count)
    correction = Correction(weights, mask, mask, mask[:2], count, count, lengths, torch.ones(2).double())
    metrics = {}
    losses = policy_loss(
        loss_name,
        now,
        old,
        advantages.double(),
        correction,
        config,
        seq_ids=seq_ids,
        num_sequences=2,
        ref_logprobs=reference,
        rollout_logprobs=old,
        entropy=entropy,
        metrics=metrics,
    )
    assert losses.dtype == torch.float32
    assert {metric.values.dtype for metric in metrics.values()} == {torch.float64}
    (losses * token_coefficients(correction, seq_ids, config)).sum().backward()
    assert now.grad.device.type == "meta"

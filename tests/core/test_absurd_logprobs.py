"""A finite but absurd log-prob, of a trainer, a server or a reference: no term of it is infinite, or
below every bound.

An engine that masks logits with -1e30 may send one. Beyond +-20 the squares of D have their value at 20,
and no gradient.
"""

import math
from itertools import product

import pytest
import torch

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import KL_TYPES, LOSSES
from megatron_rl_corr.config.rules import DIVERGENCES
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.kl import kl_estimate, reference_kl, reward_kl, sampler_kl
from megatron_rl_corr.core.ratios import k3
from megatron_rl_corr.mcore.decision import mean_k3
from megatron_rl_corr.reduce.collectives import ParallelGroups
from tests.tiers import in_matrix, matrix

pytestmark = matrix

SIZES = (30.0, 1e20, *in_matrix(1e4, 1e19, 1e30))
"""From 1e20 on a square is no float32."""
SIDES = ("now", "old", "reference", "rollout")
USUAL = {"now": -1.25 + 2**-11, "old": -1.25, "reference": -1.5, "rollout": -1.25 - 2**-11}


def config_of(loss: str, **settings) -> RolloutCorrectionConfig:
    settings |= {"dr_grpo": {"loss_scale_length": 4}, "dro": {"dro_beta": 0.5}}.get(loss, {})
    return RolloutCorrectionConfig(loss=loss, **settings)


def gradient(config: RolloutCorrectionConfig, side: str, size: float) -> list[float]:
    """d loss / d log pi_theta of three sequences of one token; the second has -size on one side,
    else usual values.
    """
    rows = {name: torch.tensor([value] * 3) for name, value in USUAL.items()}
    rows[side][1] = -size
    advantages, ids = torch.tensor([1.0, -1.0, 0.5]), torch.arange(3)
    if config.bypass_mode:
        rows["old"] = rows["rollout"]
    compared = rows["now"] if config.bypass_mode else rows["old"]
    correction = compute_correction(
        compared, rows["rollout"], torch.ones(3), ids, num_sequences=3, config=config, advantages=advantages
    )
    now, metrics = rows["now"].requires_grad_(), {}
    loss = policy_loss(
        config.loss,
        now,
        rows["old"],
        advantages,
        correction,
        config,
        seq_ids=ids,
        num_sequences=3,
        metrics=metrics,
        ref_logprobs=rows["reference"],
        rollout_logprobs=rows["rollout"],
    )
    loss.sum().backward()
    assert correction.mask[[0, 2]].all()
    assert all(math.isfinite(metric.value()) for metric in metrics.values()), metrics
    assert min(metrics[name].value() for name in ("old_new_k3_kl", "old_new_k3_kl_clamped")) >= 0
    return now.grad.tolist()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_when_a_log_prob_is_absurd_then_finite_and_of_others_as_without(loss, side):
    for kind, pull in product(KL_TYPES, ("squared", "k3")):
        config = config_of(
            loss,
            kl_loss_coef=0.1,
            kl_loss_type=kind,
            sampler_kl_coef=0.1,
            sampler_kl_type=pull,
            rollout_is="token",
            rollout_is_upper=2.0,
        )
        usual, far = gradient(config, side, -USUAL[side]), gradient(config, side, 1e3)
        for size in SIZES:
            found = gradient(config, side, size)
            assert all(map(math.isfinite, found)), (kind, pull, size, found)
            assert (found[0], found[2]) == (usual[0], usual[2]), (kind, pull, size)
            assert found[1] == far[1], (kind, pull, size)  # however absurd it is


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_preset_when_a_log_prob_is_absurd_then_its_update_is_not_lost(name, side):
    usual = gradient(PRESETS[name], side, -USUAL[side])
    for size in SIZES:
        found = gradient(PRESETS[name], side, size)
        assert all(map(math.isfinite, found)), (size, found)
        if PRESETS[name].rollout_m2_threshold is None and not PRESETS[name].rollout_is_batch_normalize:
            assert (found[0], found[2]) == (usual[0], usual[2]), size  # those two compare a batch's tokens


def test_prime_rl_when_a_server_sends_minus_1e30_then_by_hand():
    # D = log pi_theta - log pi_rollout = 2^-10: the pull 1e-3 D^2 has the gradient 2e-3 D, the policy's is -r
    # A, r = e^D. The second token's D is 1e30: no pull, and with A < 0 it is inside DPPO's region, as
    # pi_theta is above mu: r at its cap of 20. With -20 A: 20.
    found = gradient(PRESETS["prime_rl"], "rollout", 1e30)
    d = 2**-10
    assert found == pytest.approx([-math.exp(d) + 2e-3 * d, 20.0, -0.5 * math.exp(d) + 2e-3 * d], rel=1e-6)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", SIZES)
def test_penalty_when_beyond_20_then_autograd_of_float64_with_the_clamp(size, sign):
    reference, ratio = torch.zeros(1), torch.tensor([3.0])
    for kind in (*KL_TYPES, "squared", "sampler k3"):
        now = torch.tensor([sign * size], requires_grad=True)
        if kind in KL_TYPES:
            value = reference_kl(now, reference, torch.ones(1, dtype=torch.bool), kind, ratio=ratio)
        else:
            value = sampler_kl(now, reference, torch.ones(1, dtype=torch.bool), kind.removeprefix("sampler "))
        value.sum().backward()
        d = torch.tensor([sign * size], dtype=torch.float64, requires_grad=True)
        c = d.clamp(-20, 20)
        naive = {
            "k1": d,
            "k2": c * c / 2,
            "squared": c * c,
            "k3": ((-c).exp() - 1 + c).clamp(max=10.0),
            "sampler k3": (c.exp() - 1 - c).clamp(max=10.0),
            "k3+": c * c / 2 - (c * c / 2).detach() + 10,
            "unbiased": 3 * (c * c / 2 - (c * c / 2).detach() + 10),
        }[kind]
        naive.sum().backward()
        assert value.item() == pytest.approx(naive.item(), rel=1e-6), kind
        assert now.grad.item() == pytest.approx(d.grad.item(), rel=1e-6, abs=0), kind


def test_squares_when_d_is_within_20_then_bit_for_bit_without_a_clamp():
    d = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, 1e-7, -1e-30, 20.0, -20.0])])
    every = torch.ones(len(d), dtype=torch.bool)

    def both(function) -> tuple[torch.Tensor, torch.Tensor]:
        now = d.clone().requires_grad_()
        value = function(now)
        return value.detach(), torch.autograd.grad(value.sum(), now)[0]

    zero = torch.zeros(len(d))
    for found, plain in (
        (lambda x: kl_estimate(x, "k2"), lambda x: 0.5 * x.square()),
        (lambda x: kl_estimate(x, "k3"), lambda x: ((-x).clamp(-20, 20).expm1() + x).clamp(max=10.0)),
        (lambda x: sampler_kl(x, zero, every, "squared"), lambda x: x.square()),
    ):
        for a, b in zip(both(found), both(plain), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(k3(d.double()), d.double().expm1() - d.double())


# Distances: k3's minus D would take it below every bound


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (kind, level)
        for kind in ("k2", "k3", "exp_abs", "binary_kl", "abs_diff", "vaco")
        for level in DIVERGENCES[kind].levels
    ],
)
@pytest.mark.parametrize("size", [1e3, 5e8, 1e12, 1e30])
def test_rule_when_a_server_log_prob_is_absurd_then_its_token_is_rejected(kind, level, size):
    # D = 0 and +size; of the second sequence 0. abs_diff is of probabilities: e^0 less 0.
    rule = RejectionRule(level, kind, upper=0.4 if kind in ("abs_diff", "binary_kl") else 1.5)
    correction = compute_correction(
        torch.tensor([-0.5, -0.01, -0.5]),
        torch.tensor([-0.5, -size, -0.5]),
        torch.ones(3),
        torch.tensor([0, 0, 1]),
        num_sequences=2,
        config=RolloutCorrectionConfig(rollout_rs=(rule,)),
        turn_ids=torch.zeros(3, dtype=torch.int64),
        num_turns=1,
        advantages=torch.ones(3),
    )
    mask = correction.mask.tolist()
    assert mask[2] and not mask[1]


def test_batch_filter_when_one_token_is_absurd_then_the_step_is_left_out():
    config = RolloutCorrectionConfig(rollout_batch_filter_kl=0.1)
    correction = compute_correction(
        torch.full((4,), -1.0),
        torch.tensor([-1.0, -1.0, -1e30, -1.0]),
        torch.ones(4),
        torch.arange(4),
        num_sequences=4,
        config=config,
    )
    assert correction.kept_tokens.item() == 0 and correction.metrics["batch_filtered"].value() == 1


@pytest.mark.parametrize("size", [5e8, 1e12, 1e30])
def test_k3_when_a_token_is_absurd_then_huge_and_never_negative(size):
    rollout = torch.tensor([-1.0, -size, -1.0, -1.0])
    correction = compute_correction(
        torch.full((4,), -1.0),
        rollout,
        torch.ones(4),
        torch.arange(4),
        num_sequences=4,
        config=RolloutCorrectionConfig(),
        turn_ids=torch.zeros(4, dtype=torch.int64),
        engine_ids=torch.zeros(4, dtype=torch.int64),
        engines=("sglang",),
    )
    expected = (math.expm1(20) - 1e8) / 4  # three tokens have D = 0
    for name in ("k3_kl", "by_turn/first/k3_kl", "by_engine/sglang/k3_kl"):
        assert correction.metrics[name].value() == pytest.approx(expected, rel=1e-9)
    assert correction.metrics["kl"].value() == pytest.approx(-size / 4, rel=1e-6)  # signed, D as it is
    found = mean_k3(torch.full((4,), -1.0), rollout, torch.ones(4, dtype=torch.bool)).value()
    assert found == pytest.approx(expected, rel=1e-9)  # what the first step's bound is asked of


@pytest.mark.parametrize(("kind", "worst"), [("k1", 20.0), ("k2", 200.0), ("k3", 10.0)])
def test_reward_kl_when_a_reference_log_prob_is_absurd_then_a_token_takes_a_bounded_part(kind, worst):
    config = RolloutCorrectionConfig(kl_reward_coef=0.1, kl_reward_type=kind, loss="grpo")
    taken = reward_kl(
        torch.tensor([-1.0, -1.0, -1.0]),
        torch.tensor([-1.0, -1e30, -1.5]),
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 0, 1]),
        num_sequences=2,
        config=config,
        groups=ParallelGroups(),
    )
    usual = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5}[kind]
    assert taken.tolist() == pytest.approx([0.1 * worst, 0.1 * usual], rel=1e-6)

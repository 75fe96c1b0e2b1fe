"""Importance weights by hand: four levels, four modes, closed bounds."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.ratios import LOG_CLAMP
from megatron_rl_corr.core.weights import gamma_weights

# Sequence 0: rho 2, 3 in turn 0 and 0.5 in turn 1; sequence 1: empty; sequence 2: rho 0.25.
RHO = torch.tensor([2.0, 3.0, 0.5, 0.25])
SEQ_IDS = torch.tensor([0, 0, 0, 2])
TURN_IDS = torch.tensor([0, 0, 1, 0])


def weights_of(rho, level="token", mode="truncate", lower=None, upper=1e9, seq_ids=None, turn_ids=None):
    config = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_mode=mode, rollout_is_lower=lower, rollout_is_upper=upper
    )
    rollout = torch.full_like(rho, -1.0)
    seq_ids = torch.zeros(len(rho), dtype=torch.int64) if seq_ids is None else seq_ids
    return compute_correction(
        rho.log() - 1,
        rollout,
        torch.ones(len(rho)),
        seq_ids,
        num_sequences=3,
        config=config,
        turn_ids=turn_ids,
        num_turns=2,
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 3.0, 0.5, 0.25]),
        ("sequence", [3.0, 3.0, 3.0, 0.25]),  # 2 * 3 * 0.5
        ("geometric", [3 ** (1 / 3)] * 3 + [0.25]),
        ("turn", [6.0, 6.0, 0.5, 0.25]),
    ],
)
def test_weights_when_computed_by_hand_then_equal(level, expected):
    weights = weights_of(RHO, level, seq_ids=SEQ_IDS, turn_ids=TURN_IDS).weights
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert weights.dtype == torch.float32


def test_weights_when_a_long_product_leaves_float32_then_it_is_clamped_not_infinite():
    # 1000 tokens of D = 0.2: e^200 overflows float32; the geometric mean is e^0.2 all the same.
    rho = torch.full((1000,), math.exp(0.2))
    assert weights_of(rho, "sequence").weights[0].item() == pytest.approx(math.exp(LOG_CLAMP), rel=1e-5)
    assert weights_of(1 / rho, "sequence").weights[0].item() == pytest.approx(math.exp(-LOG_CLAMP), rel=1e-5)
    assert weights_of(rho, "geometric").weights[0].item() == pytest.approx(math.exp(0.2), rel=1e-6)


@pytest.mark.parametrize("level", ["sequence", "turn"])
def test_normalized_products_when_all_are_below_the_clamp_of_single_weights_then_still_unlike(level):
    # log w = -25, -26, -30: e^0, e^-1 and e^-5 after the common factor e^-25; their mean is
    # 1.3746 / 3 = 0.4582.
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_upper=2.0, rollout_is_batch_normalize=True)
    correction = compute_correction(
        torch.tensor([-12.0, -13.0, -26.0, -30.0]),
        torch.zeros(4),
        torch.ones(4),
        torch.tensor([0, 0, 1, 2]),
        num_sequences=3,
        config=config,
        turn_ids=torch.zeros(4, dtype=torch.int64),
        num_turns=2,
    )
    expected = [1 / 0.4582057, 1 / 0.4582057, math.exp(-1) / 0.4582057, math.exp(-5) / 0.4582057]
    assert correction.weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert correction.metrics["weight_out_of_bounds"].value() == 0


def test_normalized_products_when_far_beyond_float32_then_finite_and_bounded():
    # log w = 300 and 400 are cut to the bound, 2; -300 and -400 (as -340) are 0 beside them: 2, 2, 0,
    # 0 by their mean.
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_is_batch_normalize=True
    )
    d = torch.tensor([300.0, 400.0, -300.0, -400.0])
    correction = compute_correction(
        d, torch.zeros(4), torch.ones(4), torch.arange(4), num_sequences=4, config=config
    )
    assert correction.weights.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert correction.metrics["weight_out_of_bounds"].value() == 0.5
    # Of the last two alone: e^-300 and e^-340.
    correction = compute_correction(
        d[2:], torch.zeros(2), torch.ones(2), torch.arange(2), num_sequences=2, config=config
    )
    assert correction.weights.tolist() == pytest.approx([2.0, 2 * math.exp(-40)], rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("mode", "lower", "expected", "outside"),
    [
        ("truncate", None, [0.4, 0.8, 5.0], 1 / 3),
        ("clip", 0.5, [0.5, 0.8, 5.0], 2 / 3),
        ("mask", 0.5, [0.0, 0.8, 0.0], 2 / 3),
    ],
)
def test_bounds_when_two_of_three_are_outside_then_each_modes_way(mode, lower, expected, outside):
    correction = weights_of(torch.tensor([0.4, 0.8, 6.0]), mode=mode, lower=lower, upper=5.0)
    assert correction.weights.tolist() == pytest.approx(expected)
    assert correction.metrics["weight_out_of_bounds"].value() == pytest.approx(outside)
    assert correction.mask.all()  # a weight of 0 is no rejection


def test_mask_when_a_weight_is_on_a_bound_then_kept_and_outside_it_is_not():
    rho = torch.tensor([0.5, 0.4999, 2.0, 2.0001])
    weights = weights_of(rho, mode="mask", lower=0.5, upper=2.0).weights
    assert weights.tolist() == pytest.approx([0.5, 0.0, 2.0, 0.0], rel=1e-6)


def gamma_of(rho, advantages, seq_ids=None, **settings):
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_mode="gamma", **settings)
    seq_ids = torch.arange(len(rho)) if seq_ids is None else seq_ids
    return compute_correction(
        rho.log() - 1,
        torch.full_like(rho, -1.0),
        torch.ones(len(rho)),
        seq_ids,
        num_sequences=len(rho),
        config=config,
        advantages=torch.tensor(advantages),
    )


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Of w = 2 * 3 * 0.5 = 3 and w = 0.25: w^2 e^(3 - 3w) where A >= 0, else w^3 e^(2 - 2w).
        (1.5, [9 * math.exp(-6), 0.0625 * math.exp(2.25)]),
        (0.0, [9 * math.exp(-6), 0.0625 * math.exp(2.25)]),
        (-0.5, [27 * math.exp(-4), 0.015625 * math.exp(1.5)]),
    ],
)
def test_gamma_when_computed_by_hand_then_one_weight_a_sequence_by_the_sign_of_its_advantage(
    advantage, expected
):
    correction = gamma_of(RHO, [advantage] * 4, SEQ_IDS)
    assert correction.weights.tolist() == pytest.approx([expected[0]] * 3 + [expected[1]], rel=1e-6)
    assert correction.mask.all() and correction.weights.dtype == torch.float32
    assert correction.metrics["weight_out_of_bounds"].value() == 0
    assert correction.metrics["weight_max"].value() == pytest.approx(max(expected), rel=1e-6)


def test_gamma_when_a_sequence_has_no_tokens_then_its_weight_is_0():
    log_ratios, advantages = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert gamma_weights(log_ratios, advantages, torch.tensor([True, False])).tolist() == [1.0, 0.0]


def test_gamma_when_at_its_ends_and_peaks_then_1_at_1_and_never_above_1_25():
    # Peaks at w = k / l: (2/3)^2 e = 1.2081 where A >= 0, (3/2)^3 / e = 1.2416 where A < 0.
    correction = gamma_of(torch.tensor([1.0, 1.0, 2 / 3, 1.5]), [1.0, -1.0, 1.0, -1.0])
    assert correction.weights.tolist() == pytest.approx([1, 1, 1.2081253, 1.2415931], rel=1e-6)
    # log w is clamped to +-20: e^-40 e^3 and e^-60 e^2 below, nothing above.
    far = torch.tensor([1e-30, 1e-30, 1e30, 1e30])
    weights = gamma_of(far, [1.0, -1.0, 1.0, -1.0]).weights.tolist()
    assert weights == pytest.approx([math.exp(-37), math.exp(-58), 0.0, 0.0], rel=1e-6, abs=0)


def test_gamma_when_float32_has_no_number_that_small_then_0_and_no_ess_of_squares_that_vanish():
    # 50^3 e^-98 = 3.4e-38 is a normal float32; 52^3 e^-102 = 7e-40 and 198^3 e^-394 = 6e-165 are none.
    weights = gamma_of(torch.tensor([50.0, 52.0, 198.0]), [-1.0] * 3).weights.tolist()
    assert weights == pytest.approx([50**3 * math.exp(-98), 0.0, 0.0], rel=1e-4, abs=0)
    metrics = gamma_of(torch.tensor([198.0, 198.0]), [-1.0] * 2).metrics
    assert metrics["weight_max"].value() == 0 and math.isnan(metrics["ess"].value())


def test_gamma_when_a_sequence_is_long_then_its_length_does_not_matter():
    # 1000 tokens of D = 0.0004 are one token of D = 0.4.
    rho = torch.full((1000,), math.exp(0.0004))
    whole = gamma_of(rho, [1.0] * 1000, torch.zeros(1000, dtype=torch.int64)).weights[0].item()
    assert whole == pytest.approx(gamma_of(torch.tensor([math.exp(0.4)]), [1.0]).weights[0].item(), rel=1e-4)


def test_gamma_when_normalised_then_refused():
    with pytest.raises(
        ValueError, match="`rollout_is_batch_normalize` with `rollout_is_mode` gamma: .*; drop it"
    ):
        RolloutCorrectionConfig(
            rollout_is="sequence", rollout_is_mode="gamma", rollout_is_batch_normalize=True
        )


def test_gamma_when_the_unbiased_kl_would_be_weighed_by_it_then_refused():
    given = {
        "rollout_is": "sequence",
        "rollout_is_mode": "gamma",
        "kl_loss_coef": 0.1,
        "kl_loss_type": "unbiased",
    }
    with pytest.raises(ValueError, match="`kl_loss_type` unbiased with `rollout_is_mode` gamma: .*k3\\+"):
        RolloutCorrectionConfig(**given)
    RolloutCorrectionConfig(**given, bypass_mode=True, loss="reinforce")


def test_gamma_when_advantages_are_missing_then_it_asks_for_them():
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_mode="gamma")
    with pytest.raises(
        ValueError, match="rollout_is_mode gamma needs advantages, the advantage of .*; pass advantage"
    ):
        compute_correction(RHO, RHO, RHO, SEQ_IDS, num_sequences=3, config=config)

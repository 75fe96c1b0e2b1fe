"""Rules and metrics by turn: unequal turns, one interrupted, a hole, a turn without valid tokens."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction

NAN = float("nan")
# Sequence 0: D = 0.1, -0.2 in turn 0 (interrupted by turn 1 and a masked token), 0.4 in turn 1, and turn 2
# without a finite log-prob; sequence 1: nothing but a masked token; sequence 2: D = 0.01 in turn 0.
LOG_RATIO = torch.tensor([0.1, 0.4, -0.2, 9.0, NAN, NAN, 0.01])
SEQ_IDS = torch.tensor([0, 0, 0, 0, 0, 1, 2])
TURN_IDS = torch.tensor([0, 1, 0, 0, 2, 0, 0])
MASK = torch.tensor([True, True, True, False, True, False, True])


def correct(config: RolloutCorrectionConfig, turn_ids=TURN_IDS, **inputs):
    return compute_correction(
        LOG_RATIO - 1,
        torch.full((7,), -1.0),
        MASK,
        SEQ_IDS,
        num_sequences=3,
        config=config,
        turn_ids=turn_ids,
        **({"num_turns": 3} | inputs),
    )


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # e^-0.05 and e^0.4, compared from above.
        ("ratio", 0.9512294, 1.4918247),
        # D^2 / 2: (0.005 + 0.02) / 2 and 0.08
        ("k2", 0.0125, 0.08),
        # e^D - 1 - D: (0.0051709 + 0.0187308) / 2 and 0.0918247
        ("k3", 0.01195085, 0.0918247),
        # pi_rollout = 0.3678794, pi_train = 0.4065697, 0.3011942, 0.5488116: (0.0386903 + 0.0666852)
        # / 2 and 0.1809322
        ("abs_diff", 0.05268775, 0.1809322),
    ],
)
def test_turn_rule_when_its_bound_lies_between_two_turns_then_one_goes_and_its_sequence_stays(
    name, first, second
):
    for bound, kept_first, kept_second in [
        (second * 1.0001, True, True),
        (second * 0.9999, True, False),
        (first * 1.0001, True, False),
        (first * 0.9999, False, False),
    ]:
        correction = correct(
            RolloutCorrectionConfig(rollout_rs=(RejectionRule("turn_mean", name, upper=bound),))
        )
        # ln 0.95 is below sequence 2's D as well.
        third = name != "ratio" or bound > 1.0100502
        assert correction.mask.tolist() == [
            kept_first,
            kept_second,
            kept_first,
            False,
            False,
            False,
            third,
        ], bound
        # A turn that goes takes no sequence away.
        assert correction.kept_sequences.tolist() == [True, False, True]
        gone = 4 - 2 * kept_first - kept_second - third
        assert correction.metrics[f"rejected_fraction/turn_mean_{name}"].value() == gone / 4


def test_turn_weights_when_a_token_has_no_log_prob_then_its_turn_is_the_product_of_the_others():
    correction = correct(RolloutCorrectionConfig(rollout_is="turn", rollout_is_upper=9.0))
    products = [math.exp(-0.1), math.exp(0.4), math.exp(-0.1), 0.0, 0.0, 0.0, math.exp(0.01)]
    assert correction.weights.tolist() == pytest.approx(products, rel=1e-6)


def test_metrics_by_turn_when_worked_out_by_hand_then_equal():
    # Nothing is beyond the clamps.
    metrics = {name: metric.value() for name, metric in correct(RolloutCorrectionConfig()).metrics.items()}
    found = {name: value for name, value in metrics.items() if name.startswith("by_turn/")}
    for number in ("2_to_3", "4_to_15", "16+"):
        assert found.pop(f"by_turn/{number}/tokens") == 0
        assert all(
            math.isnan(found.pop(f"by_turn/{number}/{one}")) for one in ("k3_kl", "log_ratio_abs_mean")
        )
    clamped = [name for name in found if name.endswith("_clamped")]
    assert len(clamped) == 6 and all(
        found.pop(name) == found[name.removesuffix("_clamped")] for name in clamped
    )
    assert found == pytest.approx(
        {
            # D = 0.1, -0.2, 0.01
            "by_turn/first/tokens": 3,
            "by_turn/first/kl": 0.09 / 3,
            "by_turn/first/k3_kl": (0.0051709 + 0.0187308 + 0.00005017) / 3,
            "by_turn/first/log_ratio_abs_mean": 0.31 / 3,
            # D = 0.4
            "by_turn/later/tokens": 1,
            "by_turn/later/kl": -0.4,
            "by_turn/later/k3_kl": 0.0918247,
            "by_turn/later/log_ratio_abs_mean": 0.4,
        }
        | {
            "by_turn/1/tokens": 1,
            "by_turn/1/k3_kl": 0.0918247,
            "by_turn/1/log_ratio_abs_mean": 0.4,
        },
        rel=1e-5,
    )


def test_metrics_by_turn_number_when_turns_are_many_then_each_is_in_its_own():
    # Turns 0 to 20, of D = 0.1 times the turn's number
    turns = torch.arange(21)
    rollout = torch.full((21,), -3.0)
    metrics = compute_correction(
        rollout + 0.1 * turns,
        rollout,
        torch.ones(21),
        torch.zeros(21, dtype=torch.int64),
        num_sequences=1,
        config=RolloutCorrectionConfig(),
        turn_ids=turns,
    ).metrics
    for name, numbers in {
        "first": [0],
        "later": range(1, 21),
        "1": [1],
        "2_to_3": [2, 3],
        "4_to_15": range(4, 16),
        "16+": range(16, 21),
    }.items():
        assert metrics[f"by_turn/{name}/tokens"].value() == len(numbers)
        mean = 0.1 * sum(numbers) / len(numbers)
        assert metrics[f"by_turn/{name}/log_ratio_abs_mean"].value() == pytest.approx(mean, abs=1e-6)
        k3 = sum(math.expm1(0.1 * one) - 0.1 * one for one in numbers) / len(numbers)
        assert metrics[f"by_turn/{name}/k3_kl"].value() == pytest.approx(k3, abs=1e-6)


def test_metrics_by_turn_when_there_is_one_turn_only_then_the_other_is_no_number():
    for turn, empty in ((0, "later"), (3, "first")):
        metrics = correct(RolloutCorrectionConfig(), turn_ids=torch.full((7,), turn)).metrics
        assert metrics[f"by_turn/{empty}/tokens"].value() == 0
        assert math.isnan(metrics[f"by_turn/{empty}/kl"].value())
        assert math.isnan(metrics[f"by_turn/{empty}/k3_kl"].value())


def test_outlier_when_in_the_first_turn_then_the_later_ones_keep_their_digits():
    # D = 20 in turn 0, -0.001 in turn 1: e^-0.001 - 1 + 0.001 = 4.998e-7 beside 4.85e8.
    train, rollout = torch.tensor([-1.0, -1.001]), torch.tensor([-21.0, -1.0])
    metrics = compute_correction(
        train,
        rollout,
        torch.ones(2),
        torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
        config=RolloutCorrectionConfig(),
        turn_ids=torch.tensor([0, 1]),
    ).metrics
    d = (train - rollout)[1].item()
    assert metrics["by_turn/later/k3_kl"].value() == pytest.approx(math.expm1(d) - d, rel=1e-6)
    assert metrics["by_turn/first/k3_kl"].value() == pytest.approx(math.exp(20) - 21, rel=1e-9)


def test_turn_parts_when_turn_ids_or_their_bound_are_missing_then_refused():
    rule = RolloutCorrectionConfig(rollout_rs=(RejectionRule("turn_mean", "k3", upper=0.1),))
    weights = RolloutCorrectionConfig(rollout_is="turn", rollout_is_upper=2.0)
    for config, name in ((rule, "turn_mean_k3"), (weights, "`rollout_is` turn")):
        for missing in ({"turn_ids": None}, {"num_turns": None}):
            with pytest.raises(ValueError, match=f"{name} needs turn_ids and num_turns, above every"):
                correct(config, **missing)

"""The rule of --rollout-correction auto, by hand."""

import math

import pytest

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.core.auto_weights import AutoWeights


@pytest.mark.parametrize(
    ("before", "ess", "variance", "after"),
    [
        # A level is left at one bound, and taken again at another.
        ("sequence", 0.3, 9.0, "sequence"),
        ("sequence", 0.2999, 0.0, "token"),
        ("sequence", 0.2999, 1.0, "token"),
        ("sequence", 0.2999, 1.0001, "hold"),
        ("token", 0.4999, 1.0, "token"),
        ("token", 0.5, 1.0, "sequence"),
        ("token", 0.4999, 1.0001, "hold"),
        ("hold", 0.4999, 0.5, "token"),
        ("hold", 0.4999, 0.5001, "hold"),
        ("hold", 0.5, 9.0, "sequence"),
        # Nothing is known where all products are 0, or a ratio is not finite.
        ("sequence", math.nan, 0.1, "token"),
        ("sequence", math.nan, math.nan, "hold"),
        ("token", 0.1, math.inf, "hold"),
    ],
)
def test_after_when_a_batch_was_measured_then_the_level_of_the_next(before, ess, variance, after):
    assert AutoWeights(64, before).after(ess, variance).level == after


@pytest.mark.parametrize(("sequences", "cap"), [(1, 2.0), (64, 2.0), (256, 4.0), (1024, 8.0), (4096, 16.0)])
def test_cap_when_updates_are_larger_then_it_grows_with_the_root(sequences, cap):
    assert AutoWeights(sequences, "token").cap == AutoWeights(sequences, "sequence").cap == cap
    assert AutoWeights(sequences, "hold").cap == 2.0


def test_corrected_when_a_level_is_taken_then_only_the_weights_change():
    rule = RejectionRule("token", "k3", None, 0.3)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0, rollout_rs=(rule,))
    weights = AutoWeights(1024, "sequence")
    found = {level: AutoWeights(1024, level).corrected(config) for level in ("hold", "token", "sequence")}
    assert {level: (one.rollout_is, one.rollout_is_upper) for level, one in found.items()} == {
        "hold": ("sequence", 2.0),
        "token": ("token", 8.0),
        "sequence": ("sequence", 8.0),
    }
    assert all(one.rollout_rs == (rule,) and one.rollout_is_mode == "truncate" for one in found.values())
    assert weights.corrected(found["hold"]) == found["sequence"]


def test_numbers_when_logged_then_the_same_choices_follow_from_them():
    measured = [(0.9, 0.1), (0.4, 0.1), (0.1, 0.2), (0.01, 3.0), (0.4, 0.7), (0.4, 0.2), (0.6, 0.1)]
    weights, logged = AutoWeights(256), []
    for one in measured:
        logged.append(weights.numbers(*one))
        weights = weights.after(*one)
    assert [step["auto/level"] for step in logged] == [1, 2, 2, 1, 0, 0, 1]
    assert [step["auto/upper"] for step in logged] == [4, 4, 4, 4, 2, 2, 4]
    again = AutoWeights(256)
    for step in logged:
        assert again.numbers(0, 0)["auto/level"] == step["auto/level"]
        again = again.after(step["auto/ess"], step["auto/variance"])
    assert again == weights and again.level == "sequence"

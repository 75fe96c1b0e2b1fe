"""The calibration of bounds: its numbers by hand; all servings, which take minutes, are in the matrix."""

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.commands.correct.compare import KeptBatch
from megatron_rl_corr.config.correction import PRESETS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report():
    """The example's module."""
    sys.path.insert(0, str(ROOT / "examples/study"))
    try:
        return importlib.import_module("calibration_report")
    finally:
        sys.path.pop(0)


@pytest.fixture
def batch():
    """Two responses: D = log 4, 0 and, returned by a tool, 9; and D = -log 1.05, twice."""
    d = torch.tensor([math.log(4), 0.0, 9.0, -math.log(1.05), -math.log(1.05)])
    rollout = torch.full((5,), -10.0)
    sampled = torch.tensor([True, True, False, True, True])
    return KeptBatch(rollout + d, rollout, sampled, torch.tensor([0, 0, 0, 1, 1]), 2, None, None)


def test_numbers_of_a_serving_then_of_sampled_tokens_by_hand(report, batch):
    found = report.numbers_of(batch)
    small, large = math.log(1.05), math.log(4)
    assert (found["tokens"], found["responses"]) == (4, 2)
    assert found["mean |D|"] == pytest.approx((large + 2 * small) / 4, rel=1e-5)
    assert found["largest |D|"] == found["99 % of |D| are at most"] == pytest.approx(large, rel=1e-5)
    # Means of D: log 2 and -log 1.05; sums: log 4 and -2 log 1.05.
    assert found["99 % of their |mean of D| are at most"] == pytest.approx(large / 2, rel=1e-5)
    assert found["99 % of |sum of D| of a response are at most"] == pytest.approx(large, rel=1e-5)
    assert found["largest |sum of D| of a response"] == pytest.approx(large, rel=1e-5)
    assert found["largest mean |D| of a response"] == pytest.approx(large / 2, rel=1e-5)
    assert found["largest mean k3 of a response"] == pytest.approx((3 - large) / 2, rel=1e-5)
    assert found["longest responses"] == 2
    # k3 = rho - 1 - D of rho 4, 1, 1/1.05, 1/1.05.
    k3 = (3 - large + 2 * (1 / 1.05 - 1 + small)) / 4
    assert found["k3"] == pytest.approx(k3, rel=1e-4)
    # One token of four is outside of [0.5, 2], none of [0.5, 5]; geometric means: 2 and 0.952,
    # products: 4 and 0.907.
    kept = {name.split(",")[0]: value for name, value in found.items() if name in report.RULES}
    assert kept["token_ratio in [0.5"] == 1.0 and found["token_ratio in [0.5, 2]"] == 0.75
    assert found["seq_mean_ratio in [0.9, 1.1]"] == found["seq_sum_ratio in [0.5, 2]"] == 0.5
    assert found["seq_mean_ratio in [1/1.001, 1/0.999], decoupled_geo_rs"] == 0


def test_rules_that_ask_for_the_advantage_then_as_if_each_response_were_a_bad_one(report, batch):
    found = report.numbers_of(batch)
    # Means of -D: -log 2 and log 1.05, of which the second is above 1e-4. Means of |rho - 1|: 1.5 and 0.048,
    # both above 0.04: the tokens of D < 0, two of four, are dropped.
    assert (
        found["seq_mean_opsm up to 1e-4, slime_opsm"] == 0.5
        and found["seq_mean_vaco up to 0.04, vaco"] == 0.5
    )
    large, small = math.log(4), math.log(1.05)
    assert found["mean D^2, which m2po keeps up to 0.04"] == pytest.approx(
        (large**2 + 2 * small**2) / 4, rel=1e-5
    )
    # rho - 1 is 3, 0 and -1/21 twice; geometric means 2 and 1/1.05.
    assert found["chi2 of tokens"] == pytest.approx((16 + 1 + 2 / 1.05**2) / 4 - 1, rel=1e-5)
    assert found["chi2 of responses' geometric means"] == pytest.approx((4 + 1 / 1.05**2) / 2 - 1, rel=1e-5)
    # 1e-10 against 4e-10: hardly a difference of probabilities.
    assert found["token_abs_diff up to 0.15, dppo_tv around the servers' policy"] == 1.0
    assert found["token_ratio in [0.8, 1.2], bypass_ppo_clip's clip"] == 0.75


def test_every_bound_of_a_preset_then_in_the_calibration(report):
    listed = {(rule.name, rule.lower, rule.upper) for rule in report.RULES.values()}
    for name, config in PRESETS.items():
        for rule in config.rollout_rs:
            assert (rule.name, rule.lower, rule.upper) in listed, name


def test_rule_of_single_tokens_then_the_share_is_of_tokens_and_else_of_responses(report):
    # A response of three tokens far apart, and one of a token that agrees: a quarter of the tokens,
    # half the responses.
    d, ids = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1])
    rollout = torch.full((4,), -10.0)
    found = report.numbers_of(KeptBatch(rollout + d, rollout, torch.ones(4).bool(), ids, 2, None, None))
    assert found["token_ratio in [0.5, 2]"] == 0.25 and found["seq_sum_ratio in [0.5, 2]"] == 0.5
    assert found["longest responses"] == 1 and found[
        "99 % of their |mean of D| are at most"
    ] == pytest.approx(1.0)


def test_table_then_alerts_are_marked_and_bars_of_names_do_not_break_it(report, batch):
    found = report.numbers_of(batch)
    lines = report.table({"a": found, "b": found}).splitlines()
    assert lines[0] == "| | a | b |" and all(line.replace("\\|", "").count("|") == 4 for line in lines)
    assert any(line.startswith("| mean \\|D\\| | ") for line in lines)
    [k3] = [line for line in lines if line.startswith("| k3 ")]
    assert k3.count("!") == 2
    assert "| token_ratio in [0.5, 2] | 75.0 % | 75.0 % |" in lines


@pytest.mark.parametrize("share, expected", [(0.99, 4.0), (0.75, 3.0), (0.5, 2.0), (0.1, 1.0)])
def test_quantile_then_the_smallest_value_that_covers_the_share(report, share, expected):
    assert report.quantile(torch.tensor([3.0, 1.0, 4.0, 2.0]), share) == expected

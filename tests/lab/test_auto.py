"""Trainings whose weights are chosen, beside fixed ones, in the laboratory."""

from dataclasses import astuple

import pytest
import torch

from lab.auto import AUTO, AUTO_SETTINGS, Phase, table_of_auto, train_on_schedule
from lab.estimators import Samples, corrected
from lab.long import measured_mismatch
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.auto_weights import MeasuredMismatch

SETTING = AUTO_SETTINGS["baseline off by 2"]
SEEDS = range(3)


def trained(arm, *phases, setting=SETTING):
    return train_on_schedule(setting, arm, seeds=SEEDS, schedule=phases)


def test_train_when_nothing_was_measured_yet_then_token_weights_and_then_the_rules():
    phase = Phase("rounding", "rounding", 0.3, steps=1)
    auto, levels = trained(AUTO, phase)
    fixed, none = trained("token_truncate", phase, setting=AUTO_SETTINGS["mean of the group"])
    assert torch.allclose(auto.rewards, fixed.rewards, rtol=1e-6) and levels.tolist() == [[0, 0, 0]]
    assert none.tolist() == [[-1, -1, -1]]
    _, levels = trained(AUTO, Phase("clean", "rounding", 0.0, steps=3))
    assert levels.tolist() == [[0] * 3, [1] * 3, [1] * 3]


def test_train_when_a_server_is_stale_then_its_share_of_responses_is_of_older_weights():
    begin = Phase("clean", "rounding", 0.0, steps=30)
    runs, _ = trained("none", begin, Phase("stale", "rounding", 0.0, steps=2, stale=0.25))
    assert runs.gap[:30].abs().max() < 1e-12 and (runs.gap[30:] > 1e-5).all()


def test_measured_mismatch_then_the_packages_own_numbers():
    generator = torch.Generator().manual_seed(0)
    train, rollout = torch.randn((2, 40, 6), generator=generator, dtype=torch.float64) / 4 - 2
    later = torch.zeros(6, dtype=torch.bool)
    samples = Samples(train, rollout, torch.zeros(40), later, torch.zeros(40, 6))
    numbers = {}
    for name, metric in corrected(samples, RolloutCorrectionConfig()).metrics.items():
        numbers |= metric.numbers(f"rollout_corr/{name}", metric.values.tolist())
    found, package = measured_mismatch(train - rollout), MeasuredMismatch.of(numbers)
    assert astuple(found) == pytest.approx(astuple(package), rel=1e-6)


def test_table_when_auto_ends_lower_than_an_arm_then_it_is_counted():
    phase = Phase("clean", "rounding", 0.0, steps=3)
    found = {arm: trained(arm, phase) for arm in (AUTO, "none")}
    rows = [line for line in table_of_auto({"short": found}).splitlines() if line.startswith("| short | ")]
    assert rows[0].startswith("| short | auto | 0 of 3 | ") and rows[0].endswith("| 3 of 3 |")
    assert rows[1].startswith("| short | none | 0 of 3 | ")

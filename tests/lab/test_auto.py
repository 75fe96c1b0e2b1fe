"""Trainings whose weights are chosen, beside fixed ones, in the laboratory."""

import torch

from lab.auto import AUTO, AUTO_SETTINGS, Phase, measured, table_of_auto, train_on_schedule
from lab.estimators import Samples, corrected
from megatron_rl_corr.config.correction import RolloutCorrectionConfig

SETTING = AUTO_SETTINGS["baseline off by 2"]
SEEDS = range(3)


def trained(arm, *phases):
    return train_on_schedule(SETTING, arm, seeds=SEEDS, schedule=phases)


def test_train_when_nothing_was_measured_yet_then_token_weights_and_then_the_rules():
    phase = Phase("rounding", "rounding", 1.0, steps=1)
    auto, levels = trained(AUTO, phase)
    fixed, none = trained("token_truncate", phase)
    assert torch.equal(auto.rewards, fixed.rewards) and levels.tolist() == [[1, 1, 1]]
    assert none.tolist() == [[-1, -1, -1]]
    clean, tail = Phase("clean", "rounding", 0.0, steps=2), Phase("tail", "tail", 2.0, steps=3)
    runs, levels = trained(AUTO, clean, tail)
    assert levels[:3].tolist() == [[1] * 3, [2] * 3, [2] * 3]  # the third was chosen by a clean step
    assert (levels[3:] < 2).any()
    assert runs.rewards.shape == (6, 3)


def test_train_when_a_server_is_stale_then_its_share_of_responses_is_of_older_weights():
    begin = Phase("clean", "rounding", 0.0, steps=30)
    runs, _ = trained("none", begin, Phase("stale", "rounding", 0.0, steps=2, stale=0.25))
    assert runs.gap[:30].abs().max() < 1e-12 and (runs.gap[30:] > 1e-5).all()


def test_measured_then_the_packages_own_numbers():
    generator = torch.Generator().manual_seed(0)
    train, rollout = (
        torch.randn((2, 40, 6), generator=generator, dtype=torch.float64) / 4 - 2 for _ in range(2)
    )
    ess, variance = measured(train, rollout)
    for place in range(2):
        samples = Samples(
            train[place],
            rollout[place],
            torch.zeros(40),
            torch.zeros(6, dtype=torch.bool),
            torch.zeros(40, 6),
        )
        metrics = corrected(samples, RolloutCorrectionConfig()).metrics
        [found] = metrics["ess_sequences"].numbers("x", metrics["ess_sequences"].values.tolist()).values()
        [chi2] = metrics["chi2_token"].numbers("x", metrics["chi2_token"].values.tolist()).values()
        torch.testing.assert_close(torch.tensor([found, chi2]), torch.tensor([ess[place], variance[place]]))


def test_table_when_auto_ends_lower_than_an_arm_then_it_is_counted():
    phase = Phase("clean", "rounding", 0.0, steps=3)
    found = {arm: trained(arm, phase) for arm in (AUTO, "none")}
    rows = [line for line in table_of_auto({"short": found}).splitlines() if line.startswith("| short | ")]
    assert rows[0].startswith("| short | auto | 0 of 3 | ") and rows[0].endswith("| 3 of 3 |")
    assert rows[1].startswith("| short | none | 0 of 3 | ")

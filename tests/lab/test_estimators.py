"""The laboratory's arms are all the estimators that the package has."""

import dataclasses

import pytest
import torch

from lab.collapses import TRAINED
from lab.estimators import LEFT_OUT, RULE_BOUNDS, Samples, all_arms, choices, corrected, pull_of_tokens
from lab.map import DRAWN
from megatron_rl_corr.config.correction import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import LOSSES
from megatron_rl_corr.config.rules import RULE_NAMES

NAMES = {name for arm in all_arms().values() for name in arm.names}


def test_arms_when_listed_then_every_preset_rule_and_loss_is_one():
    wanted = {f"preset:{name}" for name in PRESETS} | {f"rule:{name}" for name in RULE_NAMES}
    assert (wanted | {f"bypass:{name}" for name in LOSSES}) - NAMES == set()
    assert set(RULE_BOUNDS) == set(RULE_NAMES)


def test_arms_when_listed_then_every_level_has_every_mode_that_it_takes():
    found = {(arm.config.rollout_is, arm.config.rollout_is_mode) for arm in all_arms().values()}
    for level in choices("rollout_is"):
        for mode in choices("rollout_is_mode"):
            assert ((level, mode) in found) == (mode != "gamma" or level == "sequence")


def test_settings_when_listed_then_each_is_varied_or_left_out_with_a_reason():
    varied = {
        field.name
        for field in dataclasses.fields(RolloutCorrectionConfig)
        if len({getattr(arm.config, field.name) for arm in all_arms().values()}) > 1
    }
    fields = {field.name for field in dataclasses.fields(RolloutCorrectionConfig)}
    assert fields - varied - set(LEFT_OUT) == set()
    assert set(LEFT_OUT) - fields == set()


def test_arms_when_drawn_or_trained_then_they_exist():
    assert set(DRAWN) | set(TRAINED) <= set(all_arms())
    assert not any(all_arms()[name].couples_samples for name in (*DRAWN, *TRAINED))


def samples(train, rollout):
    """Three responses of two tokens."""
    return Samples(
        torch.tensor(train, dtype=torch.float64).log(),
        torch.tensor(rollout, dtype=torch.float64).log(),
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
        torch.tensor([False, True]),
        torch.zeros(3, 2, dtype=torch.float64),
    )


def test_pull_when_weighed_then_weight_times_advantage():
    batch = samples([[0.6, 0.3], [0.2, 0.5], [0.5, 0.5]], [[0.2, 0.3], [0.4, 0.4], [0.5, 0.25]])
    # ratios 3 1, 0.5 1.25, 1 2; times 1, -2, 0.5
    pulls = pull_of_tokens(batch, all_arms()["token_truncate"].config)
    assert pulls.flatten().tolist() == pytest.approx([2, 1, -1, -2.5, 0.5, 1], rel=1e-6)
    pulls = pull_of_tokens(batch, all_arms()["sequence_unbounded"].config)  # products 3, 0.625, 2
    assert pulls.flatten().tolist() == pytest.approx([3, 3, -1.25, -1.25, 1, 1], rel=1e-6)
    pulls = pull_of_tokens(batch, all_arms()["turn_truncate"].config)  # a turn is one token here
    assert pulls.flatten().tolist() == pytest.approx([2, 1, -1, -2.5, 0.5, 1], rel=1e-6)


def test_pull_when_the_batch_is_filtered_then_0():
    batch = samples([[0.6, 0.3], [0.2, 0.5], [0.5, 0.5]], [[0.2, 0.3], [0.4, 0.4], [0.5, 0.25]])
    assert not pull_of_tokens(batch, all_arms()["batch_filter"].config).any()
    near = samples([[0.5, 0.3], [0.4, 0.5], [0.5, 0.5]], [[0.5, 0.3], [0.4, 0.5], [0.5, 0.5]])
    assert pull_of_tokens(near, all_arms()["batch_filter"].config).all()


def test_correction_when_a_rule_asks_for_routes_then_it_has_them():
    batch = dataclasses.replace(
        samples([[0.5, 0.5]] * 3, [[0.5, 0.5]] * 3), routing=torch.tensor([[0, 1], [0, 0], [1, 1.0]])
    )
    config = all_arms()["rule:token_routing"].config
    assert corrected(batch, config).mask.tolist() == [True, False, True, True, False, False]

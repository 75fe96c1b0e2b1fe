"""Longer responses: what is sampled there is what enumeration gives where both can be done."""

import math
from dataclasses import replace

import pytest
import torch

from lab.estimators import Arm
from lab.exact import true_gradient
from lab.long import (
    ZONES,
    LongCell,
    LongRow,
    arms_of,
    expected_share,
    long_cells,
    measured,
    policies,
    table_of_long,
)
from lab.map import case_of
from lab.policies import TASKS, World, expected_reward
from megatron_rl_corr.core.auto_weights import MeasuredMismatch

RESPONSES = 40_000


@pytest.mark.parametrize(("kind", "size"), [("rounding", 0.5), ("lag", 4)])
def test_measured_when_responses_can_be_listed_then_errors_are_those_of_enumeration(kind, size):
    cell, world = LongCell(kind, size, 4, seed=3), World(4, 4)
    row = measured(cell, responses=RESPONSES)
    theta, log_mu = policies(cell, torch.Generator().manual_seed(cell.seed))
    rewards = TASKS["dense"](world.responses, 4)
    assert expected_share(theta, 4).item() == pytest.approx(
        expected_reward(world, theta[None], rewards).item()
    )
    mu = log_mu[world.place_of_prefix, world.context_of_prefix]
    truth = true_gradient(world, theta[None], rewards)[0]
    case = case_of(
        world, world.scores(theta[None])[0], truth, world.log_conditionals(theta[None])[0], mu, rewards
    )
    assert row.mismatch.ess == pytest.approx(case.distance.ess, rel=0.05)
    mean = case.probabilities @ case.samples.advantages
    of_batch = replace(case, samples=replace(case.samples, advantages=case.samples.advantages - mean))
    for batch, errors in row.errors.items():
        for name, config in arms_of(batch).items():
            true = of_batch.measure(Arm((name,), config))
            # Standard errors of the sampled bias2, and some percent of the variance.
            scatter = true.variance / RESPONSES
            within = 4 * (2 * math.sqrt(true.bias2 * scatter) + scatter) + 0.08 * true.variance / batch
            assert errors[name] == pytest.approx(true.error(batch), abs=within, rel=0), (batch, name)
            assert within < true.error(batch), "too few responses to tell"


def test_chosen_when_mismatches_differ_then_what_the_rule_does():
    cell, found = (
        LongCell("rounding", 0.1, 16, 0),
        [(0.8, 1.0), (0.7, 1.0), (0.9, 0.4)],
    )
    chosen = [LongRow(cell, MeasuredMismatch(*one), {}).chosen(64) for one in found]
    assert chosen == ["sequence", "token", "token"]


def test_table_when_cells_fall_into_zones_then_geometric_means_over_the_least():
    errors = {"none": 4.0, "token": 2.0, "turn": 2.0, "sequence": 1.0, "no step": 1.0}
    rows = [
        LongRow(
            LongCell("rounding", 0.1, 16, seed),
            MeasuredMismatch(0.95),
            {64: errors, 1024: errors | {"none": least}},
        )
        for seed, least in enumerate((4.0, 16.0))
    ]
    lines = table_of_long(rows).splitlines()
    assert lines[4] == "| 64 | 0.9 to 1 | 2 | 1 | 4.00 | 2.00 | 2.00 | 1.00 | 1.00 | 1.00 | 1.00 |"
    assert lines[5].startswith("| 1024 | 0.9 to 1 | 2 | 1 | 8.00 |") and len(lines) == 6
    assert len(ZONES) == 7 and len(long_cells(["rounding"], seeds=1)) == 12

"""When a run has collapsed, by hand."""

import math

import pytest

from megatron_rl_corr.observability.collapse import step_of_collapse


def steps(*rewards):
    return [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("rewards", "collapse"),
    [
        ([0.5] * 60, None),
        # At step 30 + k the window holds k rewards of 0.1: its mean 0.8 - 0.07 k is below 0.4 from k = 6 on,
        # and the 20 steps from 36 to 55 are all below.
        ([0.8] * 30 + [0.1] * 40, 36),
        # The same, but the run ends with step 54, in the 19th of them.
        ([0.8] * 30 + [0.1] * 24, None),
        ([0.8] * 30 + [0.1] * 25, 36),
        # 15 bad steps: windows are below from k = 6, and after the last bad one until 4 good ones
        # are in; 13 in all.
        ([0.8] * 30 + [0.1] * 15 + [0.8] * 30, None),
        # Half of the best is no fall.
        ([0.8] * 30 + [0.4] * 40, None),
        # A fall below half of the best so far, not of the first: the best is 0.9, and 0.44 is below 0.45. The
        # window 0.9 - 0.046 k gets there with k = 10.
        ([0.5] * 20 + [0.9] * 20 + [0.44] * 30, 50),
        ([0.0] * 60, None),
        ([0.5] * 9, None),
        # Rewards below 0 have no share of a best.
        ([-1.0] * 60, None),
    ],
)
def test_collapse_when_the_reward_falls_then_the_step_by_hand(rewards, collapse):
    assert step_of_collapse(steps(*rewards)) == collapse


def test_collapse_when_a_number_is_not_finite_then_its_step_unless_the_reward_fell_before():
    run = steps(*[0.5] * 30)
    run[11]["grad_norm"] = math.inf
    assert step_of_collapse(run) == 12
    assert step_of_collapse(steps(*[0.5] * 30), ended_nonfinite=True) == 31
    fallen = steps(*[0.8] * 30, *[0.1] * 40)
    fallen[60]["loss/entropy"] = math.nan
    assert step_of_collapse(fallen) == 36
    fallen[40]["loss/entropy"] = math.nan  # before the fall had lasted for 20 steps
    assert step_of_collapse(fallen) == 41

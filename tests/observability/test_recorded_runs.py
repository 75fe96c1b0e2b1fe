"""Early warnings in recorded runs (runs/README.md): none in healthy ones, and how long
before a reward fell.
"""

from pathlib import Path

import pytest

from megatron_rl_corr.observability.collapse import step_of_collapse
from megatron_rl_corr.observability.early_warnings import HOLDS, find_warnings
from megatron_rl_corr.observability.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path(__file__).resolve().parent / "runs"
HEALTHY = ("quickstart", "soak", "bfloat16", "token_truncate_seed2")
FELL = ("fell_twice", "uncorrected_seed0", "uncorrected_seed3", "uncorrected_seed2", "token_truncate_seed4")
COLLAPSED_WARNED = {"token_truncate_seed4": 57, "uncorrected_seed2": 73}
"""Step of the collapse of runs that were warned of before."""
COLLAPSED_UNWARNED = {"sequence_mask_seed2": 90}
"""Step of the collapse of runs that nothing but the reward told of."""
REWARDS = ("reward_fell", "reward_falls")
"""Warnings that see the reward itself."""


def rows_of(name):
    return read_metrics(RUNS / f"{name}.jsonl")


def lead_time(name):
    """A row of the page's table: run, steps, first step below half, collapse, warnings by their
    lines' steps, lead.
    """
    rows = rows_of(name)
    warnings = find_warnings(rows)
    below = next((one.first_step for one in warnings if one.trend.name == "reward_fell"), None)
    told = [
        (one.trend.name, one.first_step + HOLDS - 1) for one in warnings if one.trend.name != "reward_fell"
    ]
    if below is not None:
        told = [(trend, step) for trend, step in told if step < below]
    early = [step for trend, step in told if trend not in REWARDS]
    lead = "" if below is None else f"{below - early[0]} steps" if early else "no warning before"
    cells = ", ".join(f"`{trend}` {step}" for trend, step in told) or "none"
    return (
        f"| {name} | {len(rows)} | {cells} | {below or 'never'} | {step_of_collapse(rows) or 'no'} | {lead} |"
    )


@pytest.mark.parametrize("name", HEALTHY)
def test_run_whose_reward_rose_then_no_warning(name):
    assert step_of_collapse(rows_of(name)) is None and find_warnings(rows_of(name)) == []


@pytest.mark.parametrize("name", FELL)
def test_run_whose_reward_fell_then_warnings_came_before_it(name):
    below = next(one.first_step for one in find_warnings(rows_of(name)) if one.trend.name == "reward_fell")
    early = [
        one.first_step + HOLDS - 1 for one in find_warnings(rows_of(name)) if one.trend.name not in REWARDS
    ]
    assert early and min(early) < below


@pytest.mark.parametrize(("name", "step"), COLLAPSED_WARNED.items())
def test_run_that_collapsed_then_the_step_is_told(name, step):
    assert step_of_collapse(rows_of(name)) == step and name in FELL


@pytest.mark.parametrize(("name", "step"), COLLAPSED_UNWARNED.items())
def test_run_that_collapsed_then_the_step_is_told_and_what_warned_was_the_reward_alone(name, step):
    assert step_of_collapse(rows_of(name)) == step
    told = [one for one in find_warnings(rows_of(name)) if one.first_step <= step]
    assert told and {one.trend.name for one in told} <= set(REWARDS)


def test_lead_times_on_the_page_then_those_of_the_runs():
    page = (ROOT / "docs/get_started/read_a_run.md").read_text()
    for path in sorted(RUNS.glob("*.jsonl")):
        assert lead_time(path.stem) in page, lead_time(path.stem)


def test_recorded_runs_then_small_and_each_with_its_command():
    readme = (RUNS / "README.md").read_text()
    for path in RUNS.glob("*.jsonl"):
        assert path.stat().st_size < 100_000 and f"`{path.stem}`" in readme

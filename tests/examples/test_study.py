"""The study: when a run has collapsed, its table by hand, its arms' flags, two steps of some arms."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.observability.metrics_file import MetricsFile
from tests.preloaded import preload_all, run_preloaded

ROOT = Path(__file__).resolve().parents[2]
FORKED = ROOT / "tests/examples/forked_quickstart.py"


@pytest.fixture(scope="module")
def study():
    """study(name): a module of the example."""
    folder = str(ROOT / "examples/study")
    sys.path.insert(0, folder)
    try:
        modules = {name: importlib.import_module(name) for name in ("arms", "collapse", "report")}
    finally:
        sys.path.remove(folder)
    return modules.__getitem__


def steps(*rewards):
    return [{"step": step, "reward/mean": reward, "time/step_s": 1.0} for step, reward in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("rewards", "collapse"),
    [
        ([0.5] * 60, None),
        # At step 30 + k the window holds k rewards of 0.1: its mean 0.8 - 0.07 k is below 0.4 from k = 6 on, and the
        # 20 steps from 36 to 55 are all below.
        ([0.8] * 30 + [0.1] * 40, 36),
        # The same, but the run ends with step 54, in the 19th of them.
        ([0.8] * 30 + [0.1] * 24, None),
        ([0.8] * 30 + [0.1] * 25, 36),
        # 15 bad steps: windows are below from k = 6, and after the last bad one until 4 good ones are in; 13 in all.
        ([0.8] * 30 + [0.1] * 15 + [0.8] * 30, None),
        # Half of the best is no fall.
        ([0.8] * 30 + [0.4] * 40, None),
        # A fall below half of the best so far, not of the first: the best is 0.9, and 0.44 is below 0.45. The window
        # 0.9 - 0.046 k gets there with k = 10.
        ([0.5] * 20 + [0.9] * 20 + [0.44] * 30, 50),
        ([0.0] * 60, None),
        ([0.5] * 9, None),
    ],
)  # fmt: skip
def test_collapse_when_the_reward_falls_then_the_step_by_hand(study, rewards, collapse):
    assert study("collapse").step_of_collapse(steps(*rewards)) == collapse


def test_collapse_when_a_number_is_not_finite_then_its_step_unless_the_reward_fell_before(study):
    of = study("collapse").step_of_collapse
    run = steps(*[0.5] * 30)
    run[11]["grad_norm"] = math.inf
    assert of(run) == 12
    assert of(steps(*[0.5] * 30), ended_nonfinite=True) == 31
    fallen = steps(*[0.8] * 30, *[0.1] * 40)
    fallen[60]["loss/entropy"] = math.nan
    assert of(fallen) == 36
    fallen[40]["loss/entropy"] = math.nan  # before the fall had lasted for 20 steps
    assert of(fallen) == 41


def test_report_then_last_rewards_collapses_and_seconds_by_hand(study, tmp_path):
    # Seed 0: ten steps of 0.8 are the last. Seed 1: 0.1, from the fall at step 36 on. The first step took 9 s.
    good, bad = steps(*[0.2] * 30, *[0.8] * 10), steps(*[0.8] * 30, *[0.1] * 30)
    good[0]["time/step_s"] = 9.0
    runs = {"none": {0: (good, False), 1: (bad, False)}, "twin": {0: (good, False), 1: (good[:20], True)}}
    for one in (good, bad):
        for step in one:
            step |= {"rollout_corr/k3_kl": 0.01, "grad_norm": 1.0, "loss/entropy": 2.0, "response_length/mean": 5.0}
    text = study("report").write_report(runs, {"lr": 0.01}, tmp_path)
    assert "| none | nothing | 0.450 (0.100 to 0.800) | seed 0: none, seed 1: 36 | 1.0 |" in text
    assert "| 0.500 (0.200 to 0.800) | seed 0: none, seed 1: 21 |" in text and "Settings: lr 0.01." in text
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["arms"]["none"]["steps"] == {"0": 40, "1": 60} and found["settings"] == {"lr": 0.01}
    assert (tmp_path / "study.md").read_text() == text and (tmp_path / "study.png").stat().st_size > 10_000


def test_band_over_seeds_then_mean_and_extremes_of_the_seeds_that_have_a_finite_number(study):
    first, second = steps(0.1, 0.2, 0.3), steps(0.3, math.nan)
    of = study("report").over_seeds({0: (first, False), 1: (second, False)}, "reward/mean")
    assert of[0] == [1, 2, 3] and of[1] == pytest.approx([0.2, 0.2, 0.3])
    assert of[2] == [0.1, 0.2, 0.3] and of[3] == [0.3, 0.2, 0.3]


def test_arms_then_the_launcher_takes_their_flags_and_each_corrects_as_it_says(study):
    required = ["--rollout-url", "http://a:1", "--rollout-prompts", "p", "--rollout-hf-checkpoint", "m",
                "--rollout-reward-function", "math", "--rollout-max-lag", "1"]  # fmt: skip
    found = {
        name: parse([*required, *map(str, arm.flags)]) for name, arm in study("arms").ARMS.items() if not arm.is_twin
    }
    weights = {name: (config.rollout_is, config.rollout_is_mode, config.rollout_is_lower, config.rollout_is_upper)
               for name, (config, _, *_) in found.items()}  # fmt: skip
    assert weights == {
        "none": (None, "truncate", None, None), "r3": (None, "truncate", None, None),
        "token_truncate": ("token", "truncate", None, 2.0), "token_mask": ("token", "mask", 0.5, 2.0),
        "sequence_truncate": ("sequence", "truncate", None, 2.0), "sequence_mask": ("sequence", "mask", 0.5, 2.0),
        "geo_rs_token_tis": ("token", "truncate", None, 2.0),
    }  # fmt: skip
    assert [name for name, (_, run, *_) in found.items() if run.router_replay == "R3"] == ["r3"]
    [rule] = found["geo_rs_token_tis"][0].rollout_rs
    assert (rule.name, rule.lower, rule.upper) == ("seq_mean_ratio", 0.9, 1.1)


def make_study(out, *options):
    return run_preloaded(
        [FORKED, "--study", "--out", out, "--seeds", "0", "--steps", "2", "--response-length", "8", *options],
        cwd=ROOT, timeout=280,
    )  # fmt: skip


def test_study_when_two_steps_an_arm_then_reported_and_finished_runs_are_kept_when_it_goes_on(tmp_path):
    preload_all()
    out = tmp_path / "study"
    done = make_study(out, "--arms", "none,twin")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "twin, seed 0 (1 of 2 runs are finished; about" in done.stdout
    table = (out / "study.md").read_text()
    assert table in done.stdout and table.count("seed 0: none") == 2 and (out / "study.png").exists()
    rows = [json.loads(line) for line in (out / "runs/none/seed0/metrics.jsonl").read_text().splitlines()]
    # The twin's float32 servers agree with the trainer; the other's weights are rounded to 8 bits.
    twin = [json.loads(line) for line in (out / "runs/twin/seed0/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in twin] == [1, 2]
    assert all(row["rollout/probe_k3"] > 1e-6 for row in rows) and all(row["rollout/probe_k3"] < 1e-9 for row in twin)
    assert all(row["rollout_corr/kept_fraction"] == 1 for row in rows)

    before = (out / "runs/none/seed0/metrics.jsonl").stat().st_mtime_ns
    torn = out / "runs/twin/seed0"  # as if it had been cut short
    (torn / "finished.json").unlink()
    MetricsFile(torn / "metrics.jsonl").write({"step": 3, "reward/mean": 0.0})
    again = make_study(out, "--arms", "none,twin")
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "starting SGLang in bfloat16" not in again.stdout and "starting SGLang in float32" in again.stdout
    assert (out / "runs/none/seed0/metrics.jsonl").stat().st_mtime_ns == before
    assert len((torn / "metrics.jsonl").read_text().splitlines()) == 2  # begun anew

    refused = make_study(out, "--lr", "0.1")
    assert refused.returncode == 2 and "lr 0.004 there, 0.1 now; name another folder" in refused.stdout

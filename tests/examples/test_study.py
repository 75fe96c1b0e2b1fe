"""The study: its table by hand, its arms' flags, two steps of some arms."""

import contextlib
import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.observability.metrics_file import MetricsFile
from tests.preloaded import preload_all, run_preloaded
from tests.tiers import long, matrix

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
FORKED = ROOT / "tests/examples/forked_quickstart.py"


@pytest.fixture(scope="module")
def study():
    """study(name): a module of the example."""
    folder = str(ROOT / "examples/study")
    sys.path.insert(0, folder)
    try:
        modules = {name: importlib.import_module(name) for name in ("arms", "report", "mismatch", "run")}
    finally:
        sys.path.remove(folder)
    return modules.__getitem__


def steps(*rewards):
    return [
        {"step": step, "reward/mean": reward, "time/step_s": 1.0} for step, reward in enumerate(rewards, 1)
    ]


def write_samples(folder, step, rollout, train):
    """A file of samples whose tokens had these probabilities."""
    columns = {"rollout_logprobs": rollout, "train_logprobs": train}
    logs = {name: [[math.log(value) for value in row] for row in rows] for name, rows in columns.items()}
    pq.write_table(pa.table(logs), folder / f"step_{step:06d}_replica0.parquet")


def test_report_then_last_rewards_falls_collapses_updates_and_ages_by_hand(study, tmp_path):
    # Seed 0: ten steps of 0.8 are the last. Seed 1: 0.1, from the fall at step 36 on.
    good, bad = steps(*[0.2] * 30, *[0.8] * 10), steps(*[0.8] * 30, *[0.1] * 30)
    runs = {"none": {0: (good, False), 1: (bad, False)}, "twin": {0: (good, False), 1: (good[:20], True)}}
    for one in (good, bad):
        for step in one:
            step |= {
                "rollout_corr/k3_kl": 0.01,
                "grad_norm": 1.0,
                "weight_lag_mean": 2.0,
                "loss/entropy": 2.0,
                "response_length/mean": 5.0,
            }
    for step in good[-2:]:  # all groups alike: no gradient
        del step["grad_norm"]
    write_samples(tmp_path, 1, [[0.5, 0.25], [0.5]], [[0.5, 0.5], [0.125]])
    settings = {"lr": 0.01, "response_length": 2}
    text = study("report").write_report(runs, settings, tmp_path, lambda arm, seed: tmp_path)
    # The mean of seed 1's last ten steps is an eighth of its best; seed 0 never falls.
    assert (
        "| none | nothing | 0.450 (0.100 to 0.800) | 0 %, 88 % | seed 0: none, seed 1: 36 | "
        "38 of 40, 60 of 60 | 2.0, 2.0 |"
    ) in text
    assert (
        "| 0.500 (0.200 to 0.800) | 0 %, 0 % | seed 0: none, seed 1: 21 | 38 of 40, 20 of 20 | 2.0, 2.0 |"
        in text
    )
    assert "the mean of a run's last 10 steps" in text and "of the mean of 10 steps, in percent" in text
    assert "Settings: lr 0.01, response length 2." in text
    found = json.loads((tmp_path / "study.json").read_text())
    assert found["arms"]["none"]["steps"] == {"0": 40, "1": 60} and found["settings"] == settings
    assert (tmp_path / "study.md").read_text() == text
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("study.png", "study_mismatch.png"))


def test_run_whose_first_gradient_was_not_finite_then_a_report_of_the_others(study, tmp_path):
    good = steps(*[0.5] * 12)
    for step in good:
        step |= {"grad_norm": 1.0, "rollout_corr/k3_kl": 0.01, "weight_lag_mean": 1.0}
    runs = {"none": {0: ([], True), 1: (good, False)}}
    write_samples(tmp_path, 1, [[0.5]], [[0.5]])
    empty = tmp_path / "empty"
    text = study("report").write_report(
        runs, {"response_length": 1}, tmp_path, lambda arm, seed: tmp_path if seed else empty
    )
    assert "seed 0: 1, seed 1: none | 0 of 0, 12 of 12 | none, 1.0 |" in text
    assert "| 0.500 (0.500 to 0.500), of 1 of 2 seeds |" in text

    def refused(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads((tmp_path / "study.json").read_text(), parse_constant=refused)["arms"]["none"]
    reward = found["last_reward"]
    assert reward == {"mean": 0.5, "lowest": 0.5, "highest": 0.5, "by_seed": {"0": None, "1": 0.5}}
    assert found["early_age"] == {"0": None, "1": 1.0}


def test_runs_whose_first_gradients_were_all_not_finite_then_a_report_with_its_pictures(study, tmp_path):
    runs, empty = {"none": {0: ([], True), 1: ([], True)}}, tmp_path / "empty"
    text = study("report").write_report(runs, {"response_length": 1}, tmp_path, lambda arm, seed: empty)
    assert "| none | nothing | none | 0 %, 0 % | seed 0: 1, seed 1: 1 | 0 of 0, 0 of 0 | none, none |" in text
    assert (tmp_path / "study.png").exists() and (tmp_path / "study_mismatch.png").exists()


def finished_run(folder, text='{"seconds": 1.0, "ended_nonfinite": false, "status": 0}'):
    """A folder of a finished run; text: of its finished.json."""
    folder.mkdir(parents=True)
    (folder / "finished.json").write_text(text)
    file = MetricsFile(folder / "metrics.jsonl")
    for step in steps(*[0.5] * 12):
        file.write(step | {"grad_norm": 1.0, "rollout_corr/k3_kl": 0.01, "weight_lag_mean": 1.0})


def test_report_when_a_finished_file_was_cut_short_or_a_folder_is_a_copy_then_of_the_others(study, tmp_path):
    run = study("run")
    finished_run(tmp_path / "runs/none/seed2")
    finished_run(tmp_path / "runs/none/seed3", '{"seconds": 1')
    finished_run(tmp_path / "runs/none/seed2.bak")
    assert run.report(run.parse_arguments(["--out", str(tmp_path)]), tmp_path) == 0
    assert json.loads((tmp_path / "study.json").read_text())["arms"]["none"]["steps"] == {"2": 12}
    assert run.finished(tmp_path, study("arms").ARMS["none"], 3) is None


def test_settings_when_missing_cut_short_or_others_beside_runs_then_one_line_and_else_kept(study, tmp_path):
    keep, path = study("run").keep_settings, tmp_path / "settings.json"
    assert "does not say with which settings (FileNotFoundError" in keep(tmp_path, {"lr": 0.1}, True)
    assert keep(tmp_path, {"lr": 0.1}, False) is None
    inode = path.stat().st_ino
    assert keep(tmp_path, {"lr": 0.1}, True) is None and path.stat().st_ino == inode
    assert "lr 0.1 there, 0.2 now" in keep(tmp_path, {"lr": 0.2}, True)
    for cut in ("", '{"lr": 0.', "[]", "{}"):
        path.write_text(cut)
        assert "does not say with which settings" in keep(tmp_path, {"lr": 0.1}, True)
    assert keep(tmp_path, {"lr": 0.2}, False) is None and json.loads(path.read_text()) == {"lr": 0.2}
    # Replaced in one move: a driver that is killed meanwhile leaves the old file.
    assert path.stat().st_ino != inode


def test_study_when_another_one_writes_there_then_refused_and_nothing_is_touched(study, tmp_path, capsys):
    run = study("run")
    finished_run(tmp_path / "runs/none/seed2", "")
    with run.EXAMPLE.alone_in(tmp_path) as alone:
        assert alone
        # As of another process, since it is another opening of the file.
        assert run.main(["--out", str(tmp_path), "--arms", "none", "--seeds", "2"]) == 2
        assert (tmp_path / "runs/none/seed2/metrics.jsonl").exists() and not (
            tmp_path / "settings.json"
        ).exists()
    assert f"another study writes to {tmp_path}" in capsys.readouterr().out
    with run.EXAMPLE.alone_in(tmp_path) as alone:
        assert alone


def test_share_that_carries_the_gradient_then_weights_times_what_rules_keep(study):
    carrying = study("report").carrying
    step = {"rollout_corr/weight_mean": 0.9, "rollout_corr/ess": 0.8, "rollout_corr/kept_fraction": 0.5}
    assert carrying(step) == pytest.approx(0.4)
    # Where a mask takes all weights there is no ESS.
    assert carrying({"rollout_corr/weight_mean": 0.0, "rollout_corr/kept_fraction": 1.0}) == 0.0
    assert carrying({"rollout_corr/kept_fraction": 1.0}) is None


def test_mean_by_place_and_probability_then_over_tokens_of_updates_by_hand(study, tmp_path):
    # |D| of the first place: 0 and log 4; of the second: log 2. Step 2 moved no weights.
    write_samples(tmp_path, 1, [[0.5, 0.25], [0.5]], [[0.5, 0.5], [0.125]])
    write_samples(tmp_path, 2, [[0.5, 0.5]], [[0.1, 0.1]])
    tokens = study("mismatch").read_tokens(tmp_path)
    assert tokens[0].tolist() == [1, 1, 1, 2, 2] and tokens[1].tolist() == [0, 1, 0, 0, 1]
    means = study("mismatch").mean_by_place([tokens], 2, [[1]])
    assert means == [pytest.approx(math.log(4) / 2), *[None] * 3, pytest.approx(math.log(2)), *[None] * 3]
    # 3 tokens of 0.2 in one step and 1 of 0.6 in another: 0.3.
    of = [
        {
            "rollout_corr/by_prob/above_1e-1/tokens": count,
            "rollout_corr/by_prob/above_1e-1/log_ratio_abs_mean": mean,
        }
        | moved
        for count, mean, moved in (
            (3.0, 0.2, {"grad_norm": 1.0}),
            (1.0, 0.6, {"grad_norm": 2.0}),
            (9.0, 5.0, {}),
        )
    ]
    assert study("mismatch").mean_by(study("mismatch").BY_PROBABILITY, {0: (of, False)}) == [
        *[None] * 4,
        pytest.approx(0.3),
    ]


def test_samples_of_several_turns_then_what_the_environment_said_is_left_out_and_turns_are_drawn(
    study, tmp_path
):
    write_samples(tmp_path, 1, [[0.5, math.nan, 0.25]], [[0.5, 0.9, 0.125]])
    tokens = study("mismatch").read_tokens(tmp_path)
    assert tokens[1].tolist() == [0, 2] and np.exp(tokens[3]).tolist() == pytest.approx([0.5, 0.125])
    # First turns: 2 tokens of 0.1 and 2 of 0.3; no step with a gradient has a later one.
    of = [
        {
            "step": step,
            "reward/mean": 0.5,
            "rollout_corr/by_turn/first/tokens": 2.0,
            "rollout_corr/by_turn/first/log_ratio_abs_mean": mean,
        }
        | moved
        for step, mean, moved in ((1, 0.1, {"grad_norm": 1.0}), (2, 0.3, {"grad_norm": 1.0}), (3, 9.0, {}))
    ]
    picture = tmp_path / "turns.png"
    found = study("mismatch").write_mismatch(
        {"none": {0: (of, False)}}, lambda arm, seed: tmp_path, 3, picture
    )
    assert found["none"]["by_turn"] == [pytest.approx(0.2), None] and picture.stat().st_size > 10_000


def test_band_over_seeds_then_mean_and_extremes_of_the_seeds_that_have_a_finite_number(study):
    first, second = steps(0.1, 0.2, 0.3), steps(0.3, math.nan)
    of = study("report").over_seeds({0: (first, False), 1: (second, False)}, "reward/mean")
    assert of[0] == [1, 2, 3] and of[1] == pytest.approx([0.2, 0.2, 0.3])
    assert of[2] == [0.1, 0.2, 0.3] and of[3] == [0.3, 0.2, 0.3]


def test_picture_then_a_panel_for_each_number_that_the_page_promises(study, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: drawn.append(figure))
    runs = {"none": {0: (steps(0.1, 0.2), False)}}
    for number, step in enumerate(runs["none"][0][0], 1):
        step |= {"rollout_corr/ess_sequences": 0.25 * number, "rollout_corr/k3_kl": 0.5, "grad_norm": 2.0}
    study("report").draw(runs, tmp_path / "study.png")
    lines = {axes.get_title(): axes.lines[0].get_ydata() for axes in drawn[0].axes if axes.lines}
    assert list(lines) == list(study("report").PANELS.values())
    assert list(lines["ESS over responses"]) == [0.25, 0.5] and list(lines["Mean reward"]) == [0.1, 0.2]


def test_arms_then_the_launcher_takes_their_flags_and_each_corrects_as_it_says(study):
    required = [
        "--rollout-url",
        "http://a:1",
        "--rollout-prompts",
        "p",
        "--rollout-hf-checkpoint",
        "m",
        "--rollout-reward-function",
        "math",
        "--rollout-max-lag",
        "1",
    ]
    found = {
        name: parse([*required, *map(str, arm.flags)])
        for name, arm in study("arms").ARMS.items()
        if not arm.is_twin
    }
    weights = {
        name: (config.rollout_is, config.rollout_is_mode, config.rollout_is_lower, config.rollout_is_upper)
        for name, (config, _, *_) in found.items()
    }
    assert weights == {
        "none": (None, "truncate", None, None),
        "centering": (None, "truncate", None, None),
        "auto": ("token", "truncate", None, 2.0),
        "r3": (None, "truncate", None, None),
        "token_truncate": ("token", "truncate", None, 2.0),
        "token_mask": ("token", "mask", 0.5, 2.0),
        "sequence_truncate": ("sequence", "truncate", None, 2.0),
        "sequence_mask": ("sequence", "mask", 0.5, 2.0),
        "geo_rs_token_tis": ("token", "truncate", None, 2.0),
    }
    assert [name for name, (_, run, *_) in found.items() if run.router_replay == "R3"] == ["r3"]
    assert [name for name, (_, run, *_) in found.items() if run.score_centering == 16] == ["centering"]
    [rule] = found["geo_rs_token_tis"][0].rollout_rs
    assert (rule.name, rule.lower, rule.upper) == ("seq_mean_ratio", 0.9, 1.1)


@pytest.mark.parametrize(("server_ends", "ran"), [(False, ["none", "r3", "twin"]), (True, ["none", "r3"])])
def test_run_that_fails_then_the_others_run_unless_the_server_has_ended(study, monkeypatch, server_ends, ran):
    """Stand-ins for the server and the runs: which of them run is all that this is about."""
    run, seen = study("run"), []
    server = SimpleNamespace(is_running=lambda: not server_ends, log_path="server.log")

    def run_one(out, arm, *others):
        seen.append(arm.name)
        return int(arm.name == "r3")

    monkeypatch.setattr(run, "study_server", lambda *others: contextlib.nullcontext(server))
    monkeypatch.setattr(run, "run_one", run_one)
    monkeypatch.setattr(run, "finished", lambda *others: None)
    todo = [(study("arms").ARMS[name], 2) for name in ("none", "r3", "twin")]
    failed = run.run_against("bfloat16", todo, todo, SimpleNamespace(seeds=(2,)), Path("unused"), set())
    assert seen == ran and failed == todo[1 : 3 if server_ends else 2]


def make_study(out, *options):
    return run_preloaded(
        [FORKED, "--study", "--out", out, "--seeds", "0", "--steps", "2", "--response-length", "8", *options],
        cwd=ROOT,
        timeout=280,
    )


@long
def test_study_when_two_steps_an_arm_then_reported_and_finished_runs_are_kept_when_it_goes_on(tmp_path):
    preload_all()
    out = tmp_path / "study"
    done = make_study(out, "--arms", "none,twin")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "twin, seed 0 (1 of 2 runs are finished; about" in done.stdout
    table = (out / "study.md").read_text()
    assert table in done.stdout and table.count("seed 0: none") == 2 and (out / "study.png").exists()
    rows = [json.loads(line) for line in (out / "runs/none/seed0/metrics.jsonl").read_text().splitlines()]
    # The twin's float32 servers agree with the trainer; the other's weights are rounded to 4 bits.
    twin = [json.loads(line) for line in (out / "runs/twin/seed0/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in twin] == [1, 2]
    assert all(row["rollout/probe_k3"] > 1e-6 for row in rows) and all(
        row["rollout/probe_k3"] < 1e-9 for row in twin
    )
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
    assert refused.returncode == 2 and "lr 0.008 there, 0.1 now; name another folder" in refused.stdout

"""Whose files a start removes, and whose it keeps aside."""

import json
import types

import pytest

from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore import abandoned_steps
from tests.faults.drills import drill

LEADER = types.SimpleNamespace(is_job_reporter=True, is_data_leader=True)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(iteration): what a run does with its folders; a process of its own unless `same_process`."""
    monkeypatch.setattr(abandoned_steps.dist, "broadcast_object_list", lambda values, src: None)
    monkeypatch.setattr(abandoned_steps, "all_reduce_failure", lambda error: raise_if(error))
    monkeypatch.setattr(abandoned_steps, "_BEGUN", set())
    options = types.SimpleNamespace(
        log_dir=tmp_path / "log", save_trajectories=tmp_path / "samples", trace=tmp_path / "trace"
    )

    def start(iteration, *, torchrun_restarts=0, same_process=False, one_folder=None):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(torchrun_restarts))
        if not same_process:
            abandoned_steps._BEGUN.clear()
        named = dict.fromkeys(vars(options), one_folder) if one_folder else vars(options)
        abandoned_steps.clear_abandoned_folders(types.SimpleNamespace(**named), LEADER, iteration)

    return start


def raise_if(error):
    if error is not None:
        raise error


def write_steps(root, steps, run):
    for folder in ("log", "samples", "trace"):
        (root / folder).mkdir(exist_ok=True)
    with (root / "log/metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "run": run}) + "\n" for step in steps)
    (root / "log/run.json").write_text(run)
    for step in steps:
        (root / f"samples/step_{step:06d}_replica0.parquet").write_text(run)
        (root / f"trace/step_{step:06d}_replica0.json").write_text(run)


def rows(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@drill(
    "a run begins at step 0 in the folders of another one, and torchrun restarts it before its first "
    "checkpoint",
    promised="the other's rows and samples are kept, aside; each step is there once",
)
def test_start_when_a_folder_holds_another_run_then_that_is_kept_aside_after_a_restart_too(
    start, tmp_path, seen
):
    write_steps(tmp_path, range(1, 31), "old")
    before = EVENTS.counts["files_moved"]
    start(0)
    (aside,) = (tmp_path / "log").glob("earlier-*")
    assert rows(aside / "metrics.jsonl") == list(range(1, 31)) and (aside / "run.json").read_text() == "old"
    assert rows(tmp_path / "log/metrics.jsonl") == [] and EVENTS.counts["files_moved"] == before + 3
    write_steps(tmp_path, range(1, 4), "new")
    start(0, torchrun_restarts=1)
    assert rows(tmp_path / "log/metrics.jsonl") == []
    # those of the attempt before lie apart
    for kept in ("samples/earlier-*/step_*", "trace/earlier-*/step_*"):
        assert sorted(path.read_text() for path in tmp_path.glob(kept)) == ["new"] * 3 + ["old"] * 30
    assert (aside / "run.json").read_text() == "old"
    assert not list(tmp_path.glob("samples/step_*")) and not list(tmp_path.glob("trace/step_*"))
    seen("30 steps of the other run in one earlier-TIME, 3 of the attempt before in another")


def test_start_when_one_folder_is_named_for_all_then_another_run_s_rows_samples_and_traces_are_kept(
    start, tmp_path
):
    write_steps(tmp_path, range(1, 31), "old")
    for path in tmp_path.glob("*/*"):
        path.rename(tmp_path / path.name)
    start(0, one_folder=tmp_path)
    (aside,) = tmp_path.glob("earlier-*")
    assert len(rows(aside / "metrics.jsonl")) == 30
    assert len(list(aside.glob("*.parquet"))) == 30 and len(list(aside.glob("step_*.json"))) == 30
    assert not list(tmp_path.glob("step_*"))


def test_start_when_an_attempt_has_died_before_it_began_then_a_restart_keeps_another_run_all_the_same(
    start, tmp_path
):
    write_steps(tmp_path, range(1, 31), "old")
    start(0, torchrun_restarts=1)
    assert rows(tmp_path / "log/metrics.jsonl") == []
    assert rows(next(tmp_path.glob("log/earlier-*")) / "metrics.jsonl") == list(range(1, 31))
    assert len(list(tmp_path.glob("samples/earlier-*/step_*"))) == 30


def test_start_when_the_process_begins_again_then_what_is_there_is_its_own(start, tmp_path):
    start(0)
    write_steps(tmp_path, range(1, 4), "attempt 1")
    start(0, same_process=True)
    assert rows(tmp_path / "log/metrics.jsonl") == [] and not list(tmp_path.glob("*/earlier-*"))


def test_start_when_a_supervisor_begins_anew_then_each_step_is_there_once(start, tmp_path):
    for attempt in (1, 2):
        start(0)
        write_steps(tmp_path, range(1, 4), f"attempt {attempt}")
    assert rows(tmp_path / "log/metrics.jsonl") == [1, 2, 3]
    assert {path.read_text() for path in tmp_path.glob("samples/step_*")} == {"attempt 2"}


def test_start_when_a_checkpoint_goes_on_then_later_steps_are_removed(start, tmp_path):
    write_steps(tmp_path, range(1, 7), "a")
    start(4)
    assert rows(tmp_path / "log/metrics.jsonl") == [1, 2, 3, 4]
    assert len(list(tmp_path.glob("samples/step_*"))) == 4 and not list(tmp_path.glob("*/earlier-*"))

"""What an earlier attempt has written of steps that are done anew is removed, and nothing else."""

import json
import os

import pytest

from megatron_rl_corr.files import atomic_writer
from megatron_rl_corr.rollout.abandoned import drop_files, drop_rows, move_files
from megatron_rl_corr.rollout.sample_folder import NAME
from tests.faults.drills import drill


def rows(*steps, **more):
    return "".join(json.dumps({"step": step} | more) + "\n" for step in steps)


@pytest.mark.parametrize(
    "text, left, dropped",
    [
        (rows(1, 2, 3, 4, 5, 6), rows(1, 2, 3, 4), 2),
        (rows(1, 2, 3, 4), rows(1, 2, 3, 4), 0),
        (rows(1, 2), rows(1, 2), 0),
        (rows(5, 6), "", 2),
        # Of a version that only appended: the later row of a step wins.
        (rows(1, 2, 3, 4, 5, a=1) + rows(3, 4, 5, a=2), rows(1, 2, a=1) + rows(3, 4, a=2), 4),
        (rows(1, 2) + '{"step": 3, "lo', rows(1, 2), 1),
        (rows(1, 2) + rows(3)[:-1], rows(1, 2) + rows(3)[:-1], 0),
        ("# mine\n" + rows(4, 5), "# mine\n" + rows(4), 1),
        (rows(4) + "# mine\n" + rows(5), rows(4) + "# mine\n", 1),
        (rows(4, 41, 40), rows(4), 2),
    ],
    ids=["later", "none", "fewer", "all", "again", "torn", "whole", "own line", "own line between", "digits"],
)
def test_rows_when_a_run_goes_on_behind_step_4_then_those_of_later_steps_are_cut(
    text, left, dropped, tmp_path
):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    path.chmod(0o640)
    before = path.stat()
    assert drop_rows(path, 4) == dropped
    assert path.read_text() == left and path.stat().st_mode == before.st_mode
    assert (path.stat().st_ino == before.st_ino) == (dropped == 0) and os.listdir(tmp_path) == [path.name]


def test_rows_when_the_file_is_a_link_or_is_not_there_then_nothing_is_touched(tmp_path, caplog):
    other = tmp_path / "other"
    other.write_text(rows(1, 2, 3))
    (tmp_path / "metrics.jsonl").symlink_to(other)
    assert drop_rows(tmp_path / "metrics.jsonl", 1) == 0 and other.read_text() == rows(1, 2, 3)
    assert "metrics.jsonl is no plain file" in caplog.text
    assert drop_rows(tmp_path / "gone.jsonl", 1) == 0 and not (tmp_path / "gone.jsonl").exists()


@drill(
    "a run goes on behind step 8 of an earlier one", promised="its later sample files go, nothing else does"
)
def test_files_when_a_run_goes_on_behind_step_8_then_only_files_of_later_steps_and_torn_ones_are_removed(
    tmp_path,
):
    own = ["step_000008_replica0.parquet", "step_000001_replica12.parquet"]
    later = ["step_000009_replica0.parquet", "step_000010_replica3.parquet", "step_1000000_replica0.parquet"]
    others = [
        "step_000009_replica0.parquet.bak",
        "my_step_000009_replica0.parquet",
        "step_000009_replica0.json",
        "notes",
        ".step_000009_replica0.parquet",
        ".mine.abcd0123.tmp",
    ]
    for name in (*own, *later, *others):
        (tmp_path / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/step_000009_replica0.parquet").write_text("kept")
    (tmp_path / "step_000011_replica0.parquet").symlink_to(tmp_path / "notes")
    (tmp_path / "step_000012_replica0.parquet").mkdir()
    with pytest.raises(FileNotFoundError), atomic_writer(tmp_path / "step_000007_replica0.parquet"):
        [torn] = [name for name in os.listdir(tmp_path) if name.startswith(".step_000007")]
        assert set(drop_files(tmp_path, NAME, 8)) == {*later, torn}  # as if the process had been killed here
    kept = {*own, *others, "elsewhere", "step_000011_replica0.parquet", "step_000012_replica0.parquet"}
    assert set(os.listdir(tmp_path)) == kept and (tmp_path / "notes").read_text() == "notes"
    assert drop_files(tmp_path / "gone", NAME, 8) == []


@drill("a run begins in a folder of another one", promised="the other's files are kept, aside")
def test_files_when_another_run_has_left_them_then_they_are_moved_whole_and_nothing_else_is(tmp_path):
    own = ["step_000001_replica0.parquet", "step_000002_replica1.parquet"]
    for name in (*own, "notes", "step_000001_replica0.json"):
        (tmp_path / name).write_text(name)
    (tmp_path / "step_000003_replica0.parquet").symlink_to(tmp_path / "notes")
    aside = tmp_path / "earlier-1"
    assert move_files(tmp_path, NAME, aside) == own
    assert {path.name: path.read_text() for path in aside.iterdir()} == {name: name for name in own}
    assert set(os.listdir(tmp_path)) == {
        "earlier-1",
        "notes",
        "step_000001_replica0.json",
        "step_000003_replica0.parquet",
    }
    assert move_files(tmp_path, NAME, aside) == []
    assert move_files(tmp_path / "gone", NAME, aside) == []

"""The record of a test run: what is written, and the table of several runs."""

import json

from tests.record import Record, mean_seconds, table

pytest_plugins = ["pytester"]


def test_record_when_a_run_ends_then_its_outcomes_and_the_seconds_of_each_file(pytester):
    pytester.makepyfile(
        test_a="import pytest, time\ndef test_slow(): time.sleep(0.2)\ndef test_bad(): assert 0\n"
        "@pytest.fixture\ndef ends_badly():\n    yield\n    assert 0\n"
        "def test_teardown(ends_badly): pass\ndef test_left_out(): pytest.skip('no')",
        test_b="def test_quick(): pass",
        test_c="import what_is_not_there",
    )
    folder = pytester.path / "new" / "runs"
    pytester.inline_run("--continue-on-collection-errors", plugins=[Record(folder)])
    [path] = folder.glob("*.json")
    run = json.loads(path.read_text())
    # The test whose teardown fails has passed its call, and is among both.
    assert (run["passed"], run["skipped"]) == (3, 1)
    assert run["failed"] == ["test_c.py", "test_a.py::test_bad", "test_a.py::test_teardown"]
    assert set(run["files"]) == {"test_a.py", "test_b.py"} and run["files"]["test_a.py"] >= 0.2
    assert run["wall_s"] >= 0.2


def test_table_when_several_runs_then_by_date_and_the_slowest_files_by_their_mean():
    first = {
        "date": "2026-01-01 10:00:00",
        "wall_s": 90.0,
        "passed": 5,
        "failed": [],
        "skipped": 1,
        "files": {"a.py": 3.0, "b.py": 1.0},
    }
    second = first | {
        "date": "2026-01-02 10:00:00",
        "failed": ["a.py::x[1|2]", "b.py::y"],
        "files": {"b.py": 9.0},
    }
    assert list(mean_seconds([first, second]).items()) == [("b.py", 5.0), ("a.py", 1.5)]
    lines = table([second, first]).splitlines()
    assert lines[2] == "| 1 | 2026-01-01 10:00:00 | 5 | 0 | 1 | 1.5 min | - |"
    assert lines[3] == "| 2 | 2026-01-02 10:00:00 | 5 | 2 | 1 | 1.5 min | a.py::x[1\\|2]<br>b.py::y |"
    assert lines[-2:] == ["| b.py | 5.0 |", "| a.py | 1.5 |"]

"""The order of the tests, and what the workers share out."""

import json
from pathlib import Path

from tests import schedule

TESTS = Path(schedule.__file__).parent


def test_durations_when_files_are_named_then_they_exist():
    known = json.loads(schedule.DURATIONS.read_text())
    named = [*known, f"tests/{schedule.BY_PARAMETER}", f"tests/{schedule.BY_TEST}"]
    assert [name for name in named if not (TESTS.parent / name).is_file()] == []


def test_unit_then_a_file_but_each_test_of_the_quickstart_and_each_tree():
    assert schedule.unit_of("tests/core/test_turns.py::test_a[1::2]") == "core/test_turns.py"
    assert (
        schedule.unit_of("tests/examples/test_quickstart.py::test_a")
        == "tests/examples/test_quickstart.py::test_a"
    )
    trees = [
        f"tests/matrix/test_patched_tree.py::{test}[{tree}]" for tree in ("0.17.1", "0.19.2") for test in "ab"
    ]
    units = [schedule.unit_of(tree) for tree in trees]
    assert units[0] == units[1] != units[2] == units[3]


def test_order_when_seconds_are_known_then_the_longest_files_first_and_their_tests_as_they_were():
    nodeids = ["t/new.py::a", "t/quick.py::a", "t/long.py::b", "t/long.py::a", "t/quick.py::b"]
    order = schedule.longest_first(nodeids, {"t/quick.py": 3, "t/long.py": 200, "t/gone.py": 9})
    assert [nodeids[place] for place in order] == [
        "t/long.py::b",
        "t/long.py::a",
        "t/quick.py::a",
        "t/quick.py::b",
        "t/new.py::a",
    ]

"""The order of the tests, and what the workers share out."""

from pathlib import Path

from tests import schedule

TESTS = Path(schedule.__file__).parent


def test_units_when_files_are_named_then_they_exist():
    assert [
        name for name in (*schedule.LONGEST_FIRST, schedule.BY_PARAMETER) if not (TESTS / name).exists()
    ] == []


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


def test_place_when_long_then_before_the_others_and_quick_ones_last():
    long, quick = "tests/mcore/test_gradients.py::test_a", "tests/config/test_presets.py::test_a"
    quickstart, mcore = "tests/examples/test_quickstart.py::test_a", "tests/mcore/test_hooks.py::test_a"
    assert sorted([quick, mcore, long, quickstart], key=schedule.place_of) == [quickstart, long, mcore, quick]

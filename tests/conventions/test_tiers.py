"""The table of what make test leaves to make test-matrix names tests that there are."""

import re
from pathlib import Path

import pytest

from tests.tiers import LEFT, is_left

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", LEFT)
def test_pattern_of_a_file_then_it_names_a_test_there(path):
    names = re.findall(
        r"^(?:async )?def (test_\w+)", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE
    )
    for pattern in LEFT[path]:
        begins = pattern.partition("[[]")[0].replace("*", ".*")
        assert any(re.fullmatch(begins, name) for name in names), pattern


def test_tests_of_a_file_that_is_left_then_by_name_and_parameter():
    path = "tests/mcore/test_gradients.py::test_corrected_step_of_moe_in_every_layout_then_equal"
    assert is_left(f"{path}[2]") and not is_left(f"{path}[4]") and not is_left(f"{path}[12]")
    assert is_left("tests/reduce/test_collectives_benchmark.py::test_x") and not is_left(
        "tests/test_x.py::test_y"
    )

"""In what order tests run, and which of them the workers share out: so that all end together.

A worker takes whole units. A unit is a file; but each test of the quickstart is one, since it starts all
it needs, and of the trees of several releases each tree.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.tiers import mark_left

BY_TEST = "examples/test_quickstart.py"
BY_PARAMETER = "matrix/test_patched_tree.py"
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that the tests of each file took, without those of files that take a moment; `make test-durations`
writes it from the records of whole runs.
"""


def unit_of(nodeid: str) -> str:
    """The unit of a test, from its id in pytest's form, as in "tests/core/test_turns.py::test_x[1]"."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    if path == BY_TEST:
        return nodeid
    return f"{path}[{nodeid.partition('[')[2]}" if path == BY_PARAMETER else path


def longest_first(nodeids: Sequence[str], seconds: Mapping[str, float]) -> list[int]:
    """The places of the tests in the order in which they run: files by their seconds, those that are not
    known last; the tests of a file keep their order.
    """
    return sorted(range(len(nodeids)), key=lambda place: -seconds.get(nodeids[place].partition("::")[0], 0.0))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith("matrix/"):
            item.add_marker("matrix")
    mark_left(items)
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items[:] = [items[place] for place in longest_first([item.nodeid for item in items], seconds)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnits(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

        def _reschedule(self, node):
            # A worker needs one test more than it runs; by the scheduler's own rule it may hold
            # three long units.
            while not node.shutting_down and (
                not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1
            ):
                super()._reschedule(node)

    config.option.loadscopereorder = False  # it would sort by the number of tests
    return LoadUnits(config, log)

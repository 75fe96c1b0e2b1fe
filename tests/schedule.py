"""In what order tests run, and which of them the workers share out: so that all end together.

A worker takes whole units. A unit is a file; but each test of the quickstart is one, since it starts all
it needs, and of the trees of several releases each tree.
"""

import pytest

BY_TEST = "examples/test_quickstart.py"
BY_PARAMETER = "matrix/test_patched_tree.py"
LONGEST_FIRST = (
    BY_TEST,
    "mcore/test_gradients.py",
    "doctor/test_real_server.py",
    "matrix",
    "mcore/test_rejection.py",
    "mcore/test_hf_models.py",
    "docs/test_own_fork.py",
    "examples",
    "mcore/test_failing_ranks.py",
    "rollout/test_silence_real_servers.py",
    "rollout/test_in_flight_real_servers.py",
    "mcore",
    "tools",
    "reduce",
    "core",
    "rollout",
)
"""Files and folders; what is not named comes last."""


def unit_of(nodeid: str) -> str:
    """The unit of a test, from its id in pytest's form, as in "tests/core/test_turns.py::test_x[1]"."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    if path == BY_TEST:
        return nodeid
    return f"{path}[{nodeid.partition('[')[2]}" if path == BY_PARAMETER else path


def place_of(nodeid: str) -> int:
    """The place of a test's unit in LONGEST_FIRST."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    for place, name in enumerate(LONGEST_FIRST):
        if path == name or path.startswith(f"{name}/"):
            return place
    return len(LONGEST_FIRST)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith("matrix/"):
            item.add_marker("matrix")
    items.sort(key=lambda item: place_of(item.nodeid))  # stable: the tests of a file keep their order


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

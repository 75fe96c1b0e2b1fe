"""In what order tests run, and which of them the workers share out: so that all end together and start few servers.

A worker takes whole units. A unit is a file; but files that use the session's SGLang servers are of two units, so that
two workers at most start them, and each test of the quickstart is a unit, since it starts all it needs.
"""

import pytest

BY_TEST = "examples/test_quickstart.py"
SERVERS = {
    # Trainers that are started beside the one server which most tests ask.
    "TRAINERS": (
        "docs/test_own_fork.py", "matrix/test_launcher_step.py", "matrix/test_patched_tree.py",
        "mcore/test_failing_ranks.py", "rollout/test_client_real_server.py", "rollout/test_episodes_real_server.py",
        "rollout/test_failed_samples_real_server.py", "tools/test_local_server.py",
    ),
    # Servers that are examined, paused, updated or killed, and beside the first a second and a third one.
    "SERVERS": (
        "doctor/test_real_server.py", "engines/test_discovery_real_servers.py",
        "engines/test_weight_update_real_server.py", "rollout/test_failover_real_servers.py",
        "rollout/test_in_flight_real_servers.py", "rollout/test_reuse_real_servers.py",
        "rollout/test_seeds_real_server.py", "rollout/test_silence_real_servers.py",
        "weight_sync/test_push_real_servers.py",
    ),
}  # fmt: skip
LONGEST_FIRST = (
    "SERVERS", "TRAINERS", BY_TEST, "mcore/test_gradients.py", "examples", "mcore/test_rejection.py",
    "mcore/test_hf_models.py", "mcore/test_router_replay.py", "mcore", "matrix", "parallel", "core", "tools",
)  # fmt: skip
"""Files, folders, and the units of the session's servers; files that are not named come last."""


def unit_of(nodeid: str) -> str:
    """The unit of a test, from its id in pytest's form, as in "tests/core/test_turns.py::test_x[1]"."""
    path = nodeid.partition("::")[0].removeprefix("tests/")
    if path == BY_TEST:
        return nodeid
    return next((unit for unit, files in SERVERS.items() if path in files), path)


def place_of(nodeid: str) -> int:
    """The place of a test's unit in LONGEST_FIRST."""
    path = unit_of(nodeid).partition("::")[0].removeprefix("tests/")
    for place, name in enumerate(LONGEST_FIRST):
        if path == name or path.startswith(f"{name}/"):
            return place
    return len(LONGEST_FIRST)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: place_of(item.nodeid))  # stable: the tests of a file keep their order


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnits(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

        def _reschedule(self, node):
            # A worker needs one test more than it runs; by the scheduler's own rule it may hold three long units.
            while not node.shutting_down and (not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1):
                super()._reschedule(node)

    config.option.loadscopereorder = False  # it would sort by the number of tests
    return LoadUnits(config, log)

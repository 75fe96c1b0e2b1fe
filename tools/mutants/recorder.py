"""Plugins of pytest: one notes which lines of the package each test runs, the other runs some tests only."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

MONITOR = sys.monitoring.COVERAGE_ID
EVENTS = sys.monitoring.events


class Recorder:
    """Writes {"tests": {name: [seconds, {file: lines}]}}: what each test that passes runs.

    Lines of its fixtures are lines of all tests of its file, since the first of them may have run a fixture
    that all share. The test "" has what runs before all: imports.
    """

    def __init__(self, root: Path, files: set[str], out: Path):
        self._files = {str(root / file): file for file in files}
        self._out, self._seconds = out, {"": 0.0}
        self._lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._now = self._lines[""]
        sys.monitoring.use_tool_id(MONITOR, "mutants")
        sys.monitoring.register_callback(MONITOR, EVENTS.PY_START, self._began)
        sys.monitoring.register_callback(MONITOR, EVENTS.LINE, self._ran)
        sys.monitoring.set_events(MONITOR, EVENTS.PY_START)

    def _began(self, code, offset):
        if code.co_filename in self._files:
            sys.monitoring.set_local_events(MONITOR, code, EVENTS.LINE)
        return sys.monitoring.DISABLE  # each code begins for the first time once

    def _ran(self, code, line):
        self._now.add((self._files[code.co_filename], line))

    def pytest_runtest_logstart(self, nodeid):
        self._now = self._lines[nodeid.partition("::")[0]]  # of the file, until the fixtures are there

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item):
        self._now = self._lines[item.nodeid]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self._seconds[report.nodeid] = round(report.duration, 4)

    def pytest_sessionfinish(self):
        sys.monitoring.set_events(MONITOR, 0)
        tests = {}
        for name, seconds in self._seconds.items():
            lines = defaultdict(list)
            for file, line in sorted(self._lines[name] | self._lines[name.partition("::")[0]]):
                lines[file].append(line)
            tests[name] = [seconds, lines]
        self._out.write_text(json.dumps({"tests": tests}), encoding="utf-8")


class Some:
    """Runs these tests, file by file in this order, or all; tells which one fails."""

    def __init__(self, files: dict[str, set[str]] | None, out: Path):
        self._files, self._out = files, out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self._files is None:
            return
        order = {file: place for place, file in enumerate(self._files)}
        chosen = [item for item in items if item.nodeid in self._files[item.nodeid.partition("::")[0]]]
        items[:] = sorted(chosen, key=lambda item: order[item.nodeid.partition("::")[0]])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._out.write_text(report.nodeid, encoding="utf-8")

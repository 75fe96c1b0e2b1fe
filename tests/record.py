"""The record of a whole test run: a JSON file with its outcome and its seconds. As a program: a
table of such files, or the seconds by which tests/schedule.py orders the next run.

    python -m tests.record runs/tests
    python -m tests.record runs/tests --durations > tests/durations.json
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

HEADER = ("run", "date", "passed", "failed", "skipped", "wall time", "failed tests")
SLOWEST = 20
"""Files that the second table shows."""
A_MOMENT_S = 2.0
"""Files that take less are in any order."""


class Record:
    """A pytest plugin that writes FOLDER/<date>.json when the run ends, also when it is interrupted.

    Example: {"date": "2026-11-26 03:20:00", "wall_s": 812.4, "passed": 7684, "failed": [], "skipped": 12,
    "files": {"tests/core/test_turns.py": 1.8}}. Seconds of a file are those of its tests' set-ups, calls and
    teardowns. The workers of a run share the processors, so all together are more than the wall time.
    """

    def __init__(self, folder: Path):
        self._folder, self._begun, self._date = folder, time.monotonic(), time.strftime("%Y-%m-%d %H:%M:%S")
        self._outcomes: Counter[str] = Counter()
        self._failed: list[str] = []
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.when == "call" or report.skipped:
            self._outcomes[report.outcome] += 1

    def pytest_collectreport(self, report):
        if report.failed:
            self._failed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            self._failed.append("(interrupted)")
        run = {
            "date": self._date,
            "wall_s": round(time.monotonic() - self._begun, 1),
            "passed": self._outcomes["passed"],
            "failed": list(dict.fromkeys(self._failed)),
            "skipped": self._outcomes["skipped"],
            "files": {path: round(seconds, 2) for path, seconds in self._seconds.most_common()},
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._date.replace(' ', '_').replace(':', '')}.json"
        path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def table(runs: list[dict]) -> str:
    """The runs in the order of their dates, then the files that took longest, by the mean over the runs."""
    rows = [
        (
            number,
            run["date"],
            run["passed"],
            len(run["failed"]),
            run["skipped"],
            f"{run['wall_s'] / 60:.1f} min",
            "<br>".join(run["failed"]) or "-",
        )
        for number, run in enumerate(sorted(runs, key=lambda run: run["date"]), start=1)
    ]
    slowest = [(path, f"{taken:.1f}") for path, taken in list(mean_seconds(runs).items())[:SLOWEST]]
    return f"{_markdown(HEADER, rows)}\n{_markdown(('file', 'seconds'), slowest)}"


def mean_seconds(runs: list[dict]) -> dict[str, float]:
    """File -> seconds, the mean over the runs, the longest first."""
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds.update({path: taken / len(runs) for path, taken in run["files"].items()})
    return dict(seconds.most_common())


def _markdown(header, rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    recorded = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(sys.argv[1]).glob("*.json"))
    ]
    if "--durations" in sys.argv:
        newest = mean_seconds(recorded[-1:]).items()
        print(json.dumps({path: round(taken) for path, taken in newest if taken >= A_MOMENT_S}, indent=1))
    else:
        print(table(recorded), end="")

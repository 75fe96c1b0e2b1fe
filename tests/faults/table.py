"""A pytest plugin: the table of the drills that ran, as Markdown into --faults-table FILE and
onto the terminal.

A drill is a test with the mark of tests/faults/drills.py. A parametrised one is one row: its
cases are counted.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEADER = ("drill", "promised", "seen", "verdict", "seconds")
MOST_SEEN = 4
"""Cases of a row whose own words are shown, at most."""


@dataclass
class Row:
    """One drill, which may have several cases: of each its verdict, and what it has seen."""

    what: str
    promised: str
    verdicts: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def cells(self) -> tuple[str, ...]:
        passed, all_cases = self.verdicts.count("passed"), len(self.verdicts)
        # A case that make test leaves to make test-faults is no failure; the count shows it.
        verdict = "FAIL" if set(self.verdicts) - {"passed", "skipped"} else "PASS" if passed else "skipped"
        if not self.verdicts:
            verdict = "FAIL: it was interrupted"
        cases = f" ({passed} of {all_cases})" if all_cases > 1 else ""
        words = list(dict.fromkeys(self.seen))
        shown = "; ".join(words[:MOST_SEEN]) + (
            f"; and {len(words) - MOST_SEEN} more" if words[MOST_SEEN:] else ""
        )
        seen = shown or ("as promised" if verdict == "PASS" else "")
        return (self.what, self.promised, seen, verdict + cases, f"{self.seconds:.0f}")


def markdown(rows: Sequence[Row], seconds: float) -> str:
    """The table, under a line that says when and where it was made."""
    cells = [HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)]
    lines = [
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |"
        for line in cells
    ]
    passed = sum(row.cells()[3].startswith("PASS") for row in rows)
    head = (
        f"{passed} of {len(rows)} drills passed in {seconds:.0f} s, {time.strftime('%Y-%m-%d')}, "
        f"{platform.machine()}, Python {platform.python_version()}"
    )
    return "\n".join([head, "", *lines]) + "\n"


def pytest_addoption(parser):
    parser.addoption("--faults-table", metavar="FILE", help="write the table of drills there, as Markdown")


class Table:
    """Gathers the rows while tests run, also those that pytest-xdist's workers run: reports
    carry what is needed.
    """

    def __init__(self, path: str | None):
        self._path, self._begun = path, time.monotonic()
        self.rows: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report):
        known = dict(report.user_properties)
        if "drill" not in known:
            return
        row = self.rows.setdefault(known["drill"], Row(known["drill"], known["promised"]))
        row.seconds += report.duration
        # a set-up that fails or skips, a call, a late failure
        if report.when == "call" or report.outcome != "passed":
            row.verdicts.append(report.outcome)
            row.seen += [text for name, text in report.user_properties if name == "seen"]
            if report.failed:
                # where; the log says why
                row.seen.append(str(report.longreprtext).strip().splitlines()[-1][:200])

    def pytest_terminal_summary(self, terminalreporter):
        if not self.rows:
            return
        text = markdown(list(self.rows.values()), time.monotonic() - self._begun)
        terminalreporter.section("drills")
        terminalreporter.write_line(text)
        if self._path is not None:
            Path(self._path).write_text(text, encoding="utf-8")
            terminalreporter.write_line(f"written: {self._path}")


def pytest_configure(config):
    config.addinivalue_line("markers", "drill(what, promised): a row of the table of drills")
    if not hasattr(config, "workerinput"):  # the parent of xdist's workers, or the only process
        config.pluginmanager.register(Table(config.getoption("--faults-table")), "faults-table")


def pytest_collection_modifyitems(items):
    """Each report of a drill carries its row."""
    for item in items:
        mark = item.get_closest_marker("drill")
        if mark is not None:
            item.user_properties += [("drill", mark.args[0]), ("promised", mark.kwargs["promised"])]

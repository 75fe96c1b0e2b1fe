"""What a part of the check found: numbers beside their bounds, tables of a benchmark, or why
something was not run.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


class DoesNotHold(AssertionError):
    """A part's finding is beyond its bound."""


class NotRun(Exception):
    """A part can't run here; the message is the reason, which the table names."""


@dataclass(frozen=True)
class Finding:
    """A line of the table. Example: Finding("bfloat16, 8 shards: largest error of a log-prob",
    "2.1e-07", "1e-05").
    """

    what: str
    found: str
    bound: str = ""
    """Empty where the number is only told."""


@dataclass
class Outcome:
    """What a part that ran to its end hands over."""

    findings: list[Finding] = field(default_factory=list)
    tables: str = ""
    """Markdown that a benchmark has printed."""
    machine: str = ""
    """The device's name and torch's version."""
    not_run: str = ""
    """Why the part did not run."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Outcome":
        saved = json.loads(path.read_text())
        return cls(**saved | {"findings": [Finding(**one) for one in saved["findings"]]})


def at_most(what: str, found: float, bound: float) -> Finding:
    """A finding that is no larger than its bound.

    Raises:
        DoesNotHold: it is larger, or not a number.
    """
    if not found <= bound:
        raise DoesNotHold(f"{what} is {found:.3g}, and may be {bound:g} at most")
    return Finding(what, f"{found:.2g}", f"{bound:g}")


def require(holds: bool, message: str) -> None:
    """Raise DoesNotHold with the message unless it holds."""
    if not holds:
        raise DoesNotHold(message)

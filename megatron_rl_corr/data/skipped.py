"""Rows that were drawn and left out, as bad, too long or with an unread label: how many, and
whether too many.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from megatron_rl_corr.events import EVENTS

JUDGED_DRAWS = 100
HOPELESS_BAD = 0.5
"""The run ends when more than this share of the last JUDGED_DRAWS drawn rows were bad."""
HOPELESS_SKIPS = 1000
"""It also ends after so many skipped rows in a row, too long ones too, and after all rows of a
smaller data set.
"""
NAMED_ROWS = 20
"""Bad rows that are named; later ones are only counted."""
CAUSES = ("bad", "long", "label")

logger = logging.getLogger(__name__)


class TooManyBadRows(RuntimeError):
    """Nearly all rows are left out, so that a step may never be complete."""


class SkippedRows:
    """Counts one replica's skipped rows, since the run's beginning.

    Args:
        size: rows of the data set.
        warn: takes a line about a row that is left out.
    """

    def __init__(self, size: int, warn: Callable[[str], None] | None = None):
        self._size, self._warn = size, logger.warning if warn is None else warn
        self.counts = Counter(dict.fromkeys(CAUSES, 0))
        self._named: dict[str, set[int]] = {cause: set() for cause in CAUSES}
        self._recent: deque[bool] = deque(maxlen=JUDGED_DRAWS)
        self._in_a_row = 0
        self._told: Counter[str] = Counter()
        self._end: str | None = None

    def drawn(self) -> None:
        """A row that was drawn can be used."""
        self._recent.append(False)
        self._in_a_row = 0

    def add(self, row: int, error: ValueError, cause: str) -> bool:
        """A row that was drawn is left out, for one of CAUSES; False where the run is to end, as
        `check` then says.

        Each bad row is named once, up to NAMED_ROWS of them, and the first of each other cause.
        """
        self.counts[cause] += 1
        EVENTS.tell("prompt_skipped", str(error), row=row, cause=cause)
        self._recent.append(cause == "bad")
        self._in_a_row += 1
        named, limit = self._named[cause], NAMED_ROWS if cause == "bad" else 1
        if row not in named and len(named) < limit:
            named.add(row)
            last = "; further ones are only counted" if len(named) == limit else ""
            self._warn(f"{error}; the row is left out{last}")
        if len(self._recent) == JUDGED_DRAWS and sum(self._recent) > HOPELESS_BAD * JUDGED_DRAWS:
            self._end = (
                f"{sum(self._recent)} of the last {JUDGED_DRAWS} prompts drawn are bad rows; the "
                f"last: {error}"
            )
        if self._in_a_row >= min(self._size, HOPELESS_SKIPS):
            self._end = f"the last {self._in_a_row} prompts drawn were all left out; the last: {error}"
        return self._end is None

    def check(self) -> None:
        """Raises TooManyBadRows once `add` has returned False."""
        if self._end is not None:
            raise TooManyBadRows(
                f"{self._end}; mend the data, or the flags that say how a row becomes a prompt"
            )

    def since_last(self) -> dict[str, int]:
        """ "skipped_bad" and so on, for each of CAUSES, since the last call."""
        since = {f"skipped_{cause}": self.counts[cause] - self._told[cause] for cause in CAUSES}
        self._told = Counter(self.counts)
        return since

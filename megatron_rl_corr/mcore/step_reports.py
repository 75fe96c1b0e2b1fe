"""Writes each step's numbers once, in the order of the steps.

A feature may hold the numbers of a step until it has found more of it: those of the steps that end
meanwhile wait behind them, because a file whose steps go back is read as that of a run which began
again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Write = Callable[[dict[str, float]], None]


class StepReports:
    """The numbers of a run's steps, on every rank; they are empty but on the one that reports.

    Args:
        write: takes a step's numbers, on the rank that reports.
    """

    def __init__(self, write: Write):
        self._write = write
        self.numbers: dict[str, float] = {}
        """Metrics of the step under way, or the last."""
        self._holds, self._taken = False, False
        self._held: list[dict[str, float]] = []
        """The numbers of the step that is held, and of those since."""

    def begin_step(self) -> None:
        """Forget the numbers of the last step."""
        self.numbers.clear()
        self._taken = False

    def end_step(self) -> None:
        """Write the numbers of the step, or let them wait behind one that is held."""
        if self._taken:
            return
        if self._holds:
            self._held.append(dict(self.numbers))
        else:
            self._write_numbers(self.numbers)

    def hold(self) -> None:
        """Keep the numbers of the step that has ended, and of those behind it, until `release`."""
        assert not self._holds, "one step is held already"
        self._holds, self._taken, self._held = True, True, [dict(self.numbers)]

    def release(self, found: Mapping[str, float]) -> bool:
        """Write what waits, with more numbers of the step that was held.

        Returns:
            Whether it still waited, with numbers: this is the rank that reports.
        """
        # Empty where `close` has written them meanwhile.
        held, *since = self._held or [{}]
        self._holds, self._held = False, []
        for numbers in (held | found if held else held, *since):
            self._write_numbers(numbers)
        return bool(held)

    def close(self) -> None:
        """Write what still waits, after a failure. On this rank alone, from any thread."""
        self._holds, held, self._held = False, self._held, []
        for numbers in held:
            self._write_numbers(numbers)

    def _write_numbers(self, numbers: dict[str, float]) -> None:
        if numbers:
            self._write(dict(numbers))

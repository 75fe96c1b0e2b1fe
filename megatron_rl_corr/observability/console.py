"""Prints one line per training step, with a mark behind every value outside its usual range,
and early warnings.
"""

import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from megatron_rl_corr.core.metric_spec import MetricSpec
from megatron_rl_corr.observability.alerts import NOT_FINITE, is_alert
from megatron_rl_corr.observability.catalogue import catalogue, label_of, usual_range
from megatron_rl_corr.observability.early_warnings import EarlyWarning
from megatron_rl_corr.observability.metrics_file import host_number, step_of
from megatron_rl_corr.tables import pad_cells, readable

PREFIX = "[rl-corr]"
MARK = "!"
MAX_WIDTH = 110
HEADER_EVERY = 20


class LiveTable:
    """A table that grows by a line per step, each starting with `[rl-corr]` and at most 110 characters long.

    A value outside its usual range carries a `!`; a metric without a column is then named at the line's end.
    The first time a metric leaves its range, a line below explains it.

    Args:
        columns: metrics with a `column`; by default all of the catalogue that have one.
        stream: where the lines go; standard output by default. Colours only on a terminal, and
            not with NO_COLOR.

    Raises:
        ValueError: the columns take more than 110 characters.
    """

    def __init__(self, columns: Sequence[MetricSpec] | None = None, stream: TextIO | None = None):
        found = catalogue().values() if columns is None else columns
        self.columns = [spec for spec in found if spec.column is not None]
        self.stream = sys.stdout if stream is None else stream
        self._widths = [spec.column.width for spec in self.columns]
        self._colour = self.stream.isatty() and "NO_COLOR" not in os.environ
        self._rows = 0
        self._explained: set[str] = set()
        width = len(self._header())
        if width > MAX_WIDTH:
            raise ValueError(f"columns take {width} characters, more than {MAX_WIDTH}; leave some out")

    def row(self, metrics: Mapping[str, int | float]) -> None:
        """Print one step.

        Args:
            metrics: by their logged names, `step` among them.

        Raises:
            TypeError: a value is no number of the host.
            ValueError: there is no `step`, or it is no whole number.
        """
        step_of(metrics)
        values = {name: host_number(name, value) for name, value in metrics.items()}
        alerts = [name for name in values if is_alert(name, values[name])]
        lines = [self._bold(self._header())] if self._rows % HEADER_EVERY == 0 else []
        lines.append(self._line(values, alerts))
        for name in alerts:
            if name not in self._explained:
                self._explained.add(name)
                lines.append(_explanation(name, values[name]))
        self._rows += 1
        self.stream.write("".join(line + "\n" for line in lines))
        self.stream.flush()

    def warn(self, warning: EarlyWarning) -> None:
        """Print that a warning begins, whole, or with `last_step` that it has ended."""
        if warning.last_step is None:
            begin = f"{PREFIX} {MARK} "
            wrapped = textwrap.wrap(
                warning.sentence, MAX_WIDTH, initial_indent=begin, subsequent_indent=PREFIX.ljust(len(begin))
            )
            lines = [self._red(line) for line in wrapped]
        else:
            lines = [_cut(f"No longer, since step {warning.last_step + 1}: {warning.trend.says}")]
        self.stream.write("".join(line + "\n" for line in lines))
        self.stream.flush()

    def _header(self) -> str:
        return _joined([spec.label or spec.name for spec in self.columns], self._widths).rstrip()

    def _line(self, values: Mapping[str, int | float], alerts: list[str]) -> str:
        cells = [_cell(spec, values.get(spec.name)) for spec in self.columns]
        marked = [spec.name in alerts for spec in self.columns]
        room = MAX_WIDTH - len(_joined(cells, self._widths))
        shown = {spec.name for spec in self.columns}
        # A skipped step is the worst news; then the shortest names, so that as many as possible fit.
        others = sorted(set(alerts) - shown, key=lambda name: (name != "skipped", len(label_of(name)), name))
        notes = [label_of(name) + MARK for name in others]
        padded = [f" {cell}" for cell in pad_cells(cells, self._widths, "r" * len(cells))]
        painted = [
            self._red(cell + MARK) if bad else cell + " " for cell, bad in zip(padded, marked, strict=True)
        ]
        return (PREFIX + "".join(painted) + self._red(_fit_notes(notes, room))).rstrip()

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self._colour and text else text

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._colour else text


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells in their columns, each with a place for its mark."""
    return PREFIX + "".join(f" {cell} " for cell in pad_cells(cells, widths, "r" * len(cells)))


def _cell(spec: MetricSpec, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return readable(value)
    text = spec.column.format(value)
    return text if len(text) <= spec.column.width else f"{value:.0e}"


def _explanation(name: str, value: float) -> str:
    usual = usual_range(name)
    if usual is None or not math.isfinite(value):
        text = f"{label_of(name)} is {readable(value)}: {NOT_FINITE}"
    else:
        text = f"{label_of(name)} {readable(value)}, usually {usual}: {usual.says}"
    return _cut(text)


def _cut(text: str) -> str:
    """A line below a step's."""
    line = f"{PREFIX} {MARK} {text}"
    return line if len(line) <= MAX_WIDTH else line[: MAX_WIDTH - 3] + "..."


def _fit_notes(notes: list[str], room: int) -> str:
    """As many notes as the room takes, then how many more there are."""
    for count in range(len(notes), -1, -1):
        left_out = len(notes) - count
        text = "".join(f" {note}" for note in notes[:count]) + (f" +{left_out}" if left_out else "")
        if len(text) <= room:
            return text
    return ""

"""Prints one line per training step, with a mark behind every value outside its usual range."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from megatron_rl_corr.observability.catalogue import label_of, usual_range
from megatron_rl_corr.observability.findings import NOT_FINITE, is_alert
from megatron_rl_corr.observability.values import host_number, readable, step_of

PREFIX = "[rl-corr]"
MARK = "!"
MAX_WIDTH = 110
HEADER_EVERY = 20


def fixed(digits: int) -> Callable[[float], str]:
    """A format with `digits` decimals."""
    return lambda value: f"{value:.{digits}f}"


def scientific(value: float) -> str:
    return f"{value:.2e}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def at_most_one_decimal(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def thousands(value: float) -> str:
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Column:
    """A metric's place in the table; a value that does not fit `width` is written shorter, never cut."""

    header: str
    metric: str
    width: int
    format: Callable[[float], str] = readable

    def cell(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return readable(value)
        text = self.format(value)
        return text if len(text) <= self.width else f"{value:.0e}"


DEFAULT_COLUMNS = (
    Column("step", "step", 6),
    Column("reward", "reward/mean", 8, fixed(4)),
    Column("KL(k3)", "rollout_corr/k3_kl", 8, scientific),
    Column("weight", "rollout_corr/weight_mean", 7, fixed(3)),
    Column("ESS", "rollout_corr/ess", 5, fixed(3)),
    Column("kept", "rollout_corr/kept_fraction", 6, percent),
    Column("grad norm", "grad_norm", 9),
    Column("tokens/s", "tokens_per_s", 9, thousands),
    Column("version", "weight_version", 7),
    Column("lag", "weight_lag", 4, at_most_one_decimal),
)


class LiveTable:
    """A table that grows by a line per step, each starting with `[rl-corr]` and at most 110 characters long.

    A value outside its usual range carries a `!`; a metric without a column is then named at the line's end.
    The first time a metric leaves its range, a line below says what that means.
    """

    def __init__(self, columns: tuple[Column, ...] = DEFAULT_COLUMNS, stream: TextIO | None = None):
        self.columns = columns
        self.stream = sys.stdout if stream is None else stream
        self._colour = self.stream.isatty() and "NO_COLOR" not in os.environ
        self._rows = 0
        self._explained: set[str] = set()
        width = len(self._header())
        if width > MAX_WIDTH:
            raise ValueError(f"columns take {width} characters, more than {MAX_WIDTH}; leave some out")

    def row(self, metrics: Mapping[str, int | float]) -> None:
        """Print one step. ValueError without `step`, TypeError for a value that is no host number."""
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

    def _header(self) -> str:
        return (PREFIX + "".join(f" {column.header:>{column.width}} " for column in self.columns)).rstrip()

    def _line(self, values: Mapping[str, int | float], alerts: list[str]) -> str:
        plain = PREFIX
        painted = PREFIX
        for column in self.columns:
            cell = f" {column.cell(values.get(column.metric)):>{column.width}}"
            in_alert = column.metric in alerts
            plain += cell + (MARK if in_alert else " ")
            painted += self._red(cell + MARK) if in_alert else cell + " "
        shown = {column.metric for column in self.columns}
        # A skipped step is the worst news; then the shortest names, so that as many as possible fit.
        others = sorted(set(alerts) - shown, key=lambda name: (name != "skipped", len(label_of(name)), name))
        notes = [label_of(name) + MARK for name in others]
        return (painted + self._red(_fit_notes(notes, MAX_WIDTH - len(plain)))).rstrip()

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self._colour and text else text

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._colour else text


def _explanation(name: str, value: float) -> str:
    usual = usual_range(name)
    if usual is None or not math.isfinite(value):
        text = f"{label_of(name)} is {readable(value)}: {NOT_FINITE}"
    else:
        text = f"{label_of(name)} {readable(value)}, usually {usual}: {usual.says}"
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

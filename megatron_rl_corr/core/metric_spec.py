"""How a metric is described, in the file that computes it. `observability/catalogue.py` collects
the descriptions.

A module lists what it computes in `METRICS`, a tuple of `MetricSpec`; the console, the alerts, the page,
`megatron-rl-corr correct` and the page of metrics in docs/ read it from there. The module must be
importable without Megatron.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl_corr.tables import readable


@dataclass(frozen=True)
class UsualRange:
    """The closed interval that a healthy run stays in; a value outside of it, or NaN, is an alert.

    Example: `UsualRange("a few samples carry the gradient", "Lower the upper bound of the
    weights.", low=0.3)`.
    """

    says: str
    """What a value outside means, in one line."""
    advice: str
    """What to do about it, in sentences."""
    low: float = -math.inf
    high: float = math.inf

    def excludes(self, value: float) -> bool:
        """True outside the interval, and for NaN."""
        return not self.low <= value <= self.high

    def __str__(self) -> str:
        if self.low == self.high:
            return readable(self.low)
        if self.low == -math.inf:
            return f"at most {readable(self.high)}"
        if self.high == math.inf:
            return f"at least {readable(self.low)}"
        return f"{readable(self.low)} to {readable(self.high)}"


@dataclass(frozen=True)
class Column:
    """A metric's place in the console's table; a value that does not fit the width is written
    shorter, never cut.
    """

    width: int
    format: Callable[[float], str] = readable


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or a family of them.

    Example: `MetricSpec("rollout_corr/weight_max", "largest importance weight", "max(w)", compared=True)`.
    """

    name: str
    """Name in the log: rollout_corr/k3_kl. A family ends with a slash: eval/ describes every
    name that starts so.
    """
    doc: str
    """What it measures, in one line."""
    formula: str = ""
    label: str = ""
    """Short name for the console, the alerts and `correct`; the whole name where it is empty."""
    usual: UsualRange | None = None
    group: str = ""
    """Heading that it stands under; see GROUPS in observability/catalogue.py."""
    only_with: str = ""
    """The setting without which it is not logged; empty for a metric of every run."""
    clamped: str = ""
    """What its twin NAME_clamped clamps, and where, so that single outliers weigh little;
    empty without a twin.
    """
    column: Column | None = None
    """Its column in the console, for a metric that is printed at every step."""
    may_be_nan: bool = False
    """NaN where there is nothing of what it measures, which is no alert."""
    compared: bool = False
    """True if `megatron-rl-corr correct` shows it when it compares corrections."""


def in_group(group: str, *specs: MetricSpec, **of_all: Any) -> tuple[MetricSpec, ...]:
    """The metrics under one heading. of_all: what else they have in common, fields of `MetricSpec`."""
    return tuple(replace(spec, group=group, **of_all) for spec in specs)

"""How a metric is described: a line for a person, a formula, and the range that a healthy run keeps to."""

import math
from dataclasses import dataclass

from megatron_rl_corr.observability.values import readable


@dataclass(frozen=True)
class UsualRange:
    """The closed interval a healthy run keeps to, what it means to leave it, and what to do then."""

    says: str
    remedy: str
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
class Meaning:
    """One metric: a line for a person, its formula, a short label, and its usual range if it has one."""

    text: str
    formula: str = ""
    label: str = ""
    usual: UsualRange | None = None

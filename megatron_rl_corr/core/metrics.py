"""Metrics that carry their own reduction: partial values that add, or take an extremum, over ranks.

A metric is exact however the tokens are split, because only sums, counts and extrema travel, never means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

LIFT = 2.0**14
"""Added to what is there, so that the zeros of what is not are smaller; log-probs differ by far less."""


@dataclass(frozen=True)
class Metric:
    """`values` is a float64 device tensor [k]; partials combine entry by entry with `reduction`."""

    values: Tensor
    reduction = "sum"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        """The metric's number from fully reduced host values; nan where there was nothing to measure."""
        return values[0]

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        """What is logged of the metric `name`, from fully reduced host values."""
        return {name: cls.finish(values)}

    def value(self) -> float:
        """The number over this rank's share alone. Reads from the device: not for the hot path."""
        return self.finish(self.values.tolist())


class Sum(Metric):
    """A count or a total."""


class Difference(Metric):
    """A count less another; values = [a, b]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] - values[1]


class Mean(Metric):
    """values = [total, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] if values[1] else math.nan


class NegativeMean(Metric):
    """-mean; values = [total, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return -values[0] / values[1] if values[1] else math.nan


class MeanPlusOne(Metric):
    """mean(x) of which x - 1 was summed, so that what is not there adds 0; values = [sum (x - 1), count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] + 1 if values[1] else math.nan


class LeftOut(Metric):
    """1 - mean: the share that a keep mask leaves out; values = [kept, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return 1 - values[0] / values[1] if values[1] else math.nan


class MeanOfDifference(Metric):
    """mean(x - y), where each mean alone would hide the difference; values = [sum x, sum y, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return (values[0] - values[1]) / values[2] if values[2] else math.nan


class Std(Metric):
    """Population standard deviation; values = [sum, sum of squares, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        total, squares, count = values
        if not count:
            return math.nan
        variance = squares / count - (total / count) ** 2
        # Below it the difference is rounding, whose root would look like a spread of 2e-8.
        return math.sqrt(variance) if variance > 1e-15 * squares / count else 0.0


class StdOfDifference(Metric):
    """Population standard deviation of x - y; values = [sum x, sum y, sum x^2, sum y^2, sum xy, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        x, y, xx, yy, xy, n = values
        return math.sqrt(max((xx - 2 * xy + yy) / n - ((x - y) / n) ** 2, 0.0)) if n else math.nan


class EffectiveSampleSize(Metric):
    """ESS as a fraction: 1 / mean((w / mean w)^2) = (sum w)^2 / (n sum w^2); values = [sum w, sum w^2, n]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        total, squares, count = values
        return total * total / (count * squares) if count and squares else math.nan


class Chi2(Metric):
    """mean(rho^2) - 1 = mean(e^2 + 2 e) with e = rho - 1; values = [sum e^2, sum e, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        squares, total, count = values
        return (squares + 2 * total) / count if count else math.nan


class JensenShannon(Metric):
    """mean of [rho ln(2 rho / (1 + rho)) + ln(2 / (1 + rho))] / 2 over samples of pi_rollout.

    With e = rho - 1 and s = ln(1 + rho): values = [sum e s, sum e D, sum s, sum e, sum D, count].
    """

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        es, ed, s, e, d, count = values
        return (math.log(2) * (e + 2 * count) - es + ed - 2 * s + d) / (2 * count) if count else math.nan


class Pearson(Metric):
    """Correlation of x and y; values = [sum x, sum y, sum x^2, sum y^2, sum xy, count]; shifts do not matter."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        x, y, xx, yy, xy, n = values
        if not n:
            return math.nan
        var_x, var_y = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2
        # Below it a variance is rounding: without spread there is no correlation.
        if var_x <= 1e-12 * xx / n or var_y <= 1e-12 * yy / n:
            return math.nan
        return (xy / n - x * y / n**2) / math.sqrt(var_x * var_y)


class Max(Metric):
    reduction = "max"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[0] > -math.inf else math.nan


class MaxOfPresent(Metric):
    """A maximum over rows that are 0 where nothing is; values = [maximum, 1 if anything was there]."""

    reduction = "max"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[1] else math.nan


class Min(Metric):
    reduction = "min"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[0] < math.inf else math.nan


class LiftedMax(Metric):
    """A maximum over entries that were lifted above the zeros of absent ones; values = [maximum + LIFT]."""

    reduction = "max"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] - LIFT if values[0] > 0 else math.nan


class LiftedMin(LiftedMax):
    """A minimum; values = [LIFT - minimum]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return LIFT - values[0] if values[0] > 0 else math.nan

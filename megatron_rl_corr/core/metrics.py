"""Metrics that carry their own reduction: partial values that add, or take an extremum, over ranks.

A metric is exact however the tokens are split, because only sums, counts and extrema travel, never means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """`values` is a float64 device tensor [k]; partials combine entry by entry with `reduction`."""

    values: Tensor
    reduction = "sum"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        """The metric's number from fully reduced host values; nan where there was nothing to measure."""
        return values[0]

    def value(self) -> float:
        """The number over this rank's share alone. Reads from the device: not for the hot path."""
        return self.finish(self.values.tolist())


class Sum(Metric):
    """A count or a total."""


class Mean(Metric):
    """values = [total, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] if values[1] else math.nan


class Std(Metric):
    """Population standard deviation; values = [sum, sum of squares, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        total, squares, count = values
        return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count else math.nan


class EffectiveSampleSize(Metric):
    """ESS as a fraction: 1 / mean((w / mean w)^2) = (sum w)^2 / (n sum w^2); values = [sum w, sum w^2, n]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        total, squares, count = values
        return total * total / (count * squares) if count and squares else math.nan


class Chi2(Metric):
    """chi-square divergence estimate mean(rho^2) - 1; values = [sum of rho^2, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] - 1.0 if values[1] else math.nan


class Pearson(Metric):
    """Correlation of x and y; values = [sum x, sum y, sum x^2, sum y^2, sum xy, count]."""

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


class Min(Metric):
    reduction = "min"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[0] < math.inf else math.nan

"""Metrics that carry their own reduction: partial values that add, or take an extremum, over ranks.

A metric is exact however the tokens are split, because only sums, counts and extrema travel, never means.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        """The numbers that are logged for the metric `name`, from fully reduced host values."""
        return {name: cls.finish(values)}

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


class Share(Metric):
    """The part of what was counted that is of a kind, 0 where nothing was; values = [of the kind, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] if values[1] else 0.0


class Difference(Metric):
    """A count less another; values = [a, b]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] - values[1]


class NegativeMean(Metric):
    """-mean; values = [total, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return -values[0] / values[1] if values[1] else math.nan


class MeanPlusOne(Metric):
    """mean(x) from sums of x - 1, which are 0 for absent entries; values = [sum (x - 1), count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] / values[1] + 1 if values[1] else math.nan


class LeftOut(Metric):
    """1 - mean: the share that a keep mask rejects; values = [kept, count]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return 1 - values[0] / values[1] if values[1] else math.nan


class MeanOfDifference(Metric):
    """mean(x - y) from the sums of either; values = [sum x, sum y, count]."""

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

    With e = rho - 1 and L = ln((1 + rho) / 2) that is [(1 + e) (D - L) - L] / 2:
    values = [sum e L, sum e D, sum L, sum D, count].
    """

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        el, ed, middle, d, count = values
        return (d + ed - el - 2 * middle) / (2 * count) if count else math.nan


class Pearson(Metric):
    """Correlation of x and y; values = [sum x, sum y, sum x^2, sum y^2, sum xy, count];
    shifts do not matter.
    """

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
    """values = [maximum], -inf where there was nothing."""

    reduction = "max"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[0] > -math.inf else math.nan


class MaxOfPresent(Metric):
    """A maximum of non-negative values in which absent entries are 0; values = [maximum, how
    many are present].
    """

    reduction = "max"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[1] else math.nan


class Min(Metric):
    """values = [minimum], inf where there was nothing."""

    reduction = "min"

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return values[0] if values[0] < math.inf else math.nan


class NegativeMin(Min):
    """-minimum: the maximum of -x; values = [minimum of x], inf where there was nothing."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return -Min.finish(values)


class NegativeMax(Max):
    """-maximum: the minimum of -x; values = [maximum of x], -inf where there was nothing."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        return -Max.finish(values)


_DECADES = [float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)]
EDGES = tuple(sorted([*_DECADES, math.log(2), 100.0]))
"""Upper ends of all bins of |D| but the last, which is open: 1, 2 and 5 of each decade, and ln 2. A
bin holds its end.
"""
LABELS = tuple(f"upto_{edge:.3g}" for edge in EDGES) + (f"above_{EDGES[-1]:.3g}",)
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


class LogRatioHistogram(Metric):
    """Tokens in each bin of |D|; values = [1 + bins] counts, which add up exactly over ranks
    and microbatches.

    The first count is of D = 0, which belongs to the first bin and is told apart.
    """

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        """The median."""
        return percentile(_bins(values), 0.5)

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        """Percentiles, the shares of 0 and above ln 2 (one side more than twice as sure), and
        each bin's share.
        """
        bins, total = _bins(values), sum(values)
        shares = [count / total if total else math.nan for count in bins]
        found = {f"{name}_abs_{label}": percentile(bins, share) for label, share in PERCENTILES.items()}
        found[f"{name.removesuffix('log_ratio')}exact_fraction"] = values[0] / total if total else math.nan
        found[f"{name}_large_fraction"] = sum(shares[EDGES.index(math.log(2)) + 1 :])
        return found | {f"{name}_abs_bin/{label}": share for label, share in zip(LABELS, shares, strict=True)}


def _bins(values: Sequence[float]) -> list[float]:
    """The count of each bin of LABELS, from the values of a LogRatioHistogram."""
    exact, first, *others = values
    return [exact + first, *others]


def percentile(counts: Sequence[float], share: float) -> float:
    """The least upper end that at least this share of the tokens is at or below; 100 if none is;
    nan without tokens.
    """
    total = sum(counts)
    if not total:
        return math.nan
    at = bisect_left(list(accumulate(counts)), share * total)
    return EDGES[min(at, len(EDGES) - 1)]

"""A run's last and first values of some metrics in bounded memory, and what can be said robustly
about their course.

A "step with x" is one whose row has a finite number under the name x. All statistics are of steps with the
metric, so a step without it, or with NaN, neither counts nor interrupts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from megatron_rl_corr.observability.collapse import WINDOW

EARLY = 10
"""Steps at a run's beginning whose median is the reference."""
COURSE = 20
"""Steps over which two metrics are compared, and parts of the whole run over which they are compared too."""
SCATTERED = 4 * COURSE
"""Steps, at most, by which it is judged how single ones scatter."""
KEPT = SCATTERED + WINDOW
"""Last values kept of a metric."""


def kendall_tau(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Kendall's tau-b of n pairs: (concordant - discordant) / sqrt(pairs untied in x * pairs untied in y).

    In [-1, 1]; single outliers hardly move it. 0 where one side is constant, or there are
    fewer than two pairs.

    Args:
        xs, ys: of the same length n; n^2 / 2 comparisons.
    """
    score = of_x = of_y = 0
    for at in range(len(xs)):
        for other in range(at):
            x, y = _sign(xs[at] - xs[other]), _sign(ys[at] - ys[other])
            score, of_x, of_y = score + x * y, of_x + abs(x), of_y + abs(y)
    return score / math.sqrt(of_x * of_y) if of_x and of_y else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def noise_of_mean(values: Sequence[float]) -> float:
    """Standard deviation of a mean of WINDOW values: sqrt(mean((x_t - x_(t-1))^2) / 2 / WINDOW).

    A slow trend hardly adds to it. Rare values do, as they must: of a reward that most batches lack
    altogether, the typical difference is 0, but not its mean square.

    Args:
        values: in order, at least two.
    """
    return math.hypot(*(b - a for a, b in pairwise(values))) / math.sqrt(2 * WINDOW * (len(values) - 1))


class Parts:
    """The means of a pair of metrics over equal parts of a run so far: COURSE to 2 * COURSE - 1
    once it is so long.
    """

    def __init__(self):
        self.means: list[tuple[float, float]] = []
        self._steps = 1
        """Steps of one mean."""
        self._open: tuple[float, float, int] = (0.0, 0.0, 0)
        """The part that is not whole yet: its sums, and of how many steps."""
        self._tau: float | None = None
        """Kendall's tau of the means, kept while they stay: in a long run that is hundreds of steps."""

    def add(self, x: float, y: float) -> None:
        """Take a step's pair."""
        total_x, total_y, count = self._open
        self._open = total_x + x, total_y + y, count + 1
        if count + 1 < self._steps:
            return
        self.means.append((self._open[0] / self._steps, self._open[1] / self._steps))
        self._open, self._tau = (0.0, 0.0, 0), None
        if len(self.means) == 2 * COURSE:
            two = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in two]
            self._steps *= 2

    def tau(self) -> float | None:
        """`kendall_tau` of the means; None while there are fewer than COURSE."""
        if self._tau is None and len(self.means) >= COURSE:
            self._tau = kendall_tau(*zip(*self.means, strict=True))
        return self._tau


class History:
    """The values of some metrics that trends are judged by: KEPT last ones, EARLY first ones, the best mean.

    Example: `History(["reward/mean"])`, then `add({"step": 1, "reward/mean": 0.5, ...})` once a step.
    """

    def __init__(self, names: Sequence[str], pairs: Sequence[tuple[str, str]] = ()):
        """names: of the metrics; pairs: those of them that `tau` is asked of."""
        self._first: dict[str, list[float]] = {name: [] for name in names}
        self._last: dict[str, deque[float]] = {name: deque(maxlen=KEPT) for name in names}
        # Kept by themselves, as one may be there in the first of many updates of a batch alone.
        self._both: dict[tuple[str, str], deque[tuple[float, float]]] = {
            pair: deque(maxlen=COURSE) for pair in pairs
        }
        self._parts: dict[tuple[str, str], Parts] = {pair: Parts() for pair in pairs}
        self._counts = dict.fromkeys(names, 0)
        self._lowest: dict[str, float] = {}
        self._best: dict[str, tuple[float, float, float]] = {}
        """The highest mean, its noise, and by how much it is above the lowest mean before."""
        self.step = 0
        """The last one that was added."""

    def add(self, metrics: Mapping[str, int | float]) -> set[str]:
        """Take a step's metrics, `step` among them; the names of this history that it has a
        finite number of.
        """
        self.step = int(metrics["step"])
        found = {name for name in self._counts if math.isfinite(metrics.get(name, math.nan))}
        for name in found:
            value = float(metrics[name])
            self._counts[name] += 1
            self._last[name].append(value)
            if len(self._first[name]) < EARLY:
                self._first[name].append(value)
            mean, best = self.mean(name), self.best(name)
            if mean is not None:
                self._lowest[name] = min(mean, self._lowest.get(name, mean))
                if best is None or mean > best:
                    noise = noise_of_mean(list(self._last[name])[-SCATTERED:])
                    self._best[name] = mean, noise, mean - self._lowest[name]
        for (x, y), values in self._both.items():
            if x in found and y in found:
                values.append((float(metrics[x]), float(metrics[y])))
                self._parts[x, y].add(*values[-1])
        return found

    def now(self, name: str) -> float | None:
        """Median of the last WINDOW steps with the metric; None before there are so many."""
        values = self._window(name)
        return median(values) if values else None

    def early(self, name: str) -> float | None:
        """Median of the first EARLY steps with the metric; None until WINDOW others have followed."""
        return median(self._first[name]) if self._counts[name] >= EARLY + WINDOW else None

    def mean(self, name: str) -> float | None:
        """Mean of the last WINDOW steps with the metric; None before there are so many."""
        values = self._window(name)
        return math.fsum(values) / WINDOW if values else None

    def highest(self, name: str) -> float | None:
        """The highest of the last WINDOW steps with the metric; None before there are so many."""
        return max(self._window(name), default=None)

    def best(self, name: str) -> float | None:
        """The highest `mean` so far."""
        return self._best[name][0] if name in self._best else None

    def gain(self, name: str) -> float | None:
        """`best` less the lowest `mean` before it."""
        return self._best[name][2] if name in self._best else None

    def noise(self, name: str) -> float | None:
        """The larger `noise_of_mean` of two spans of SCATTERED steps with the metric; None before
        there are COURSE.

        One ends with the best mean, the other before the last WINDOW steps, whose fall is no noise. That
        of the best stays as long as the best does: a run of rare rewards may have none at all by now, and
        a best that one outlier made is worth no more than its outlier.
        """
        values = list(self._last[name])
        return max(noise_of_mean(values[:-WINDOW]), self._best[name][1]) if len(values) >= COURSE else None

    def tau(self, x: str, y: str) -> float | None:
        """The larger `kendall_tau` of a pair, of its last COURSE steps or of its `Parts`; None
        before COURSE steps.

        What rises over hundreds of steps moves less in 20 of them than it scatters, and a rise of 20 steps
        is one part of a long run.
        """
        both, whole = self._both[x, y], self._parts[x, y].tau()
        if len(both) < COURSE or whole is None:
            return None
        return max(kendall_tau(*zip(*both, strict=True)), whole)

    def _window(self, name: str) -> list[float]:
        last = self._last[name]
        return list(last)[-WINDOW:] if len(last) >= WINDOW else []

"""When a run has collapsed: decided before any run, from its rewards and from whether its numbers are finite.

It is meant for dense rewards above 0, such as the study's. The mean of 10 batches of which most have
reward 0 scatters by more than half of its best, and of rewards below 0 there is no share. The definition
stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WINDOW = 10
"""Steps of a mean reward."""
FRACTION = 0.5
"""A mean reward below this share of the best one so far is a fall."""
STAYS = 20
"""Steps in a row that a fall must last to be a collapse."""
WATCHED = ("reward/mean", "rollout_corr/k3_kl", "loss/entropy", "grad_norm")
"""Numbers of a step that must be finite."""


def window_means(values: Sequence[float]) -> list[float]:
    """The mean of each WINDOW consecutive numbers, in order; [] where there are fewer."""
    return [sum(values[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(values) + 1)]


def step_of_fall(rewards: Sequence[float]) -> int | None:
    """The first step of STAYS in a row whose mean reward is below FRACTION of the best before;
    None: there is none.

    m(t) = mean of the rewards of steps t - WINDOW + 1 to t; t is such a step if m(t) < FRACTION * max over s
    <= t of m(s), and that maximum is above 0. A fall that a run's end cuts short is none.

    Args:
        rewards: the mean reward of each step, from step 1 on.
    """
    best, below = -math.inf, 0
    for step, mean in enumerate(window_means(rewards), start=WINDOW):
        best = max(best, mean)
        below = below + 1 if best > 0 and mean < FRACTION * best else 0
        if below == STAYS:
            return step - STAYS + 1
    return None


def step_of_nonfinite(steps: Sequence[Mapping[str, float]]) -> int | None:
    """The first step with a number of WATCHED that is not finite; None: there is none.

    Args:
        steps: the metrics of each step, in order.
    """
    return next(
        (one["step"] for one in steps if not all(math.isfinite(one.get(name, 0.0)) for name in WATCHED)), None
    )


def step_of_collapse(steps: Sequence[Mapping[str, float]], *, ended_nonfinite: bool = False) -> int | None:
    """The step at which a run collapsed: of its fall, or of its first number that is not finite;
    None: it did not.

    Args:
        steps: the metrics of each step from 1 on, in order, each with a reward.
        ended_nonfinite: the run ended in the step after the last one, as its gradient was not finite.
    """
    nonfinite = step_of_nonfinite(steps)
    if nonfinite is None and ended_nonfinite:
        nonfinite = len(steps) + 1
    whole = steps if nonfinite is None else steps[: nonfinite - 1]
    found = [
        step for step in (step_of_fall([one["reward/mean"] for one in whole]), nonfinite) if step is not None
    ]
    return min(found, default=None)

"""Reads a run's steps as a person would: its summary, and what left its usual range."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl_corr.observability.catalogue import MEANINGS, UsualRange, label_of, usual_range
from megatron_rl_corr.observability.values import readable

ENDS = 5
NOT_FINITE = "a number overflowed, or was an average over nothing"
NOT_FINITE_REMEDY = (
    "Look at that step's other metrics: if no token was kept, mend the rejection bounds; if the gradient "
    "norm jumped before, look at the loss."
)


@dataclass(frozen=True)
class Summary:
    """The few numbers that say how a run went; None where the metric was not recorded."""

    steps: int
    first_reward: float | None
    last_reward: float | None
    max_abs_log_ratio: float | None
    mean_kl: float | None
    weight_version: float | None


@dataclass(frozen=True)
class Finding:
    """A metric that left its usual range: on how many steps, when first, the worst value, what to do."""

    metric: str
    steps: int
    recorded: int
    first_step: int
    worst: float
    says: str
    remedy: str

    @property
    def sentence(self) -> str:
        """The finding in words."""
        label, value = label_of(self.metric), readable(self.worst)
        where = f"on {self.steps} of {self.recorded} steps, first at step {self.first_step}"
        if not math.isfinite(self.worst):
            return f"{label} was {value} at worst, {where}: {self.says}."
        return f"{label} was {value} at worst, usually {usual_range(self.metric)}, {where}: {self.says}."


def finite_values(rows: Sequence[dict], name: str) -> list[float]:
    """The metric's finite values in step order."""
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def summarise(rows: Sequence[dict]) -> Summary:
    """The run in a few numbers; rewards are means over the first and last five recorded steps."""
    rewards = finite_values(rows, "reward/mean")
    versions = finite_values(rows, "weight_version")
    return Summary(
        steps=len(rows),
        first_reward=mean(rewards[:ENDS]),
        last_reward=mean(rewards[-ENDS:]),
        max_abs_log_ratio=max(finite_values(rows, "rollout_corr/log_ratio_abs_max"), default=None),
        mean_kl=mean(finite_values(rows, "rollout_corr/k3_kl")),
        weight_version=versions[-1] if versions else None,
    )


def find_alerts(rows: Sequence[dict]) -> list[Finding]:
    """Every metric that left its usual range or was not finite, in the order of the table of meanings."""
    found = (_finding(rows, name) for name in metric_names(rows))
    return [finding for finding in found if finding is not None]


def is_alert(name: str, value: float) -> bool:
    """True for a value outside the metric's usual range, and for any that is not finite."""
    usual = usual_range(name)
    return not math.isfinite(value) or (usual is not None and usual.excludes(value))


def alert_steps(rows: Sequence[dict]) -> list[int]:
    """The steps at which at least one metric left its usual range or was not finite."""
    return [row["step"] for row in rows if any(is_alert(name, row[name]) for name in row)]


def metric_names(rows: Sequence[dict]) -> list[str]:
    """The recorded metrics: known ones in the order of the table of meanings, then the others by name."""
    recorded = {name for row in rows for name in row}
    return [name for name in MEANINGS if name in recorded] + sorted(recorded - MEANINGS.keys())


def _finding(rows: Sequence[dict], name: str) -> Finding | None:
    usual = usual_range(name)
    recorded = [(row["step"], row[name]) for row in rows if name in row]
    outside = [(step, value) for step, value in recorded if is_alert(name, value)]
    if not outside:
        return None
    worst = max((value for _, value in outside), key=lambda value: _distance(usual, value))
    return Finding(
        metric=name,
        steps=len(outside),
        recorded=len(recorded),
        first_step=outside[0][0],
        worst=worst,
        says=usual.says if usual and math.isfinite(worst) else NOT_FINITE,
        remedy=usual.remedy if usual and math.isfinite(worst) else NOT_FINITE_REMEDY,
    )


def _distance(usual: UsualRange | None, value: float) -> float:
    """How far outside the range the value lies; infinite for NaN, so that NaN counts as the worst."""
    if usual is None or not math.isfinite(value):
        return math.inf
    return max(usual.low - value, value - usual.high)

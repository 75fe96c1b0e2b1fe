"""A run in a few numbers, and its alerts: the metrics that left their usual range or were not finite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl_corr.core.metric_spec import UsualRange
from megatron_rl_corr.observability.catalogue import label_of, ordered, spec_of, usual_range
from megatron_rl_corr.tables import readable

ENDS = 5
"""Steps at a run's beginning and end over which rewards are averaged."""
NOT_FINITE = "a number overflowed, or there was no value to average"
NOT_FINITE_ADVICE = (
    "Look at that step's other metrics: if no token was kept, correct the rejection bounds; if the gradient "
    "norm jumped before, look at the loss."
)


@dataclass(frozen=True)
class Summary:
    """The few numbers that tell how a run went; None where the metric was not recorded.

    Example: `Summary(40, 0.31, 0.84, 2.5, 1.2e-3, 40)`.
    """

    steps: int
    first_reward: float | None
    last_reward: float | None
    max_abs_log_ratio: float | None
    mean_kl: float | None
    weight_version: float | None


@dataclass(frozen=True)
class Alert:
    """A metric that left its usual range: on how many steps, when first, the worst value, what to do."""

    metric: str
    steps: int
    recorded: int
    first_step: int
    worst: float
    says: str
    advice: str

    @property
    def sentence(self) -> str:
        """The alert in words."""
        label, value = label_of(self.metric), readable(self.worst)
        where = f"on {self.steps} of {self.recorded} steps, first at step {self.first_step}"
        if not math.isfinite(self.worst):
            return f"{label} was {value} at worst, {where}: {self.says}."
        return f"{label} was {value} at worst, usually {usual_range(self.metric)}, {where}: {self.says}."


def finite_values(rows: Sequence[dict], name: str) -> list[float]:
    """The metric's finite values in step order.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
        name: as it is logged.
    """
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def mean(values: Sequence[float]) -> float | None:
    """Their mean; None of none."""
    return math.fsum(values) / len(values) if values else None


def summarise(rows: Sequence[dict]) -> Summary:
    """The run in a few numbers; rewards are means over the first and last five recorded steps.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
    """
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


def find_alerts(rows: Sequence[dict]) -> list[Alert]:
    """Every metric that left its usual range or was not finite, in the catalogue's order.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
    """
    found = (_alert(rows, name) for name in metric_names(rows))
    return [alert for alert in found if alert is not None]


def is_alert(name: str, value: float) -> bool:
    """True for a value outside the metric's usual range, and for any that is not finite, but NaN where the
    catalogue says that it means nothing was there.
    """
    spec = spec_of(name)
    if not math.isfinite(value):
        return not (math.isnan(value) and spec is not None and spec.may_be_nan)
    return spec is not None and spec.usual is not None and spec.usual.excludes(value)


def alert_steps(rows: Sequence[dict]) -> list[int]:
    """The steps at which at least one metric left its usual range or was not finite."""
    return [row["step"] for row in rows if any(is_alert(name, row[name]) for name in row)]


def metric_names(rows: Sequence[dict]) -> list[str]:
    """The recorded metrics in the catalogue's order, then those that nothing describes."""
    return ordered(name for row in rows for name in row)


def _alert(rows: Sequence[dict], name: str) -> Alert | None:
    usual = usual_range(name)
    recorded = [(row["step"], row[name]) for row in rows if name in row]
    outside = [(step, value) for step, value in recorded if is_alert(name, value)]
    if not outside:
        return None
    worst = max((value for _, value in outside), key=lambda value: _distance(usual, value))
    return Alert(
        metric=name,
        steps=len(outside),
        recorded=len(recorded),
        first_step=outside[0][0],
        worst=worst,
        says=usual.says if usual and math.isfinite(worst) else NOT_FINITE,
        advice=usual.advice if usual and math.isfinite(worst) else NOT_FINITE_ADVICE,
    )


def _distance(usual: UsualRange | None, value: float) -> float:
    """How far outside the range the value lies; infinite for NaN, so that NaN counts as the worst."""
    if usual is None or not math.isfinite(value):
        return math.inf
    return max(usual.low - value, value - usual.high)

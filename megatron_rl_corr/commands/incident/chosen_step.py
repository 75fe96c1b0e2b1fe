"""The step of a run that is looked at: why it, its alerts and the ledger about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_rl_corr.core.ledger_verdict import verdict_line
from megatron_rl_corr.observability.alerts import alert_steps, find_alerts

KL, NO_UPDATE = "rollout_corr/k3_kl", "skipped"


def choose_step(rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """(step, why): the last one with an alert other than that of no update, which a solved task has at its
    end; else the last one with any, else that of the largest k3_kl.

    Args:
        rows: of the run.

    Raises:
        ValueError: there is neither.
    """
    alerts = alert_steps([{k: v for k, v in row.items() if k != NO_UPDATE} for row in rows])
    alerts = alerts or alert_steps(rows)
    if alerts:
        names = ", ".join(alert.metric for alert in find_alerts([_row(rows, alerts[-1])]))
        return alerts[-1], f"the last step with an alert: {names}"
    known = [row for row in rows if math.isfinite(row.get(KL, math.nan))]
    if not known:
        raise ValueError(f"no step has an alert or {KL}; give --step N")
    largest = max(known, key=lambda row: row[KL])
    return largest["step"], f"no step has an alert, and its {KL} {largest[KL]:.3g} is the largest"


def alerts_of(row: dict[str, Any]) -> list[str]:
    """The alerts of one step, in words."""
    return [f"{alert.metric}: {alert.sentence} {alert.advice}" for alert in find_alerts([row])]


def ledger_of(rows: Sequence[dict[str, Any]], step: int) -> str | None:
    """The verdict of the last ledger up to a step; None where the run has none."""
    known = [row for row in rows if row["step"] <= step and "ledger/mean_square" in row]
    return f"step {known[-1]['step']}: {verdict_line(known[-1])}" if known else None


def _row(rows: Sequence[dict[str, Any]], step: int) -> dict[str, Any]:
    return next(row for row in rows if row["step"] == step)

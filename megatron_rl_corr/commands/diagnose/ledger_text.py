"""`megatron-rl-corr diagnose`: the ledger of a run from its metrics: shares, their trend, the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_rl_corr.core.ledger_places import DISAGREEMENT, pooled_chance
from megatron_rl_corr.core.ledger_verdict import TERMS, verdict_line
from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics
from megatron_rl_corr.tables import readable, text_table

NEEDED = {"ledger/mean_square", "ledger/mean_abs", "ledger/noise"}


def diagnosis(run_dir: str) -> str:
    """A table of the terms over all batches with a ledger, in halves, and the verdict on all and the last.

    Args:
        run_dir: the folder of --rollout-log-dir.

    Raises:
        ValueError: there is no metrics file, or no step has a ledger.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{run_dir} has no {FILE_NAME}: give the folder of --rollout-log-dir")
    rows = [row for row in read_metrics(path) if row.get("ledger/tokens", 0) > 0 and row.keys() >= NEEDED]
    if not rows:
        raise ValueError(
            f"{path}: no step has a ledger of its mismatch; train with --rollout-ledger-interval N"
        )
    half = len(rows) // 2  # of an odd number, the one in the middle is in neither
    whole = _pooled(rows)
    first, last = (_pooled(rows[:half]), _pooled(rows[-half:])) if half else ({}, {})
    known = [name for name in TERMS if f"ledger/{name}/share" in whole]
    table = [("term", "share", "first half", "last half", "mean |term|")]
    for name in known:
        shares = [one.get(f"ledger/{name}/share", math.nan) for one in (whole, first, last)]
        size = readable(whole[f"ledger/{name}/mean_abs"])
        ledgers = sum(f"ledger/{name}/share" in row for row in rows)
        told = name if ledgers == len(rows) else f"{name} (in {ledgers} of {len(rows)} ledgers)"
        table.append((told, *(_percent(share) for share in shares), size))
    steps = [row["step"] for row in rows]
    absent = [name for name in TERMS if name not in known]
    return "\n".join(
        [
            f"{len(rows)} ledgers, of steps {steps[0]} to {steps[-1]}"
            if len(rows) > 1
            else f"1 ledger, of step {steps[0]}",
            *text_table(table),
            *([f"without a part here, or in the rest: {', '.join(absent)}"] if absent else []),
            f"all: {verdict_line(whole)}",
            f"step {steps[-1]}: {verdict_line(rows[-1])}",
        ]
    )


def _pooled(rows: Sequence[dict]) -> dict[str, float]:
    """The ledger of several batches, as one of all their tokens would be: shares are weighed by sum(D^2),
    means by tokens.
    """
    tokens = sum(row["ledger/tokens"] for row in rows)
    names = {name for row in rows for name in row if name.startswith(("ledger/", DISAGREEMENT))}
    found = {"ledger/tokens": tokens}
    for name in names - {"ledger/tokens"}:
        if name.startswith(("ledger/as/", "ledger/at/")) or name == "ledger/as_servers":
            found[name] = _pooled_of_rest(rows, name)
        elif name.endswith("_max"):
            found[name] = max((one for _, one in _weighed(rows, name)), default=math.nan)
        else:
            known = _weighed(rows, name)
            whole = sum(weight for weight, _ in known)
            found[name] = sum(weight * one for weight, one in known) / whole if whole else math.nan
    return found


def _weighed(rows: Sequence[dict], name: str) -> list[tuple[float, float]]:
    """(weight, value) of the batches that have a number of this name: its tokens, of a share their D^2."""
    of_term = name.split("/")[1] in TERMS and name.endswith(("/share", "/mean", "/mean_abs"))
    found = []
    for row in rows:
        # A term that a batch has no pass for is 0 there; so is its share where all D are 0.
        value = row.get(name, math.nan)
        if of_term and math.isnan(value):
            value = 0.0
        weight = row["ledger/tokens"] * (row["ledger/mean_square"] if name.endswith("/share") else 1.0)
        if name.startswith(("ledger/decode/as_", "ledger/dist/")):  # of what servers have scored
            weight *= row.get("ledger/decode/known", 1.0)
        if math.isfinite(value):
            found.append((weight, value))
    return found


def _pooled_of_rest(rows: Sequence[dict], name: str) -> float:
    """A share of the square of the rest of all batches; a cause's times over those that look so; a place's
    excess over the square of the rest; its chance over all batches.
    """
    squares = [row["ledger/tokens"] * row.get("ledger/as_square", 0.0) for row in rows]
    values = [row.get(name, math.nan) for row in rows]
    if name.endswith("/chance"):
        chances = [value for value in values if not math.isnan(value)]
        return pooled_chance(chances) if chances else math.nan
    if name == "ledger/as_servers":  # absent where all servers were looked at
        looked = [row.get(name, 0.0) for row in rows if any(one.startswith("ledger/as/") for one in row)]
        return max(looked) if all(looked) else 0.0
    if name.endswith("/times"):
        share = name.removesuffix("/times") + "/share"
        squares = [square * row.get(share, 0.0) for square, row in zip(squares, rows, strict=True)]
    known = [(square, one) for square, one in zip(squares, values, strict=True) if math.isfinite(one)]
    whole = sum(squares if name.endswith("/share") else [square for square, _ in known])
    return sum(square * one for square, one in known) / whole if whole else math.nan


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{round(100 * share, 1) + 0.0:.1f} %"

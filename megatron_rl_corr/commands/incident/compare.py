"""A replay's metrics against those of the run: which are the same, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_corr.files import METRICS_NAME
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.tables import text_table

NOT_REPLAYED = (
    "time/",
    "tokens_per_s",
    "rollout/",
    "ledger/",
    "eval/",
    "agent/",
    "filtered_mismatch/",
    "auto/",
    "packing/moved_bytes",
)
"""Metrics that are not compared, by the starts of their names: of servers, or of a clock."""


@dataclass(frozen=True)
class ComparedStep:
    """A step of the run and of its replay."""

    step: int
    same: int
    """Metrics that are equal to the last bit."""
    differ: Mapping[str, tuple[float, float | None]]
    """Metric -> (the run's, the replay's); None: the replay has none."""


def compare_steps(bundle: Path, manifest: Mapping[str, Any], log_dir: Path) -> list[ComparedStep]:
    """The steps that the bundle does again.

    Args:
        bundle: the folder.
        manifest: its own.
        log_dir: --rollout-log-dir of the replay.

    Raises:
        OSError, ValueError: the replay has no metrics of a step, or the bundle has none.
    """
    first, last = manifest["replayed_steps"]
    wanted = {row["step"]: row for row in read_metrics(bundle / METRICS_NAME) if first <= row["step"] <= last}
    found = {row["step"]: row for row in read_metrics(log_dir / METRICS_NAME)}
    missing = [step for step in wanted if step not in found]
    if missing or not wanted:
        raise ValueError(
            f"{log_dir / METRICS_NAME} has no step {missing[0]}; is it of the replay?"
            if missing
            else f"{bundle} has no metrics of the steps {first} to {last}, as the run ended in them"
        )
    return [_compared(row, found[step]) for step, row in wanted.items()]


def comparison(steps: list[ComparedStep]) -> str:
    """In words, with a table of what differs."""
    lines = []
    for one in steps:
        total = one.same + len(one.differ)
        lines.append(f"step {one.step}: {one.same} of {total} metrics are the same, bit for bit")
        if one.differ:
            rows = [("metric", "run", "replay", "apart")]
            rows += [
                (name, repr(run), repr(again), _apart(run, again))
                for name, (run, again) in one.differ.items()
            ]
            lines += text_table(rows)
    return "\n".join(lines)


def _compared(row: Mapping[str, float], again: Mapping[str, float]) -> ComparedStep:
    names = [name for name in row if not name.startswith(NOT_REPLAYED)]
    differ = {name: (row[name], again.get(name)) for name in names if not _equal(row[name], again.get(name))}
    return ComparedStep(int(row["step"]), len(names) - len(differ), differ)


def _equal(one: float, other: float | None) -> bool:
    return one == other or (other is not None and math.isnan(one) and math.isnan(other))


def _apart(one: float, other: float | None) -> str:
    if other is None or not (math.isfinite(one) and math.isfinite(other)):
        return "-"
    return f"{abs(one - other) / max(abs(one), abs(other)):.1e}"

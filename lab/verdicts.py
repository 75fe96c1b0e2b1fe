"""What the map says in words and tables: which arm is best where, and whether the usual ordering holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lab.estimators import all_arms
from lab.exact import Moments
from lab.map import BATCHES, Cell, Means
from lab.mismatch import KINDS

ALIKE = 0.02
"""Errors within this share of each other count as alike."""
ORDER = (
    ("none", "token_truncate"),
    ("token_truncate", "sequence_truncate"),
    ("sequence_truncate", "sequence_mask"),
    ("none", "sequence_mask"),
    ("token_truncate", "rule:seq_mean_ratio"),
    ("none", "preset:decoupled_geo_rs_token_tis"),
)
"""(worse, better) as is often said: nothing < token truncation < sequence truncation < sequence masks, and
geometric gates for long responses.
"""
Measure = Callable[[Moments, int], float]
MEASURES: dict[str, Measure] = {
    "error": Moments.error,
    "direction": Moments.direction_error,
}


def best(arms: dict[str, Moments], names: Iterable[str], measure: Measure, batch: int) -> str:
    """The arm of the least error; of those that are alike to it, the first of the names."""
    errors = {name: measure(arms[name], batch) for name in names}
    least = min(errors.values())
    return next(name for name, error in errors.items() if error <= least * (1 + ALIKE))


def table_of_best(means: Means, measure: str) -> str:
    """Markdown: a row a cell; for each batch the best of all arms with its error, and that of none."""
    lines = [
        "| task | kind | size | length | "
        + " | ".join(f"best of N = {n} | error, none's" for n in BATCHES)
        + " |",
        "|---|---|---|---|" + "---|---|" * len(BATCHES),
    ]
    for cell in sorted(means, key=_order):
        columns = []
        for batch in BATCHES:
            known = [
                arm for arm in all_arms() if arm in means[cell]
            ]  # the plainest of those alike comes first
            name = best(means[cell], known, MEASURES[measure], batch)
            pair = (MEASURES[measure](means[cell][arm], batch) for arm in (name, "none"))
            columns += [name, ", ".join(f"{error:.3g}" for error in pair)]
        where = (cell.task, cell.kind, f"{cell.size:g}", str(cell.length))
        lines.append("| " + " | ".join([*where, *columns]) + " |")
    return "\n".join(lines) + "\n"


def _order(cell: Cell) -> tuple:
    return cell.task, list(KINDS).index(cell.kind), cell.size, cell.length


def table_of_order(means: Means, task: str, measure: str, lengths: Sequence[int]) -> str:
    """Markdown: in how many cells of each kind one arm is better, alike and worse than another: 5/3/2."""
    names = [f"{better} over {worse}" for worse, better in ORDER]
    lines = ["| kind | N | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(ORDER)]
    for kind in dict.fromkeys(cell.kind for cell in means):
        for batch in BATCHES:
            of_kind = [
                arms
                for cell, arms in means.items()
                if cell.kind == kind and cell.task == task and cell.length in lengths
            ]
            counts = [_compared(of_kind, *pair, MEASURES[measure], batch) for pair in ORDER]
            if of_kind:
                lines.append(f"| {kind} | {batch} | " + " | ".join(counts) + " |")
    return "\n".join(lines) + "\n"


def _compared(cells: list[dict[str, Moments]], worse: str, better: str, measure: Measure, batch: int) -> str:
    """Cells in which the second arm is better, alike and worse: 5/3/2."""
    ahead = alike = behind = 0
    for arms in cells:
        one, other = measure(arms[worse], batch), measure(arms[better], batch)
        if other < one * (1 - ALIKE):
            ahead += 1
        elif one < other * (1 - ALIKE):
            behind += 1
        else:
            alike += 1
    return f"{ahead}/{alike}/{behind}"

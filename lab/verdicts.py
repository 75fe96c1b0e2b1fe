"""What the map says in words and tables: which arm is best where, and whether the usual ordering holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from lab.estimators import all_arms
from lab.exact import Moments
from lab.map import BATCHES, DRAWN, POLICY_KINDS, Cell, Means
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


def table_of_policies(means: Means) -> str:
    """Markdown: of each kind of policy beside the first, how far its map is that of the first.

    agree: of ORDER's pairs over all cells and batches, in how many the same one is ahead, or both are alike;
    opposite: one ahead here, the other there. Same best arm: of cells and batches; and how much more error
    the table's best arm has here than the best one here, in the median and at worst.
    """
    names = [f"{better} over {worse}" for worse, better in ORDER]
    lines = [
        "| policy | kind | agree | one alike | opposite | same best arm | table's best over the best "
        "| worst | " + " | ".join(names) + " |",
        "|---|---|---|---|---|---|---|---|" + "---|" * len(ORDER),
    ]
    groups = dict.fromkeys((cell.policy_kind, cell.kind) for cell in means)
    for policy, kind in sorted(groups, key=lambda pair: list(POLICY_KINDS).index(pair[0])):
        cells = [cell for cell in means if (cell.policy_kind, cell.kind) == (policy, kind)]
        columns = _agreement(means, cells)
        columns += [_compared_over_batches([means[cell] for cell in cells], *pair) for pair in ORDER]
        lines.append("| " + " | ".join([policy, kind, *columns]) + " |")
    return "\n".join(lines) + "\n"


def _agreement(means: Means, cells: list[Cell]) -> list[str]:
    """What table_of_policies says of these cells against the same ones of the first kind of policy."""
    first = next(iter(POLICY_KINDS))
    verdicts, chosen, excess = [], [], []
    for cell, batch in product(cells, BATCHES):
        here, there = means[cell], means[dataclasses.replace(cell, policy_kind=first)]
        for pair in ORDER:
            one, other = (_ahead(arms, *pair, Moments.error, batch) for arms in (there, here))
            verdicts.append(1 if one == other else one * other)
        theirs, ours = (best(arms, DRAWN, Moments.error, batch) for arms in (there, here))
        chosen.append(theirs == ours)
        excess.append(here[theirs].error(batch) / here[ours].error(batch))
    excess.sort()
    return [
        *(f"{verdicts.count(verdict)} of {len(verdicts)}" for verdict in (1, 0, -1)),
        f"{sum(chosen)} of {len(chosen)}",
        f"{excess[len(excess) // 2]:.2f}",
        f"{excess[-1]:.2f}",
    ]


def _compared_over_batches(cells: list[dict[str, Moments]], worse: str, better: str) -> str:
    counts = [_compared(cells, worse, better, Moments.error, n).split("/") for n in BATCHES]
    return "/".join(str(sum(int(one) for one in of_place)) for of_place in zip(*counts, strict=True))


def _ahead(arms: dict[str, Moments], worse: str, better: str, measure: Measure, batch: int) -> int:
    """1 if the second arm is ahead, 0 if they are alike, -1 if it is behind."""
    return {"1/0/0": 1, "0/1/0": 0, "0/0/1": -1}[_compared([arms], worse, better, measure, batch)]

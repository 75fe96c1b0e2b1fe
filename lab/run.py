"""`make lab`: measures every arm over the map, trains them, and writes tables and figures into a folder."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.auto import AUTO, AUTO_SETTINGS, FIXED_ARMS, table_of_auto, train_on_schedule
from lab.bounds import CERTIFIED_CELLS, certified_rows, rows_of_cases, table_of_bounds, table_of_certificates
from lab.collapses import SETTINGS, TRAINED, table_of_collapses
from lab.estimators import all_arms
from lab.long import long_cells, measured, table_of_long
from lab.map import (
    DRAWN,
    LENGTHS,
    POLICY_KINDS,
    Cell,
    Row,
    cases_of,
    cells_of,
    enumerable_arms,
    means_of,
    rows_of,
)
from lab.mismatch import KINDS
from lab.policies import TASKS
from lab.sampled import FIXED, sampled_moments
from lab.training import Runs, Setting, train
from lab.verdicts import MEASURES, table_of_best, table_of_order, table_of_policies
from megatron_rl_corr.files import write_atomically

PARTS = ("map", "long", "policies", "bounds", "coupled", "training", "auto")
AUTO_SEEDS = 20
FIRST_SEED = 1000
"""Seeds from 0 on are for looking around: settings were chosen with them, and results are of others."""
MAIN_TASK, LONGEST_OF_ALL = "outcome", 6
"""The task and the length up to which all arms are measured; the rest has the arms that are drawn."""
COMPARED_KINDS, LONGEST_COMPARED, MOST_COMPARED = ("rounding", "tail", "lag"), 4, 2
"""Kinds of mismatch and the length up to which others are compared with tables, and policies a cell."""
COUPLED_BATCH, COUPLED_BATCHES = 64, 400
COUPLED_CELLS = tuple(Cell(MAIN_TASK, kind, size, 4) for kind, size in (("rounding", 1.0), ("lag", 8)))
BASELINES = ("group_mean", "grpo", "rloo")
"""Baselines of the batch itself, which arms without coupling are also sampled with."""
WITH_BASELINES = ("none", "token_truncate", "sequence_truncate")
Job, Made = TypeVar("Job"), TypeVar("Made")


def single_threaded() -> None:
    """Each worker has one thread: tensors are small, and machines have other work."""
    torch.set_num_threads(1)


def spread(
    work: Callable[[Job], Made], jobs: list[Job], workers: int, title: str
) -> Iterator[tuple[Job, Made]]:
    """Each job and what came of it, as they end; prints how far it is. One worker is this process."""
    begun, numbered = time.monotonic(), partial(_numbered, work)
    with contextlib.ExitStack() as stack:
        if workers == 1:
            results = map(numbered, enumerate(jobs))
        else:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(workers, initializer=single_threaded))
            results = pool.imap_unordered(numbered, enumerate(jobs))
        for done, (place, made) in enumerate(results, 1):
            so_far = f"{title}: {done} of {len(jobs)}, {time.monotonic() - begun:.0f} s"
            print(f"\r{so_far} ", end="", file=sys.stderr, flush=True)
            yield jobs[place], made
    print(file=sys.stderr)


def _numbered(work: Callable[[Job], Made], job: tuple[int, Job]) -> tuple[int, Made]:
    return job[0], work(job[1])


def _measured(cell: Cell) -> list[Row]:
    arms = enumerable_arms()
    if cell.task != MAIN_TASK or cell.length > LONGEST_OF_ALL:
        arms = [arm for arm in arms if arm.name in DRAWN]
    return rows_of(cell, arms)


def make_map(out: Path, kinds: Iterable[str], lengths: Iterable[int], workers: int) -> None:
    """map.csv, best_*.md, order_*.md, map_*.svg and laws.svg."""
    rows: list[Row] = []
    for _, found in spread(_measured, cells_of(TASKS, kinds, lengths), workers, "map"):
        rows += found
    rows.sort(
        key=lambda row: tuple(str(row[name]) for name in ("task", "kind", "length", "size", "policy", "arm"))
    )
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(out / "map.csv", table.getvalue().encode())
    show_map(out, rows)


def show_map(out: Path, rows: list[Row]) -> None:
    """The tables and figures of rows."""
    from lab.pictures import draw_laws, draw_map

    means = means_of(rows)
    for measure in MEASURES:
        write_atomically(out / f"best_{measure}.md", table_of_best(means, measure).encode())
        order = [
            f"## {task}, {lengths[0]} to {lengths[-1]} tokens\n\n"
            + table_of_order(means, task, measure, lengths)
            for task in TASKS
            for lengths in ((1, 2), (4, 6, 8))
        ]
        write_atomically(out / f"order_{measure}.md", "\n".join(order).encode())
        for task in TASKS:
            draw_map(means, task, measure, out / f"map_{task}_{measure}.svg")
    if any(row["kind"] == "rounding" for row in rows):
        draw_laws(rows, out / "laws.svg")


def _tell_nothing(part: str, has: str) -> None:
    print(f"{part}: nothing of what was asked for, and no file; it has {has}")


def make_policies(out: Path, kinds: Iterable[str], lengths: Iterable[int], workers: int) -> None:
    """policies.md: whether the map's order holds for other policies."""
    kinds = [kind for kind in kinds if kind in COMPARED_KINDS]
    lengths = [length for length in lengths if length <= LONGEST_COMPARED]
    cells = [
        replace(cell, policy_kind=kind)
        for cell in cells_of([MAIN_TASK], kinds, lengths)
        for kind in POLICY_KINDS
    ]
    if not cells:
        _tell_nothing(
            "policies", f"the kinds {', '.join(COMPARED_KINDS)}, and lengths up to {LONGEST_COMPARED}"
        )
        return
    rows = [row for _, found in spread(_compared, cells, workers, "policies") for row in found]
    write_atomically(out / "policies.md", table_of_policies(means_of(rows)).encode())


def _compared(cell: Cell) -> list[Row]:
    return rows_of(cell, [all_arms()[name] for name in DRAWN], MOST_COMPARED)


def make_bounds(out: Path, blocks: int, workers: int) -> None:
    """bounds.md, certificates.md and bounds.svg."""
    from lab.pictures import draw_bounds

    seeds = list(range(blocks))
    rows = [row for _, found in spread(rows_of_cases, seeds, workers, "bounds") for row in found]
    rows.sort(key=lambda row: row["case"])
    write_atomically(out / "bounds.md", table_of_bounds(rows).encode())
    draw_bounds(rows, out / "bounds.svg")
    lines = dict(spread(certified_rows, list(CERTIFIED_CELLS), workers, "certificates"))
    table = table_of_certificates([line for cell in CERTIFIED_CELLS for line in lines[cell]])
    write_atomically(out / "certificates.md", table.encode())


def _sampled(job: tuple[Cell, str, str]) -> dict[str, Any]:
    cell, name, baseline = job
    case = next(cases_of(cell, 1))
    found = sampled_moments(
        case, all_arms()[name], batch=COUPLED_BATCH, batches=COUPLED_BATCHES, seed=1, baseline=baseline
    )
    return asdict(found) | {"error": found.error}


def make_coupled(out: Path, workers: int) -> None:
    """coupled.md: estimators that need Monte Carlo, beside those of the map sampled alike."""
    coupled = [arm.name for arm in all_arms().values() if arm.couples_samples]
    arms = [(name, FIXED) for name in (*WITH_BASELINES, *coupled)]
    arms += [(name, baseline) for name in WITH_BASELINES for baseline in BASELINES]
    jobs = [(cell, *arm) for cell in COUPLED_CELLS for arm in arms]
    found = dict(spread(_sampled, jobs, workers, "coupled"))
    lines = [
        f"{COUPLED_BATCHES} batches of {COUPLED_BATCH} responses, one policy; +- is one standard error.",
        "",
        "| kind | size | arm | baseline | bias^2 | variance of the batch | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell, arm, baseline in jobs:
        one = found[cell, arm, baseline]
        pairs = [f"{one[name]:.3f} +- {one[name + '_se']:.3f}" for name in ("bias2", "variance")]
        cells = (cell.kind, f"{cell.size:g}", arm, baseline, *pairs, f"{one['error']:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    write_atomically(out / "coupled.md", ("\n".join(lines) + "\n").encode())


def _trained(job: tuple[Setting, str], seeds: range) -> Runs:
    setting, arm = job
    return train(setting, all_arms()[arm], seeds=seeds)


def make_training(
    out: Path, settings: Iterable[Setting], arms: Iterable[str], seeds: range, workers: int
) -> None:
    """collapse.md, training.json and training.svg."""
    from lab.pictures import draw_trainings

    jobs = [(setting, arm) for setting in settings for arm in arms]
    if not jobs:
        _tell_nothing("training", f"the kinds {', '.join(sorted({setting.kind for setting in SETTINGS}))}")
        return
    longest_first = sorted(jobs, key=lambda job: -job[0].steps * job[0].batch)
    found = dict(spread(partial(_trained, seeds=seeds), longest_first, workers, "training"))
    runs: dict[str, dict[str, Runs]] = {}
    for setting, arm in jobs:
        runs.setdefault(setting.name, {})[arm] = found[setting, arm]
    content = {
        setting: {
            arm: {
                "collapsed": one.collapsed.tolist(),
                "end": one.rewards[-1].tolist(),
                "best": one.rewards.max(dim=0).values.tolist(),
                "mean_by_step": one.rewards.mean(dim=1).tolist(),
                "k3_by_step": one.gap.mean(dim=1).tolist(),
            }
            for arm, one in arms.items()
        }
        for setting, arms in runs.items()
    }
    content = {"seeds": [seeds.start, seeds.stop], "settings": content}
    write_atomically(out / "training.json", json.dumps(content).encode())
    write_atomically(out / "collapse.md", table_of_collapses(runs).encode())
    draw_trainings(runs, out / "training.svg")


def make_long(out: Path, kinds: Iterable[str], workers: int) -> None:
    """long.md: the levels of weights on responses of 16 to 256 tokens."""
    cells = long_cells(kinds)
    if not cells:
        _tell_nothing("long", f"the kinds {', '.join(sorted({cell.kind for cell in long_cells(KINDS)}))}")
        return
    found = dict(spread(measured, cells, workers, "long"))
    write_atomically(out / "long.md", table_of_long(found[cell] for cell in cells).encode())


def _trained_on_schedule(job: tuple[str, str], seeds: range) -> tuple[Runs, torch.Tensor]:
    setting, arm = job
    return train_on_schedule(AUTO_SETTINGS[setting], arm, seeds=seeds)


def make_auto(out: Path, seeds: range, workers: int) -> None:
    """auto.md and auto.svg: weights that are chosen, under a mismatch that changes, beside fixed ones."""
    from lab.pictures import draw_trainings

    jobs = [(setting, arm) for setting in reversed(AUTO_SETTINGS) for arm in (AUTO, *FIXED_ARMS)]
    found = dict(spread(partial(_trained_on_schedule, seeds=seeds), jobs, workers, "auto"))
    runs = {setting: {arm: found[setting, arm] for arm in (AUTO, *FIXED_ARMS)} for setting in AUTO_SETTINGS}
    write_atomically(out / "auto.md", table_of_auto(runs).encode())
    shown = {
        setting: {arm: arms[arm][0] for arm in (AUTO, "none", "token_truncate", "sequence_truncate")}
        for setting, arms in runs.items()
    }
    draw_trainings(shown, out / "auto.svg")


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="make lab", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/lab"), help="folder for what it writes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of the mismatch"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, choices=LENGTHS, default=LENGTHS, help="of responses, in the map"
    )
    parser.add_argument("--arms", nargs="+", choices=TRAINED, default=TRAINED, help="that are trained")
    parser.add_argument("--seeds", type=int, default=100, help="trainings of each arm and setting")
    parser.add_argument("--blocks", type=int, default=240, help="of random policies whose bias is bounded")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    asked = parser.parse_args(arguments)
    single_threaded()
    asked.out.mkdir(parents=True, exist_ok=True)
    if "map" in asked.parts:
        make_map(asked.out, asked.kinds, asked.lengths, asked.workers)
    if "long" in asked.parts:
        make_long(asked.out, asked.kinds, asked.workers)
    if "policies" in asked.parts:
        make_policies(asked.out, asked.kinds, asked.lengths, asked.workers)
    if "bounds" in asked.parts:
        make_bounds(asked.out, asked.blocks, asked.workers)
    if "coupled" in asked.parts:
        make_coupled(asked.out, asked.workers)
    if "training" in asked.parts:
        settings = [setting for setting in SETTINGS if setting.kind in asked.kinds]
        seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
        make_training(asked.out, settings, asked.arms, seeds, asked.workers)
    if "auto" in asked.parts:
        make_auto(asked.out, range(asked.first_seed, asked.first_seed + AUTO_SEEDS), asked.workers)
    print(f"results are in {asked.out}")


if __name__ == "__main__":
    main()

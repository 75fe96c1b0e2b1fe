"""What a soak has seen: its table, and the picture of its rewards."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import psutil
import pyarrow.parquet as pq

from megatron_rl_corr.events import read_events
from tools.local_server import LocalServerError

MOST_GROWTH = 20.0
"""A process's memory is flat where it grows by at most so many MiB in 100 steps, behind its start."""
WARM_UP, LEAST_STEPS = 150, 100
"""Steps of a process's life that are its start, and how many more it must live to be judged. Until then
allocators and caches fill: a rank takes 15 to 27 MiB in 100 steps at first, and 3 behind its 350th. All
ranks are started again whenever one is killed, each 120 steps, so mostly the run without faults is judged.
"""
NEAR = 0.05
"""Largest difference of the mean reward of the last tenth of the steps from that without faults."""
GROUP_SIZE, GROUPS = 8, 8
COLOURS = {
    "killed": "#D55E00",
    "restarted": "#E69F00",
    "stopped": "#CC79A7",
    "slow": "#56B4E9",
    "nonsense": "#009E73",
    "rank killed": "#222222",
}


@dataclass
class Seen:
    """One run, watched until its end."""

    steps: list[dict] = field(default_factory=list)
    memory: dict[str, list[tuple[int, float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Who -> (step, MiB in memory, number of the process)."""
    starts: int = 0
    seconds: float = 0.0
    stuck: bool = False
    status: int | None = None

    def remember(self, step: int, ranks, servers) -> None:
        """How much memory everybody has now."""
        own = {f"rank {number}": [rank] for number, rank in enumerate(ranks)}
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess, LocalServerError):
                process = psutil.Process(server.server.pid)
                own[f"server {server.number}"] = [process, *process.children(recursive=True)]
        for who, processes in own.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                resident = sum(process.memory_info().rss for process in processes)
                self.memory[who].append((step, resident / 2**20, processes[0].pid))


def growth(points: list[tuple[int, float, int]]) -> list[float]:
    """MiB per 100 steps of each process that lives long enough to be judged, the slowest growing first.

    The median of the slopes between any two steps of its life (Theil-Sen), each with the median of its
    readings: so neither a peak nor a single step upwards counts, but what goes on does.
    """
    lives: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, mib, pid in points:
        lives[pid][step].append(mib)
    found = []
    for readings in lives.values():
        steps = np.array([step for step in sorted(readings) if step > min(readings) + WARM_UP])
        if not len(steps) or steps[-1] - steps[0] < LEAST_STEPS:
            continue
        mib = np.array([np.median(readings[step]) for step in steps])
        one, other = np.triu_indices(len(steps), 1)
        found.append(float(np.median((mib[other] - mib[one]) / (steps[other] - steps[one]))) * 100)
    return sorted(found)


def memory_rows(seen: Seen, name: str) -> list[tuple[str, str, str, bool]]:
    """Rows of the table: every rank and server of a run, by its processes. What a server takes is
    told, not judged.
    """
    rows = []
    for who, points in sorted(seen.memory.items()):
        slopes, is_rank = growth(points), who.startswith("rank")
        text = (
            "no process lived long enough"
            if not slopes
            else (f"{slopes[0]:+.1f} to {slopes[-1]:+.1f}, of {len(slopes)} processes that lived long enough")
        )
        rows.append(
            (
                f"memory of {who}, {name}, MiB per 100 steps",
                f"flat: {MOST_GROWTH:+.0f} at most" if is_rank else "told: it is the server's own",
                text,
                not is_rank or (bool(slopes) and slopes[-1] <= MOST_GROWTH),
            )
        )
    return rows


def accounted(folder: Path) -> dict[str, list]:
    """What became of every group number: those that no file and no event has, those trained in two
    steps, half ones.
    """
    trained: dict[int, Counter] = defaultdict(Counter)
    for file in sorted((folder / "samples").glob("*.parquet")):
        step = int(file.name.split("_")[1])
        for group in pq.read_table(file, columns=["group"]).column("group").to_pylist():
            trained[group][step] += 1
    events = folder / "events.jsonl"
    dropped = {event.get("group") for event in read_events(events) if event["kind"] == "group_dropped"}
    last = max(trained, default=-1)
    return {
        "lost": [group for group in range(last + 1) if group not in trained and group not in dropped],
        "twice": [group for group, steps in trained.items() if len(steps) > 1],
        "not whole": [group for group, steps in trained.items() if sum(steps.values()) % GROUP_SIZE],
        "trained": sorted(trained),
        "dropped": sorted(group for group in dropped if group not in trained),
    }


def write_report(out: Path, options, seen: Seen, faults, compared: Seen | None) -> bool:
    """soak.md, soak.json and soak.png in `out`; whether all is as promised."""
    rows, groups = [], accounted(out / "faults")
    events = Counter(event["kind"] for event in read_events(out / "faults/events.jsonl"))
    numbers = [row["step"] for row in seen.steps]
    complete = numbers == list(range(1, options.steps + 1))
    restarts = f"{events['run_restarted']} restarts by torchrun, {seen.starts - 1} by the soak"
    rows.append(
        (
            "steps",
            f"each of {options.steps} once",
            f"{len(numbers)}, {restarts}",
            complete and not seen.stuck and seen.starts == 1,
        )
    )
    rows.append(
        (
            "groups of samples",
            f"each trained once, whole; {options.steps * GROUPS} of them",
            f"{len(groups['trained'])} trained, {len(groups['dropped'])} dropped and told, "
            f"{len(groups['lost'])} lost, {len(groups['twice'])} trained twice, {len(groups['not whole'])} "
            "not whole",
            not (groups["lost"] or groups["twice"] or groups["not whole"])
            and len(groups["trained"]) == options.steps * GROUPS,
        )
    )
    tenth = max(1, options.steps // 10)
    reward = float(np.mean([row["reward/mean"] for row in seen.steps[-tenth:]] or [np.nan]))
    if compared is not None:
        other = float(np.mean([row["reward/mean"] for row in compared.steps[-tenth:]] or [np.nan]))
        rows.append(
            (
                f"mean reward of the last {tenth} steps",
                f"{other:.3f} without faults, ± {NEAR}",
                f"{reward:.3f}",
                abs(reward - other) <= NEAR,
            )
        )
        rows += memory_rows(compared, "without faults")
    rows += [
        row
        for row in memory_rows(seen, "with faults")
        if compared is None or not row[2].startswith("no process")
    ]
    kinds = Counter(fault.kind for fault in faults)
    text = [
        f"{options.steps} steps of the quickstart in {seen.seconds / 60:.0f} min on {psutil.cpu_count()} "
        f"cores ({platform.machine()}), {time.strftime('%Y-%m-%d')}, seed {options.seed}: {len(faults)} "
        "faults, " + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) + ".",
        "",
        "| what | promised | seen | verdict |",
        "|---|---|---|---|",
        *(
            f"| {what} | {promised} | {found} | {'PASS' if good else 'FAIL'} |"
            for what, promised, found, good in rows
        ),
        "",
        "Events: " + ", ".join(f"{kind} {count}" for kind, count in sorted(events.items())) + ".",
    ]
    (out / "soak.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    (out / "soak.json").write_text(
        json.dumps(
            {
                "faults": [vars(fault) for fault in faults],
                "groups": {name: len(own) for name, own in groups.items()},
                "lost": groups["lost"][:50],
                "twice": groups["twice"][:50],
                "memory": seen.memory,
            }
        )
    )
    draw(out / "soak.png", seen, faults, compared)
    return all(good for *_, good in rows)


def draw(path: Path, seen: Seen, faults, compared: Seen | None) -> None:
    """Rewards with and without faults, the faults as lines, and memory below."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 6.5), dpi=110, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        for run, colour, label in ((compared, "#999999", "without faults"), (seen, "#0072B2", "with faults")):
            if run is not None and run.steps:
                top.plot(
                    [row["step"] for row in run.steps],
                    [row["reward/mean"] for row in run.steps],
                    color=colour,
                    linewidth=1.4,
                    label=label,
                )
        for kind, colour in COLOURS.items():
            own = [fault.step for fault in faults if fault.kind == kind]
            if own:
                top.plot(
                    own,
                    [0.015] * len(own),
                    "^",
                    color=colour,
                    markersize=6,
                    label=kind,
                    transform=top.get_xaxis_transform(),
                    clip_on=False,
                )
                top.vlines(
                    own, 0, 1, color=colour, linewidth=0.5, alpha=0.5, transform=top.get_xaxis_transform()
                )
        top.set(ylabel="mean reward of a step", title="The quickstart with a random fault now and then")
        top.legend(ncols=4, frameon=False, loc="lower right")
        for who, points in sorted(seen.memory.items()):
            bottom.plot(
                [step for step, _, _ in points], [mib for _, mib, _ in points], linewidth=1, label=who
            )
        bottom.set(xlabel="step", ylabel="memory, MiB", ylim=(0, None))
        bottom.legend(ncols=6, frameon=False, fontsize=8)
        figure.savefig(path)

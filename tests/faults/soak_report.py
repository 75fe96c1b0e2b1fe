"""What a soak has seen: its table, line by line against what was promised, and its picture."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow.parquet as pq

NAMES = ("faults", "compared")
"""Folders of the two runs."""
MOST_GROWTH, MOST_FILES = 10.0, 1.0
"""A rank's memory is flat where it grows by at most so many MiB in 100 steps, behind its start; its open
files by so many.
"""
WARM_UP, LEAST_STEPS = 150, 100
"""Steps of a process's life that are its start, and how many more it must live to be judged: until then
allocators and caches fill. All ranks are started again whenever one is killed, so none is killed behind the
600th of a thousand steps.
"""
SHORT = 600
"""Steps below which nothing is said of memory."""
NEAR = 0.02
"""Largest difference of the mean reward of the last hundred steps from that without faults."""
LAST = 100
FAULTS, CHANGES = 60, 30
"""Least in a thousand steps."""
SPEED = 0.8
"""Least throughput, as a share of that without faults."""
MISMATCH = 10.0
"""Largest k3 of a step, as a multiple of the largest without faults: samples of other weights than their
step's would make it hundreds of times as large.
"""
COLOURS = {
    "killed": "#D55E00",
    "restarted": "#E69F00",
    "killed in a push": "#8C2D04",
    "stopped": "#CC79A7",
    "slow": "#56B4E9",
    "dripping": "#0072B2",
    "nonsense": "#009E73",
    "answers lost": "#5AAE61",
    "push answer lost": "#7570B3",
    "push answer wrong": "#542788",
    "rank killed": "#222222",
    "job killed": "#777777",
}
LEFT = "it was taken out of the list"
"""How the reason of the run's event for a leave begins: other events tell that it lost a server."""


@dataclass
class Seen:
    """One run: what its files say."""

    steps: list[dict] = field(default_factory=list)
    """What is written of each step."""
    watch: list[dict] = field(default_factory=list)
    """What the soak saw every few seconds."""
    events: list[dict] = field(default_factory=list)
    faults: list[dict] = field(default_factory=list)
    changes: list[dict] = field(default_factory=list)
    end: dict | None = None
    """None: it has not ended."""
    groups: dict[str, list] = field(default_factory=dict)
    """As of `accounted`."""


@dataclass(frozen=True)
class Line:
    """A line of the table. good: None where it could not be judged; told: it is not to be judged."""

    what: str
    promised: str
    faults: str
    compared: str
    good: bool | None
    is_told: bool = False

    @property
    def verdict(self) -> str:
        return "told" if self.is_told else {True: "PASS", False: "FAIL", None: "not judged"}[self.good]


def lines_of(path: Path) -> list[dict]:
    """The JSON lines of a file; one that is being written is left out."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_step(path: Path) -> int:
    """The step of the last whole line of metrics."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - (1 << 17)))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def accounted(folder: Path, last: int, group_size: int) -> dict[str, list]:
    """What became of every group number in the steps up to `last`: those that no file and no event has, those
    trained in two steps, and those that are not whole; and samples of other weights than those of their step.
    """
    trained: dict[int, Counter] = defaultdict(Counter)
    stale = []
    for file in sorted((folder / "samples").glob("*.parquet")):
        step = int(file.name.split("_")[1])
        if step > last:
            continue
        table = pq.read_table(file, columns=["group", "weight_versions"])
        for group in table.column("group").to_pylist():
            trained[group][step] += 1
        for spans in table.column("weight_versions").to_pylist():
            if {int(span["version"].rpartition("-")[2]) for span in spans} != {step - 1}:
                stale.append(step)
    events = lines_of(folder / "events.jsonl")
    dropped = {event.get("group") for event in events if event["kind"] == "group_dropped"}
    end = max(trained, default=-1)
    return {
        "lost": [group for group in range(end + 1) if group not in trained and group not in dropped],
        "twice": [group for group, steps in trained.items() if len(steps) > 1],
        "not whole": [group for group, steps in trained.items() if sum(steps.values()) != group_size],
        "trained": sorted(trained),
        "dropped": sorted(group for group in dropped if group not in trained),
        "stale": stale,
    }


def read_run(folder: Path, group_size: int) -> Seen:
    """All that a run has left."""
    steps = lines_of(folder / "metrics.jsonl")
    end = folder / "end.json"
    return Seen(
        steps,
        lines_of(folder / "watch.jsonl"),
        lines_of(folder / "events.jsonl"),
        lines_of(folder / "faults.jsonl"),
        lines_of(folder / "changes.jsonl"),
        json.loads(end.read_text()) if end.is_file() else None,
        accounted(folder, steps[-1]["step"] if steps else 0, group_size),
    )


def growth(points: list[tuple[int, float, int]]) -> list[float]:
    """Growth in 100 steps of each process that lives long enough to be judged, the slowest growing first.

    points: (step, MiB or open files, number of the process).

    The median of the slopes between any two steps of its life (Theil-Sen), each with the median of its
    readings: so neither a peak nor a single step upwards counts, but what goes on does.
    """
    lives: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, value, pid in points:
        lives[pid][step].append(value)
    found = []
    for readings in lives.values():
        steps = np.array([step for step in sorted(readings) if step > min(readings) + WARM_UP])
        if not len(steps) or steps[-1] - steps[0] < LEAST_STEPS:
            continue
        values = np.array([np.median(readings[step]) for step in steps])
        one, other = np.triu_indices(len(steps), 1)
        found.append(float(np.median((values[other] - values[one]) / (steps[other] - steps[one]))) * 100)
    return sorted(found)


def readings(seen: Seen, who: str, place: int) -> list[tuple[int, float, int]]:
    """Points for `growth`; place: 0 is memory, 2 open files."""
    own = [(row["step"], row["memory"].get(who)) for row in seen.watch]
    return [(step, float(one[place]), one[1]) for step, one in own if one is not None]


def processes(seen: Seen) -> list[str]:
    """Ranks and servers."""
    return sorted({who for row in seen.watch for who in row["memory"]})


def confirmed(seen: Seen) -> int:
    """Joins and leaves that the run itself has told, before the next change of that server."""
    found = 0
    for change in seen.changes:
        later = [
            one["at"] for one in seen.changes if one["url"] == change["url"] and one["at"] > change["at"]
        ]
        end = min(later, default=float("inf"))
        kind = "server_joined" if change["kind"] == "join" else "server_removed"
        found += any(
            event["kind"] == kind
            and event.get("server") == change["url"]
            and change["at"] - 1.0 <= event["time"] < end
            and (kind == "server_joined" or event["reason"].startswith(LEFT))
            for event in seen.events
        )
    return found


def speeds(faults: Seen, compared: Seen) -> tuple[float, float]:
    """Steps a minute of both, from when both have done one until the first of them has ended."""
    if not (faults.watch and compared.watch):
        return float("nan"), float("nan")
    moved = [[row for row in seen.watch if row["step"] > 0] for seen in (faults, compared)]
    if not all(moved):
        return float("nan"), float("nan")
    begin = max(rows[0]["time"] for rows in moved)
    end = min(rows[-1]["time"] for rows in moved)
    found = []
    for rows in moved:
        times, steps = [row["time"] for row in rows], [row["step"] for row in rows]
        done = np.interp([begin, end], times, steps)
        found.append(float(done[1] - done[0]) / (end - begin) * 60.0 if end > begin else float("nan"))
    return found[0], found[1]


def ended_well(seen: Seen, steps: int | None) -> bool:
    """Each step once, to the last one; nothing started it again but the faults that killed it all."""
    numbers = [row["step"] for row in seen.steps]
    jobs = sum(fault["kind"] == "job killed" for fault in seen.faults)
    return (
        numbers == list(range(1, (steps or len(numbers)) + 1))
        and seen.end is not None
        and not seen.end["stuck"]
        and seen.end["status"] == 0
        and seen.end["starts"] == 1 + jobs
    )


def reward_of(seen: Seen, last: int) -> float:
    """Mean reward of the hundred steps up to this one."""
    rewards = [row["reward/mean"] for row in seen.steps if last - LAST < row["step"] <= last]
    return float(np.mean(rewards)) if rewards else float("nan")


def judged(facts: dict, faults: Seen, compared: Seen) -> list[Line]:
    """Every line of the promise."""
    both = (faults, compared)
    done = [seen.steps[-1]["step"] if seen.steps else 0 for seen in both]
    last = min(done)
    wanted = facts["steps"]
    least = (wanted or last) / 1000.0
    counts = [Counter(event["kind"] for event in seen.events) for seen in both]

    def each(text):
        return [text(seen) for seen in both]

    found = [
        Line(
            "steps",
            f"each of {wanted or 'them'} once",
            *(
                f"{len(seen.steps)}; {count['run_restarted']} restarts by torchrun, "
                f"{(seen.end or {'starts': 1})['starts'] - 1} by the soak"
                + ("" if seen.end else "; has not ended")
                for seen, count in zip(both, counts, strict=True)
            ),
            all(each(lambda seen: ended_well(seen, wanted))),
        ),
        Line(
            "groups of samples lost or doubled",
            f"0; each trained once, whole, {facts['groups']} a step",
            *each(
                lambda seen: (
                    f"{len(seen.groups['trained'])} trained, "
                    + ", ".join(
                        f"{len(seen.groups[name])} {name}"
                        for name in ("dropped", "lost", "twice", "not whole")
                    )
                )
            ),
            all(
                not (seen.groups["lost"] or seen.groups["twice"] or seen.groups["not whole"])
                and len(seen.groups["trained"]) == facts["groups"] * count > 0
                for seen, count in zip(both, done, strict=True)
            ),
        ),
        Line(
            "samples of other weights than their step's",
            "0",
            *each(lambda seen: str(len(seen.groups["stale"]))),
            not any(each(lambda seen: seen.groups["stale"])),
        ),
        Line(
            "faults",
            f"at least {FAULTS * least:.0f}",
            str(len(faults.faults)),
            str(len(compared.faults)),
            len(faults.faults) >= FAULTS * least and not compared.faults,
        ),
        Line(
            "joins and leaves of servers",
            f"at least {CHANGES * least:.0f} that the run tells",
            f"{confirmed(faults)} of {len(faults.changes)}",
            str(len(compared.changes)),
            confirmed(faults) >= CHANGES * least and not compared.changes,
        ),
    ]
    rewards = each(lambda seen: reward_of(seen, last))
    found.append(
        Line(
            f"mean reward of the last {LAST} steps",
            f"within {NEAR} of each other",
            *(f"{reward:.4f}" for reward in rewards),
            abs(rewards[0] - rewards[1]) <= NEAR,
        )
    )
    worst = each(lambda seen: max((row["rollout_corr/k3_kl"] for row in seen.steps), default=float("nan")))
    found.append(
        Line(
            "largest mismatch (k3) of a step",
            f"at most {MISMATCH:.0f} times that without faults",
            *(f"{one:.2g}" for one in worst),
            worst[0] <= MISMATCH * worst[1],
        )
    )
    speed = speeds(faults, compared)
    found.append(
        Line(
            "steps a minute, while both run",
            f"with faults at least {SPEED:.0%}",
            f"{speed[0]:.1f}, {speed[0] / speed[1]:.0%}",
            f"{speed[1]:.1f}",
            speed[0] >= SPEED * speed[1],
        )
    )
    return found + growth_lines(facts, faults, compared, is_short=(wanted or last) < SHORT)


def growth_lines(facts: dict, faults: Seen, compared: Seen, *, is_short: bool) -> list[Line]:
    """Memory and open files of every rank in both runs; what servers take is told."""
    ranks = [f"rank {rank}" for rank in range(facts["ranks"])]
    servers = sorted(
        {who for seen in (faults, compared) for who in processes(seen) if who.startswith("server")}
    )
    found = []
    for what, unit, place, most, names in (
        ("memory", "MiB", 0, MOST_GROWTH, ranks),
        ("open files", "", 2, MOST_FILES, ranks),
        ("memory", "MiB", 0, None, servers),
    ):
        for who in names:
            slopes = [growth(readings(seen, who, place)) for seen in (faults, compared)]
            if most is None and not any(slopes):
                continue
            good = (
                None
                if is_short
                else all(own and own[-1] <= most for own in slopes)
                if most is not None
                else True
            )
            found.append(
                Line(
                    f"{what} of {who}" + (f", {unit}" if unit else "") + " in 100 steps",
                    "told: it is the server's own" if most is None else f"flat: {most:+.0f} at most",
                    *(growth_text(own) for own in slopes),
                    good,
                    is_told=most is None,
                )
            )
    return found


def growth_text(slopes: list[float]) -> str:
    if not slopes:
        return "no process lived long enough"
    return (
        f"{slopes[0]:+.1f}"
        if len(slopes) == 1
        else f"{slopes[0]:+.1f} to {slopes[-1]:+.1f}, of {len(slopes)}"
    )


def write_report(out: Path) -> int:
    """soak.md and soak.png in `out`: 0 if all is as promised, 1 if something is not, 3 if something could
    not be judged.
    """
    facts = json.loads((out / "soak.json").read_text())
    faults, compared = (read_run(out / name, facts["group_size"]) for name in NAMES)
    lines = judged(facts, faults, compared)
    length = f"{facts['steps']} steps" if facts["hours"] is None else f"{facts['hours']:g} hours"
    kinds = Counter(fault["kind"] for fault in faults.faults)
    fresh = sum(change["is_new"] and change["kind"] == "join" for change in faults.changes)
    ways = Counter(change["kind"] for change in faults.changes)
    minutes = [
        (seen.watch[-1]["time"] - seen.watch[0]["time"]) / 60 if seen.watch else 0.0
        for seen in (faults, compared)
    ]
    text = [
        f"Both runs at the same time, {length}, {facts['ranks']} ranks each: {minutes[0]:.0f} min with "
        f"faults and {minutes[1]:.0f} min without, on {facts['machine']}, {facts['date']}, commit "
        f"{facts['commit']}, seed {facts['seed']}.",
        "",
        f"{len(faults.faults)} faults: "
        + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + ".",
        f"{len(faults.changes)} changes of the list: {ways['leave']} leaves and {ways['join']} joins, "
        f"{fresh} of them of a server that was not there before.",
        "",
        "| what | promised | with faults | without | verdict |",
        "|---|---|---|---|---|",
        *(
            f"| {one.what} | {one.promised} | {one.faults} | {one.compared} | {one.verdict} |"
            for one in lines
        ),
        "",
    ]
    for name, seen in zip(("with faults", "without"), (faults, compared), strict=True):
        events = Counter(event["kind"] for event in seen.events)
        text.append(
            f"Events {name}: "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(events.items()))
            + ".\n"
        )
    (out / "soak.md").write_text("\n".join(text), encoding="utf-8")
    draw(out / "soak.png", faults, compared)
    return exit_status(lines)


def exit_status(lines: list[Line]) -> int:
    """0 if all is as promised, 1 if something is not, 3 if something could not be judged."""
    verdicts = {one.good for one in lines}
    return 1 if False in verdicts else 3 if None in verdicts else 0


def draw(path: Path, faults: Seen, compared: Seen) -> None:
    """Rewards of both; below them each fault and change, by kind; the servers; the memory of ranks."""
    from matplotlib.figure import Figure

    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11, 10.5), dpi=110, layout="constrained")
        top, marks, servers, memory = figure.subplots(4, 1, sharex=True, height_ratios=[3, 4, 1, 2.2])
        for seen, colour, label in (
            (compared, "#999999", "without faults"),
            (faults, "#0072B2", "with faults"),
        ):
            if seen.steps:
                numbers = [row["step"] for row in seen.steps]
                top.plot(
                    numbers,
                    [row["reward/mean"] for row in seen.steps],
                    color=colour,
                    linewidth=1.2,
                    label=label,
                )
        top.set(
            ylabel="mean reward of a step",
            ylim=(0, 1.05),
            title="The same training with and without faults, at the same time",
        )
        top.legend(frameon=False, loc="lower right")
        _draw_marks(marks, faults)
        for name, colour in (("listed", "#999999"), ("well", "#009E73")):
            steps = [row["step"] for row in faults.watch]
            servers.step(
                steps,
                [row[name] for row in faults.watch],
                color=colour,
                linewidth=1.0,
                where="post",
                label=name,
            )
        servers.set(ylabel="servers", ylim=(0, 3.6), yticks=[0, 1, 2, 3])
        servers.legend(ncols=2, frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 1.25))
        for seen, colours, label in (
            (compared, ("#999999", "#BBBBBB"), "without"),
            (faults, ("#0072B2", "#56B4E9"), "with faults"),
        ):
            ranks = [who for who in processes(seen) if who.startswith("rank")]
            for who, colour in zip(ranks, colours * 2, strict=False):
                points = readings(seen, who, 0)
                memory.plot(
                    [step for step, _, _ in points],
                    [mib for _, mib, _ in points],
                    ".",
                    markersize=2,
                    color=colour,
                    label=f"{who}, {label}",
                )
        memory.set(xlabel="step", ylabel="memory, MiB", ylim=(0, None))
        memory.legend(ncols=4, frameon=False, fontsize=8, markerscale=4, loc="lower right")
        figure.savefig(path)


def _draw_marks(axes, faults: Seen) -> None:
    rows = [
        (kind, colour, [one["step"] for one in faults.faults if one["kind"] == kind])
        for kind, colour in COLOURS.items()
    ]
    for kind, is_new, label in (
        ("leave", False, "server leaves"),
        ("leave", True, "server leaves and ends"),
        ("join", False, "server joins"),
        ("join", True, "new server joins"),
    ):
        own = [one["step"] for one in faults.changes if one["kind"] == kind and one["is_new"] == is_new]
        rows.append((label, "#444444", own))
    rows.reverse()
    for place, (_, colour, own) in enumerate(rows):
        axes.axhline(place, color="#EEEEEE", linewidth=0.6, zorder=0)
        axes.plot(own, [place] * len(own), "D", color=colour, markersize=5, linestyle="none")
    axes.set(ylim=(-0.7, len(rows) - 0.3))
    axes.set_yticks(range(len(rows)), [f"{label} ({len(own)})" for label, _, own in rows], fontsize=8)

"""What happened beside the steps, on a run's page: a mark for each event on the time axis, a
row for each kind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.samples.saved_samples import path_setting
from megatron_rl_corr.events import KINDS, read_events

LEFT, WIDTH, LANE, TOP = 190, 1100, 24, 46
"""The picture in its own units: where the time axis begins and ends, height of a kind's lane, and
of what is above.
"""
APART = 5
"""Events of one kind that are nearer than this share a mark."""
NAMED = 6
"""Events that the text of a mark names, at most."""
LABELS_APART = 70
LOST = (
    "server_left_out",
    "server_missed_update",
    "request_retried",
    "sample_failed",
    "group_dropped",
    "prompt_skipped",
    "rank_failed",
    "files_dropped",
    "push_repeated",
    "warning_began",
)
MENDED = ("server_readmitted", "run_resumed", "server_taken_over", "warning_ended")


def page_events(run_dir: Path) -> dict[str, Any] | None:
    """What the page's template needs to show events; None for a run that kept none.

    Where the file can't be read, `why_not` says why: the page is of use without it.
    """
    path = path_setting(run_dir, "events")
    if path is None:
        return None
    try:
        events = _of_run(read_events(path), run_dir.resolve().name)
    except (OSError, ValueError) as error:
        return {"why_not": str(error)}
    kinds = [kind for kind in KINDS if any(event["kind"] == kind for event in events)]
    if not kinds:
        return {"why_not": f"{path} has none"}
    first, last = events[0]["time"], max(events[-1]["time"], events[0]["time"] + 1)

    def place(moment: float) -> float:
        return LEFT + (WIDTH - LEFT) * (moment - first) / (last - first)

    own = {kind: [event for event in events if event["kind"] == kind] for kind in kinds}
    return {
        "why_not": None,
        "width": WIDTH + 20,
        "height": TOP + LANE * len(kinds) + 10,
        "left": LEFT,
        "right": WIDTH,
        "lanes": [_lane(kind, own[kind], TOP + LANE * at + LANE / 2, place) for at, kind in enumerate(kinds)],
        "clock": [
            (LEFT + (WIDTH - LEFT) * part / 4, _since(first + (last - first) * part / 4, first))
            for part in range(5)
        ],
        "steps": _steps(events, place),
        "began": _clock(first),
        "rows": [
            {
                "kind": kind,
                "doc": KINDS[kind],
                "count": len(own[kind]),
                "first": _clock(own[kind][0]["time"]),
                "last": _clock(own[kind][-1]["time"]),
                "reason": own[kind][-1].get("reason", ""),
            }
            for kind in kinds
        ],
    }


def _of_run(events: Sequence[dict], folder: str) -> Sequence[dict]:
    """Those since the run's start at step 1, where runs before it appended to the same file; all
    where none is known.

    Args:
        events: of the file, by time.
        folder: its name: of an `earlier-TIME`, events end where the run began that moved it there.
    """
    moved = [at for at, one in enumerate(events) if one["kind"] == "files_moved" and one.get("to") == folder]
    events = events[: _begin(events, moved[0])] if moved else events
    starts = [at for at, one in enumerate(events) if one["kind"] == "run_started" and one.get("step") == 1]
    return events[_begin(events, starts[-1]) :] if starts else events


def _begin(events: Sequence[dict], at: int) -> int:
    """The first of the events before `at` that, like those of a trainer that is starting, are of no step."""
    while at and events[at - 1].get("step") is None:
        at -= 1
    return at


def _lane(kind: str, events: Sequence[dict], height: float, place) -> dict[str, Any]:
    """The kind's marks: events that would cover each other share one."""
    groups: list[list[dict]] = []
    for event in events:
        if groups and place(event["time"]) - place(groups[-1][0]["time"]) < APART:
            groups[-1].append(event)
        else:
            groups.append([event])
    tone = "lost" if kind in LOST else "mended" if kind in MENDED else "plain"
    marks = [
        {"x": round(place(group[0]["time"]), 1), "size": 4 + min(4, len(group) // 4), "text": _text(group)}
        for group in groups
    ]
    return {"kind": kind, "y": height, "tone": tone, "marks": marks, "count": len(events)}


def _text(events: Sequence[dict]) -> str:
    """What a mark shows under the pointer: a line for each event, the first ones."""
    lines = []
    for event in events[:NAMED]:
        facts = {
            name: value for name, value in event.items() if name not in ("time", "kind", "reason", "step")
        }
        step = f", step {event['step']}" if event.get("step") is not None else ""
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        lines.append(f"{_clock(event['time'])}{step}: {event.get('reason', '')} ({told})")
    if len(events) > NAMED:
        lines.append(f"and {len(events) - NAMED} more until {_clock(events[-1]['time'])}")
    return f"{events[0]['kind']}\n" + "\n".join(lines)


def _steps(events: Sequence[dict], place) -> list[tuple[float, int]]:
    """(place, step) of events that are far enough from each other to carry a label."""
    labels: list[tuple[float, int]] = []
    for event in events:
        at, step = place(event["time"]), event.get("step")
        if isinstance(step, int) and (
            not labels or (at - labels[-1][0] >= LABELS_APART and step != labels[-1][1])
        ):
            labels.append((round(at, 1), step))
    return labels


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


def _since(moment: float, first: float) -> str:
    seconds = int(moment - first)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"

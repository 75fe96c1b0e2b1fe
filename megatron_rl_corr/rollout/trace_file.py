"""Writes the times of a batch as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and
chrome://tracing open.

A slice is an event with ph X, whose ts and dur are microseconds since the trace's base; M events
name the tracks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.rollout.trace import EpisodeTrace, GroupTrace, RequestTrace

MOST_SAMPLES = 4096
"""Samples of a file; further ones of a batch are left out, and `samples_left_out` counts them."""
TRAINER, SAMPLES = 1, 2
"""The two processes that a viewer shows: the trainer's phases, and a track for each sample."""

Slice = tuple[str, float, float, dict[str, Any]]
"""(name, begin, end, arguments), in seconds of `trace.clock`."""
Phase = tuple[str, float, float]
"""(name, begin, end) of a part of a step, in seconds of `trace.clock`."""


def write_trace(
    path: str | os.PathLike,
    groups: Sequence[GroupTrace],
    steps: dict[int, list[Phase]],
    *,
    taken: float | None,
    base: float,
    facts: dict[str, Any],
) -> Path:
    """Write one batch's times of one replica.

    Args:
        path: of the file.
        groups: that the batch took.
        steps: the phases of each of its steps.
        taken: when the groups were taken; None where nothing was sampled.
        base: the time that is 0 in the file.
        facts: go into the file's metadata, such as the wall time of the base.
    """
    tracks = [
        (group, sample) for group in groups for sample in sorted({one.sample for one in group.requests})
    ]
    threads = {
        f"group {group.number} sample {sample}{f' ({lane + 1})' if lane else ''}": slices
        for group, sample in tracks[:MOST_SAMPLES]
        for lane, slices in enumerate(_lanes(group, sample, taken))
    }
    events = [*_names(threads)]
    for number, phases in steps.items():
        if not phases:  # an update that was left out, as its batch had ended early
            continue
        events.append(_slice(f"step {number}", TRAINER, 0, phases[0][1], phases[-1][2], base))
        events += [_slice(name, TRAINER, 0, begin, end, base) for name, begin, end in phases]
    for track, slices in enumerate(threads.values()):
        events += [_slice(name, SAMPLES, track, begin, end, base, args) for name, begin, end, args in slices]
    left_out = len(tracks) - len(tracks[:MOST_SAMPLES])
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": facts | {"samples_left_out": left_out},
    }
    return write_atomically(path, orjson.dumps(content))


def _names(threads: Iterable[str]) -> Iterator[dict[str, Any]]:
    for pid, name in ((TRAINER, "trainer"), (SAMPLES, "samples")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": TRAINER, "tid": 0, "args": {"name": "steps"}}
    for track, name in enumerate(threads):
        yield {"ph": "M", "name": "thread_name", "pid": SAMPLES, "tid": track, "args": {"name": name}}


def _lanes(group: GroupTrace, sample: int, taken: float) -> list[list[Slice]]:
    """The slices of a sample: a slice for the whole of it, and within it what it did, one after the other.

    An episode's turns that an agent asks for at once are in lanes beside it; it waits for the user's code
    where none is under way.
    """
    requests = [one for one in group.requests if one.sample == sample]
    rewards = [(begin, end) for of, begin, end in group.rewards if of in (None, sample)]
    tokens = sum(one.tokens for one in requests)
    whole = {"group": group.number, "sample": sample, "tokens": tokens, "requests": len(requests)}
    lanes: list[list[Slice]] = [[("sample", group.begun, taken, whole)]]
    last = max([group.begun, *(_end(one) for one in requests)])
    episode = next((one for one in group.episodes if one.sample == sample), None)
    if episode is None:
        lanes[0] += [part for request in requests for part in _parts(request)]
    else:
        last = max(last, episode.ended)
        lanes[0].append(("episode", episode.begun, episode.ended, {}))
        turns = _turns(requests)
        lanes[0] += _between(turns, episode)
        ends = [-math.inf]
        for number, begin, end in turns:
            lane = next((at for at, free in enumerate(ends) if free <= begin), len(ends))
            if lane == len(ends):
                ends.append(end)
                lanes.append([])
            ends[lane] = end
            lanes[lane].append((f"answer {number}", begin, end, {}))
            lanes[lane] += [part for one in requests if one.turn == number for part in _parts(one)]
    for begin, end in rewards:
        lanes[0].append(("reward", begin, end, {}))
        last = max(last, end)
    lanes[0].append(("wait", last, taken, {}))
    return lanes


def _end(request: RequestTrace) -> float:
    return request.answered or request.queued


def _turns(requests: Sequence[RequestTrace]) -> list[tuple[int, float, float]]:
    """(number, begin, end) of each turn that was sampled, by begin."""
    found: dict[int, tuple[float, float]] = {}
    for one in requests:
        begin, end = found.get(one.turn, (one.queued, _end(one)))
        found[one.turn] = min(begin, one.queued), max(end, _end(one))
    turns = [(number, begin, end) for number, (begin, end) in found.items() if end > begin]
    return sorted(turns, key=lambda turn: turn[1])


def _between(turns: Sequence[tuple[int, float, float]], episode: EpisodeTrace) -> Iterator[Slice]:
    """When the user's code had the time: no turn was under way."""
    free = episode.begun
    for _, begin, end in [*turns, (-1, episode.ended, episode.ended)]:
        if begin > free:
            yield episode.code, free, begin, {}
        free = max(free, end)


def _parts(request: RequestTrace) -> Iterator[Slice]:
    """The wait for a server, then prefill and decode where the server tells them."""
    if request.sent is None or request.answered is None:
        return
    yield "queued", request.queued, request.sent, {}
    args = {"server": request.server, "tokens": request.tokens, **request.server_times}
    if request.failure is not None:
        yield "failed request", request.sent, request.answered, args | {"failure": request.failure}
        return
    first = request.server_times.get("first_token_s")
    if first is None:
        yield "generate", request.sent, request.answered, args
        return
    # Within the request, whatever the server's clock says.
    middle = max(request.sent, min(request.sent + first, request.answered))
    yield "prefill", request.sent, middle, args
    yield "decode", middle, request.answered, args


def _slice(
    name: str, pid: int, tid: int, begin: float, end: float, base: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    # Both ends are rounded, not the length, so that slices one behind the other never overlap.
    start, stop = round((begin - base) * 1e6), round((end - base) * 1e6)
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": max(stop - start, 0),
        "cat": "trainer" if pid == TRAINER else "sample",
        "args": args or {},
    }

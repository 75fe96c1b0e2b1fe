"""Writes the times of a batch as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and
chrome://tracing open.

A slice is an event with ph X, whose ts and dur are microseconds since the trace's base; M events
name the tracks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.rollout.trace import GroupTrace, RequestTrace

MOST_SAMPLES = 4096
"""Samples of a file; further ones of a batch are left out, and `samples_left_out` counts them."""
TRAINER, SAMPLES = 1, 2
"""The two processes that a viewer shows: the trainer's phases, and a track for each sample."""

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
    events = [*_names(tracks[:MOST_SAMPLES])]
    for number, phases in steps.items():
        if not phases:  # an update that was left out, as its batch had ended early
            continue
        events.append(_slice(f"step {number}", TRAINER, 0, phases[0][1], phases[-1][2], base))
        events += [_slice(name, TRAINER, 0, begin, end, base) for name, begin, end in phases]
    for track, (group, sample) in enumerate(tracks[:MOST_SAMPLES]):
        events += _sample_events(group, sample, track, taken, base)
    left_out = len(tracks) - len(tracks[:MOST_SAMPLES])
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": facts | {"samples_left_out": left_out},
    }
    return write_atomically(path, orjson.dumps(content))


def _names(tracks: Sequence[tuple[GroupTrace, int]]) -> Iterator[dict[str, Any]]:
    for pid, name in ((TRAINER, "trainer"), (SAMPLES, "samples")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": TRAINER, "tid": 0, "args": {"name": "steps"}}
    for track, (group, sample) in enumerate(tracks):
        name = f"group {group.number} sample {sample}"
        yield {"ph": "M", "name": "thread_name", "pid": SAMPLES, "tid": track, "args": {"name": name}}


def _sample_events(
    group: GroupTrace, sample: int, track: int, taken: float, base: float
) -> Iterator[dict[str, Any]]:
    """A slice for the whole sample, and within it what it did, one after the other."""
    requests = [one for one in group.requests if one.sample == sample]
    rewards = [(begin, end) for of, begin, end in group.rewards if of in (None, sample)]
    tokens = sum(one.tokens for one in requests)
    whole = {"group": group.number, "sample": sample, "tokens": tokens, "requests": len(requests)}
    yield _slice("sample", SAMPLES, track, group.begun, taken, base, whole)
    last = group.begun
    for request in requests:
        yield from (
            _slice(name, SAMPLES, track, begin, end, base, args) for name, begin, end, args in _parts(request)
        )
        last = max(last, request.answered or request.queued)
    for begin, end in rewards:
        yield _slice("reward", SAMPLES, track, begin, end, base)
        last = max(last, end)
    yield _slice("wait", SAMPLES, track, last, taken, base)


def _parts(request: RequestTrace) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """(name, begin, end, arguments): the wait for a server, then prefill and decode where the
    server tells them.
    """
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

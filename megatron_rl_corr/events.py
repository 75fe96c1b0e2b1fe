"""What happened to a run beside its steps: what was left out, asked again, dropped or taken back, and why."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from typing import Any

KINDS = {
    "server_left_out": "a server failed, and is not sampled from until it answers again",
    "server_readmitted": "a server that was left out is sampled from again",
    "server_missed_update": "a server does not have the weights of a push, and waits for the next one",
    "server_taken_over": "a server was paused or half updated by a trainer that ended, and is taken over",
    "push_repeated": "weights are sent again, to the servers that are left",
    "request_retried": "a request failed, and its sample was asked for at another server",
    "sample_failed": "a sample failed for good; its group trains nothing",
    "group_dropped": "a group trains nothing",
    "prompt_skipped": "a row of the prompts can't be used",
    "run_started": "the trainer began, at its first step or at a checkpoint's",
    "run_resumed": "samples of a checkpoint go on",
    "files_dropped": "rows or files of steps that a later attempt does anew were removed",
}
"""kind -> what it says. What tells of something new adds its kind here."""


class Events:
    """Counts what happens in this process and, once a file is open, appends a JSON line of each: from any thread.

    Example: {"time": 1763978405.25, "rank": 0, "kind": "server_left_out", "reason": "connection refused",
    "server": "http://a:30000"}
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._file: int | None = None
        self.counts: Counter[str] = Counter()
        """kind -> how often it was told, with and without a file."""

    def open(self, path: str | os.PathLike) -> None:
        """Append to this file from now on. Raises OSError where it can't be written."""
        self.close()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def close(self) -> None:
        """Write no more."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def tell(self, kind: str, reason: str, **facts: Any) -> None:
        """Say what happened.

        Args:
            kind: one of KINDS.
            reason: why, in words.
            facts: whatever JSON allows: `server`, `version`, `step`, `group`, `sample`, `row`.
        """
        if kind not in KINDS:
            raise KeyError(f"{kind} is no kind of event; KINDS in {__name__} has them")
        line = {"time": round(time.time(), 3), "rank": int(os.environ.get("RANK", "0")), "kind": kind,
                "reason": reason} | facts  # fmt: skip
        with self._lock:
            self.counts[kind] += 1
            if self._file is not None:
                os.write(self._file, json.dumps(line).encode() + b"\n")  # one write: ranks append whole lines


EVENTS = Events()
"""This process's."""

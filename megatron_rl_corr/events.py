"""What happened to a run beside its steps: what was left out, asked again, dropped or taken back, and why.

Every process tells its own: leaders of replicas of samples and servers, rank 0 of pushes and starts. With
--rollout-events all of a host's ranks append to one file, a line in one write, which a file system keeps
whole among the processes of one host. Among hosts a shared one may not, so each host has a file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KINDS = {
    "server_left_out": "a server failed, and is not sampled from until it answers again",
    "server_readmitted": "a server that was left out is sampled from again",
    "server_joined": "a server of the list was checked, has the weights, and is sampled from",
    "server_refused": "a server of the list fails a check; it is left out, and asked again later",
    "server_removed": "a server has left the run: it is not in the list any more, or missed a push",
    "servers_awaited": "there is no server, and the run waits for one to join",
    "server_missed_update": "a server does not have the weights of a push, and waits for the next one, or "
    "its restart",
    "server_taken_over": "a server was paused or half updated by a trainer that ended, and is taken over",
    "memory_not_released": "a server did not answer when it was to release its memory to the trainer on its "
    "GPUs",
    "memory_left_released": "the trainer ended while servers had released their memory to it",
    "server_not_compared": "a server's log-probs were not compared with the trainer's after a push",
    "push_repeated": "a push failed, and everything is sent again to the servers that answer",
    "changes_given_up": "pushes send everything from now on, as sending changes alone was not right",
    "local_fault": "this process or its host could reach no server: it had no descriptor, port, memory or "
    "resolver",
    "request_retried": "a request failed, and its sample was asked for at another server",
    "reward_retried": "a request for rewards failed, and is sent again",
    "worker_replaced": "a worker that ran the user's code is gone, and another one takes its place",
    "sample_failed": "a sample, or its reward, failed for good",
    "group_dropped": "a group trains nothing, and another one takes its place",
    "group_filtered": "a group did not pass the filter, and another one is asked for",
    "surplus_ended": "groups beyond those of a step were ended, and are sampled again",
    "prompt_skipped": "a row of the prompts can't be used",
    "prompt_left_out": "a row whose groups failed again and again is not drawn for an epoch",
    "scoring_retried": "a server of the reference did not score a sample, which is asked for again",
    "sample_not_scored": "no server of the reference scored a sample; its KL is left out",
    "run_started": "the trainer began, at its first step or at a checkpoint's",
    "run_restarted": "the trainer began again after a failure, by torchrun or within its process",
    "run_ended": "the trainer ended in order",
    "rank_failed": "a rank raised an error, and all ranks end",
    "run_resumed": "samples of a checkpoint go on",
    "warning_began": "a trend of the metrics warns; the report says what it means",
    "warning_ended": "that trend is over",
    "files_moved": "files of an earlier run in a folder of this one were moved aside",
    "groups_saved": "groups that wait to be trained are in the checkpoint",
    "groups_not_saved": "groups that wait, or samples of others, are not in the checkpoint, and are sampled "
    "again by a run that loads it",
    "groups_restored": "groups that waited at the checkpoint are trained without being sampled again",
    "groups_sampled_again": "groups, or samples, of the checkpoint can't be used, and are asked for again",
    "samples_saved": "finished samples and turns of groups that are being sampled are in the checkpoint",
    "samples_restored": "samples and turns of a checkpoint go on, and are not sampled again",
    "episode_begun_anew": "an environment says something else to the turns of a checkpoint than it did",
    "groups_forgotten": "open groups of a checkpoint are not drawn again, as the data are others",
    "files_dropped": "rows or files of steps that a later attempt does anew were removed",
}
"""kind -> what it says. What tells of something new adds its kind here."""
LONGEST_REASON = 2000
"""Characters: an error may quote a traceback of the user's code."""
WRITE_S = 0.01
"""A line that another rank writes is whole by then, and no half one, where files have no locks."""
LOCK_S, TRY_S = 1.0, 0.001
"""How long a line waits for another rank's, and how often it looks."""
YEAR_10000 = 253402300800
"""Seconds since 1970: later times have no date."""

logger = logging.getLogger(__name__)


class Events:
    """Counts what happens in this process and, once a file is open, appends a JSON line of each:
    from any thread.

    Example: {"time": 1763978405.25, "rank": 0, "step": 12, "kind": "server_left_out", "reason":
    "connection refused", "server": "http://a:30000"}
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._file: int | None = None
        self._path = ""
        self.counts: Counter[str] = Counter()
        """kind -> how often it was told, with and without a file."""
        self.lost = 0
        """Lines that could not be written, as on a full disk."""
        self.step: int | None = None
        """The step under way, from 1; None before the first. Each line has it."""

    def open(self, path: str | os.PathLike) -> None:
        """Append to this file from now on; its folder must be there. Raises OSError where it
        can't be written.

        A link is refused, as is what is no regular file: both may lead out of the folder
        that the user named.
        """
        self.close()
        self._path = os.path.abspath(path)
        self._file = _opened(self._path)

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
        reason = reason[:LONGEST_REASON].encode("utf-8", "replace").decode()  # no half of a surrogate pair
        line = {
            "time": round(time.time(), 3),
            "rank": int(os.environ.get("RANK", "0")),
            "step": self.step,
            "kind": kind,
            "reason": reason,
        } | facts
        with self._lock:
            self.counts[kind] += 1
            if self._file is not None:
                self._write(json.dumps(line).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        """One write, or lines of other ranks might come between. A full disk costs the line, not the run."""
        try:
            self._follow()
            with _locked(self._file):
                if self._ends_in_half_a_line():
                    line = b"\n" + line  # which that half would swallow
                written = os.write(self._file, line)
            error = "the disk is full" if written < len(line) else None
        except OSError as failure:
            error = failure.strerror or str(failure)
        if error is not None:
            self.lost += 1
            if self.lost == 1:
                logger.warning(
                    "`events`: a line could not be written, and is lost (further ones unnamed): %s", error
                )

    def _ends_in_half_a_line(self) -> bool:
        """True if a crash or a full disk has cut a line short, of this rank or another."""
        before = None
        while True:
            size = os.fstat(self._file).st_size
            if not size or os.pread(self._file, 1, size - 1) == b"\n":
                return False
            if size == before:
                return True
            before = size
            time.sleep(WRITE_S)

    def _follow(self) -> None:
        """Open the path anew where the open file is no longer there, deleted or rotated: its
        lines would be lost.
        """
        try:
            moved = not os.path.samestat(os.lstat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            moved = True
        if moved:
            anew = _opened(self._path)
            os.close(self._file)
            self._file = anew


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Within, no other rank of this host writes to the file: it would see half of this one's line.

    Without the lock after LOCK_S, as where a rank is stopped, and on a file system that has none.
    """
    held, until = False, time.monotonic() + LOCK_S
    while not held:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            if time.monotonic() > until:
                break
            time.sleep(TRY_S)
        except OSError:
            break
    try:
        yield
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: str) -> int:
    # Not blocking, or a pipe without a reader would hang the start.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is no regular file")
    return file


EVENTS = Events()
"""This process's."""


def file_of_host(path: str | os.PathLike) -> Path:
    """The file of this process's host: PATH on that of rank 0, PATH.host1 on the next one.

    Without LOCAL_WORLD_SIZE, as where srun starts the ranks, a host has the number of its first rank.
    """
    rank, per_host = os.environ.get("RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE")
    host = int(rank) // int(per_host) if per_host else int(rank) - int(os.environ.get("LOCAL_RANK", rank))
    return Path(f"{path}.host{host}" if host else path)


def read_events(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The events of all hosts' files, by time; a line that a crash has cut short is left out, as is
    one of no event.

    Raises OSError for a file that can't be read.
    """
    path = Path(path)
    of_other_hosts = re.compile(rf"{re.escape(path.name)}\.host\d+")
    files = [path, *(other for other in path.parent.iterdir() if of_other_hosts.fullmatch(other.name))]
    events = []
    for file in files:
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if _is_event(event):
                events.append(event)
    return sorted(events, key=lambda event: event["time"])


def _is_event(line: Any) -> bool:
    """True if a line's JSON is an event, with a time of this era (NaN and infinities are none), a
    kind and a reason.
    """
    if not isinstance(line, dict):
        return False
    moment, kind, reason = line.get("time"), line.get("kind"), line.get("reason", "")
    timed = isinstance(moment, int | float) and 0 <= moment < YEAR_10000
    return timed and isinstance(kind, str) and kind in KINDS and isinstance(reason, str)

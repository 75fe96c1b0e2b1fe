"""The faults of the soak, and the joins and leaves of its servers: chosen at random from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

WITHOUT_S = (2.0, 12.0)
"""How long a server is down, stopped, slow or wrong: between these, at random. A request waits for 10 s."""
RECOVERY_S = 180.0
"""A server that is started again answers within this."""
DRAIN_S = 5.0
"""How long a server that leaves may end what it has in flight."""
PUSH = (
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/continue_generation",
)
"""Requests of a push, of which one is spoiled or met by a kill."""
KINDS = Counter(
    {
        "killed": 3,
        "restarted": 3,
        "stopped": 4,
        "slow": 4,
        "nonsense": 3,
        "dripping": 3,
        "answers lost": 3,
        "killed in a push": 3,
        "push answer lost": 2,
        "push answer wrong": 2,
        "rank killed": 2,
        "job killed": 1,
    }
)
"""How often each comes in a round of them. "killed": a server is started again after a while, with old
weights; "restarted": at once. "stopped": SIGSTOP, then SIGCONT. The door makes "slow" (each answer 0.3 s
later), and of samples "nonsense", "dripping" (a few bytes at a time) and "answers lost"; of one request of a
push it loses the answer or returns a proxy's page. "job killed": torchrun and all ranks; the soak starts it
again.
"""
OF_RANKS = ("rank killed", "job killed")
UNTIL = 0.6
"""Share of the run behind which no rank is killed, so that the memory of some can be judged."""


@dataclass(frozen=True)
class Fault:
    """What was done: at which step, when (Unix seconds), to whom."""

    step: int
    at: float
    kind: str
    victim: str


@dataclass(frozen=True)
class Change:
    """A server that leaves or joins the list. is_new: one that ends, or was not there before.

    Example: Change(120, 1763978405.25, "join", "http://127.0.0.1:41233", True).
    """

    step: int
    at: float
    kind: str
    url: str
    is_new: bool


class Moments:
    """Steps at which something is due, at random: one in `every` steps, the first after half of that."""

    def __init__(self, draw: random.Random, every: int):
        self._draw, self._every, self._next = draw, every, max(1, every // 2)

    def due(self, step: int) -> bool:
        return step >= self._next

    def passed(self, step: int) -> None:
        """It was done: draw the next, at least half of `every` away and at most one and a half."""
        self._next = step + self._draw.randint(max(1, self._every // 2), max(1, self._every * 3 // 2))


class Fleet:
    """The servers of a run and the file that lists them, which is replaced at each change."""

    def __init__(self, listed: Sequence, file: Path, make: Callable[[int], object]):
        """make: starts a server of this number, whose address is its own."""
        self.listed, self.away, self.leaving, self._file, self._make = list(listed), [], [], file, make
        self._number = len(self.listed)
        self.write()

    def write(self) -> None:
        made = self._file.with_suffix(".new")
        made.write_text("# the fleet\n" + "".join(f"{server.door.url}\n" for server in self.listed))
        os.replace(made, self._file)

    def leave(self, server, *, stops: bool) -> None:
        """It is listed no more; one that stops does so after it may have ended what it had."""
        self.listed.remove(server)
        self.write()
        if stops:
            self.leaving.append((time.monotonic() + DRAIN_S + 3.0, server))
        else:
            self.away.append(server)

    def join(self) -> tuple[object, bool]:
        """A server that was away or, without one, a new one; whether it is new. It is listed at once."""
        is_new = not self.away
        if is_new:
            server = self._make(self._number)
            self._number += 1
        else:
            server = self.away.pop()
        self.listed.append(server)
        self.write()
        return server, is_new

    def stop_drained(self) -> None:
        now = time.monotonic()
        for due, server in [one for one in self.leaving if one[0] <= now]:
            self.leaving.remove((due, server))
            server.close()

    def close(self) -> None:
        for server in [*self.listed, *self.away, *(server for _, server in self.leaving)]:
            server.close()


class Faults:
    """Does a fault when one is due; the one before must be over, and its server well again."""

    def __init__(self, fleet: Fleet, training, *, every: int, seed: int):
        self._fleet, self._training = fleet, training
        self._random = random.Random(seed)
        self._moments = Moments(self._random, every)
        self._bag: list[str] = []
        self._undo: Callable[[], None] | None = None
        self._undo_at = 0.0
        self._waits: threading.Thread | None = None
        """For a server that was started again."""
        self.victim = None
        """The server that is not well now."""
        self.done: list[Fault] = []

    def at_step(self, step: int, progress: float) -> None:
        """Undo the last fault when its time is over, and begin one if one is due: call it often, on the main
        thread, with the share of the run that is done.

        A server ends with the thread that has started it.
        """
        if self._undo is not None:
            if time.monotonic() >= self._undo_at:
                undo, self._undo = self._undo, None
                undo()
            return
        if self._waits is not None and self._waits.is_alive():
            return
        self.victim = None
        if not self._moments.due(step) or progress >= 1.0:
            return
        kind = self._drawn(progress)
        server = self._random.choice(self._fleet.listed)
        ranks = self._training.ranks()
        if kind in OF_RANKS and not ranks:  # they are being started
            self._bag.append(kind)
            return
        self._moments.passed(step)
        rank = self._random.randrange(1000) % max(1, len(ranks))
        victim = {"rank killed": f"rank {rank}", "job killed": "all"}.get(kind, f"server {server.number}")
        self.done.append(Fault(step, time.time(), kind, victim))
        print(f"[soak] step {step}: {kind}, {victim}", flush=True)
        if kind == "rank killed":
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks[rank].kill()
        elif kind == "job killed":
            self._training.kill()
        else:
            self.victim = server
            self._begin(kind, server)

    def close(self) -> None:
        """Undo the last fault, and wait for its server."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._waits is not None:
            self._waits.join(RECOVERY_S)

    def _drawn(self, progress: float) -> str:
        while True:
            if not self._bag:  # each kind as often as is said, in a random order
                self._bag = list(KINDS.elements())
                self._random.shuffle(self._bag)
            kind = self._bag.pop()
            if kind not in OF_RANKS or progress < UNTIL:
                return kind

    def _begin(self, kind: str, server) -> None:
        door, path, seconds = server.door, self._random.choice(PUSH), self._random.uniform(*WITHOUT_S)
        self._undo_at = time.monotonic() + (0.0 if kind == "restarted" else seconds)
        if kind in ("killed", "restarted"):
            server.signal(signal.SIGKILL)
            self._undo = partial(self._start, server)
        elif kind == "stopped":
            server.signal(signal.SIGSTOP)
            self._undo = partial(server.signal, signal.SIGCONT)
        elif kind == "killed in a push":
            door.met[path] = partial(server.signal, signal.SIGKILL)
            self._undo = partial(self._start_if_killed, server, path)
        elif kind in ("push answer lost", "push answer wrong"):
            spoiled, how = (
                (door.failing, (None, True)) if kind == "push answer lost" else (door.spoiled, True)
            )
            spoiled[path] = how
            self._undo = partial(spoiled.pop, path, None)
        else:
            name, value = {
                "slow": ("delay_s", 0.3),
                "nonsense": ("nonsense", True),
                "dripping": ("spread_s", 3.0),
                "answers lost": ("losing", True),
            }[kind]
            self._undo = partial(setattr, door, name, getattr(door, name))
            setattr(door, name, value)

    def _start_if_killed(self, server, path: str) -> None:
        if server.door.met.pop(path, None) is None:
            self._start(server)

    def _start(self, server) -> None:
        server.start_again()
        self._waits = threading.Thread(target=server.wait_ready, daemon=True)
        self._waits.start()


class Changes:
    """Lets a server leave or join when a change is due: between `least` and `most` are listed.

    With one server alone each of its faults would be a wait, and nonsense in answer to the probe ends a run.
    """

    def __init__(self, fleet: Fleet, faults: Faults, *, every: int, least: int, most: int, seed: int):
        self._fleet, self._faults, self._least, self._most = fleet, faults, least, most
        self._random = random.Random(seed + 1)
        self._moments = Moments(self._random, every)
        self.done: list[Change] = []

    def at_step(self, step: int, progress: float) -> None:
        """Make a change if one is due; a server that is not well stays."""
        self._fleet.stop_drained()
        if not self._moments.due(step) or progress >= 1.0:
            return
        well = [server for server in self._fleet.listed if server is not self._faults.victim]
        may_leave = len(self._fleet.listed) > self._least and bool(well)
        may_join = len(self._fleet.listed) < self._most
        if not (may_leave or may_join):
            return
        self._moments.passed(step)
        if may_leave and (not may_join or self._random.random() < 0.5):
            server, is_new = self._random.choice(well), self._random.random() < 0.3
            self._fleet.leave(server, stops=is_new)
            kind = "leave"
        else:
            server, is_new = self._fleet.join()
            kind = "join"
        self.done.append(Change(step, time.time(), kind, server.door.url, is_new))
        print(f"[soak] step {step}: {kind} of server {server.number}", flush=True)

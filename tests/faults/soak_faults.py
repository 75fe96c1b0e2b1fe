"""The faults of the soak: one at a time, chosen at random from a seed, each undone after a while."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import psutil

WITHOUT_S = 12.0
"""How long a server is down, stopped, slow or nonsensical."""
RECOVERY_S = 180.0
"""A server that is started again answers within this."""


@dataclass(frozen=True)
class Fault:
    """What was done: at which step, when (Unix seconds), to whom."""

    step: int
    at: float
    kind: str
    victim: str


class Faults:
    """Does a fault whenever `every` more steps are done; the one before must be over, and its
    server well again.

    Kinds: "killed" (a server, started again after a while: stale), "restarted" (killed and started
    again at once), "stopped" (SIGSTOP, then SIGCONT), "slow" (its door), "nonsense" (its door), "rank
    killed" (SIGKILL).
    """

    KINDS = ("killed", "restarted", "stopped", "slow", "nonsense", "rank killed")

    def __init__(self, servers, training, *, every: int, last: int, seed: int):
        """last: the step after which none is begun."""
        self._servers, self._training, self._every, self._last = servers, training, every, last
        self._random = random.Random(seed)
        self._bag: list[str] = []
        self._next = every
        self._undo: Callable[[], None] | None = None
        self._undo_at = 0.0
        self._waits: threading.Thread | None = None
        """For a server that was started again."""
        self.done: list[Fault] = []

    def at_step(self, step: int) -> None:
        """Undo the last fault when its time is over, and begin one if one is due: call it often, on
        the main thread.

        A server ends with the thread that has started it.
        """
        if self._undo is not None:
            if time.monotonic() >= self._undo_at:
                undo, self._undo = self._undo, None
                undo()
            return
        if not self._next <= step <= self._last or (self._waits is not None and self._waits.is_alive()):
            return
        self._next = step + self._every
        if not self._bag:  # each kind as often as the others, in a random order
            self._bag = list(self.KINDS)
            self._random.shuffle(self._bag)
        kind, server, rank = self._bag.pop(), self._random.choice(self._servers), self._random.randrange(4)
        victim = f"rank {rank}" if kind == "rank killed" else f"server {server.number}"
        self.done.append(Fault(step, time.time(), kind, victim))
        print(f"[soak] step {step}: {kind}, {victim}", flush=True)
        if kind == "rank killed":
            self._kill_rank(rank)
        else:
            self._begin(kind, server)

    def close(self) -> None:
        """Undo the last fault, and wait for its server."""
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._waits is not None:
            self._waits.join(RECOVERY_S)

    def _begin(self, kind: str, server) -> None:
        seconds = {"restarted": 0.0, "nonsense": WITHOUT_S / 2}.get(kind, WITHOUT_S)
        self._undo_at = time.monotonic() + seconds
        if kind in ("killed", "restarted"):
            server.signal(signal.SIGKILL)
            self._undo = partial(self._start, server)
        elif kind == "stopped":
            server.signal(signal.SIGSTOP)
            self._undo = partial(server.signal, signal.SIGCONT)
        else:
            name, value = ("delay_s", 0.3) if kind == "slow" else ("nonsense", True)
            self._undo = partial(setattr, server.door, name, getattr(server.door, name))
            setattr(server.door, name, value)

    def _start(self, server) -> None:
        server.start_again()
        self._waits = threading.Thread(target=server.server.wait_ready, daemon=True)
        self._waits.start()

    def _kill_rank(self, rank: int) -> None:
        ranks = self._training.ranks()
        if ranks:  # none while they are being started
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks[rank % len(ranks)].kill()

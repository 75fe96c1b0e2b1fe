"""The faults of the soak: one at a time, chosen at random from a seed, each undone after a while."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass

import psutil

WITHOUT_STEP_S = 12.0
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
    """Does a fault whenever `every` more steps are done; the one before must be over, and its server well again.

    Kinds: "killed" (a server, started again after a while: stale), "restarted" (killed and started again at once),
    "stopped" (SIGSTOP, then SIGCONT), "slow" (its door), "nonsense" (its door), "rank killed" (SIGKILL).
    """

    KINDS = ("killed", "restarted", "stopped", "slow", "nonsense", "rank killed")

    def __init__(self, servers, training, *, every: int, seed: int):
        self._servers, self._training, self._every = servers, training, every
        self._random = random.Random(seed)
        self._bag: list[str] = []
        self._next = every
        self._running: threading.Thread | None = None
        self.done: list[Fault] = []

    def at_step(self, step: int) -> None:
        """Begin a fault if one is due."""
        if step < self._next or (self._running is not None and self._running.is_alive()):
            return
        self._next = step + self._every
        if not self._bag:  # each kind as often as the others, in a random order
            self._bag = list(self.KINDS)
            self._random.shuffle(self._bag)
        kind, server, rank = self._bag.pop(), self._random.choice(self._servers), self._random.randrange(4)
        victim = f"rank {rank}" if kind == "rank killed" else f"server {server.number}"
        self.done.append(Fault(step, time.time(), kind, victim))
        print(f"[soak] step {step}: {kind}, {victim}", flush=True)
        call = self._kill_rank if kind == "rank killed" else getattr(self, f"_{kind}")
        argument = rank if kind == "rank killed" else server
        self._running = threading.Thread(target=call, args=[argument], daemon=True)
        self._running.start()

    def close(self) -> None:
        """Wait until the last fault is over."""
        if self._running is not None:
            self._running.join(RECOVERY_S)

    def _killed(self, server) -> None:
        server.signal(signal.SIGKILL)
        time.sleep(WITHOUT_STEP_S)
        self._start(server)

    def _restarted(self, server) -> None:
        server.signal(signal.SIGKILL)
        self._start(server)

    def _start(self, server) -> None:
        server.start_again()
        server.server.wait_ready()

    def _stopped(self, server) -> None:
        server.signal(signal.SIGSTOP)
        time.sleep(WITHOUT_STEP_S)
        server.signal(signal.SIGCONT)

    def _slow(self, server) -> None:
        server.door.delay_s = 0.3
        time.sleep(WITHOUT_STEP_S)
        server.door.delay_s = 0.0

    def _nonsense(self, server) -> None:
        server.door.nonsense = True
        time.sleep(WITHOUT_STEP_S / 2)
        server.door.nonsense = False

    def _kill_rank(self, rank: int) -> None:
        ranks = self._training.ranks()
        try:
            ranks[rank % len(ranks)].kill()
        except (ZeroDivisionError, psutil.NoSuchProcess):
            return  # they are being started

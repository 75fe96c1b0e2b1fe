"""Ends every rank of a job soon after one has failed, whatever the others wait for.

A rank that fails writes its number and message into the job's store. A thread of every other rank looks there every
few seconds, and ends its process: without a collective, because a collective may be what the others wait in, and NCCL
leaves it after minutes only.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megatron_rl_corr.parallel.failure import PeerFailure

LOOK_EVERY_S = 1.0
LOOKS_PER_S = 4096
"""That the store of a large job has to answer: its ranks look less often."""
CLEAN_UP_S = 8.0
"""Longest time in which rank 0 leaves the rollout servers in order before the job ends, and others wait for it."""
LONGEST_END_S = 30.0
"""From the moment when a process knows of a failure to its end, whatever it waits for."""
MESSAGE_LENGTH = 2000

logger = logging.getLogger(__name__)


class FailureWatch:
    """`start` at the beginning of a job; `tell` and `clean_up` on a rank that fails, `stop` at the job's good end.

    It has a connection of its own to the store of torchrun or rank 0: the main thread may wait for a peer in the
    process group's. Not started, or in a job of one rank, it watches nobody.
    """

    def __init__(self):
        self._rank, self._ranks, self._prefix = 0, 1, ""
        self._store: TCPStore | None = None
        self._using, self._ending = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._clean_ups: list[Callable[[], None]] = []

    def start(self, leave: Callable[[str], None]) -> None:
        """leave(line) prints why and ends this process; it is called on the watch's thread."""
        self._rank, self._ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives an attempt
        self._prefix = f"megatron_rl_corr/attempt_{attempt}"
        self._stopped.clear()
        if self._ranks > 1:
            self._thread = threading.Thread(target=self._watch, args=[leave], name="failure-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """This rank has come to its end; others may take their time."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def on_failure(self, clean_up: Callable[[], None]) -> None:
        """Call it, on the thread that ends the process, before this rank ends because one has failed."""
        self._clean_ups.append(clean_up)

    def tell(self, error: BaseException) -> None:
        """Let the other ranks know. The first that tells is the one they name."""
        if self._ranks > 1 and not isinstance(error, PeerFailure):
            told = json.dumps({"rank": self._rank, "message": f"{type(error).__name__}: {error}"[:MESSAGE_LENGTH]})
            self._ask(lambda store: store.compare_set(f"{self._prefix}/failed", "", told))

    def told(self) -> str | None:
        """In one line which other rank failed first, and why; None: no other has told."""
        key = f"{self._prefix}/failed"
        found = self._ask(lambda store: store.get(key) if store.check([key]) else None)
        if not found:
            return None
        failed = json.loads(found)
        if failed["rank"] == self._rank:
            return None
        return f"rank {failed['rank']} failed: {' '.join(failed['message'].split())}"

    def is_mine_to_end(self) -> bool:
        """Whether the calling thread ends the process, within LONGEST_END_S; if not, the other one is about to."""
        if not self._ending.acquire(blocking=False):
            return False
        overdue = threading.Timer(LONGEST_END_S, os._exit, [1])
        overdue.daemon = True
        overdue.start()
        return True

    def clean_up(self) -> None:
        """Do what `on_failure` was given; other ranks than 0 wait for rank 0's, as the first to exit ends all."""
        for clean_up in self._clean_ups:
            clean_up()
        if self._ranks == 1:
            return
        key = f"{self._prefix}/cleaned_up"
        if self._rank == 0:
            self._ask(lambda store: store.set(key, "1"))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(self._look_every_s + 1.0)  # the store ends with this process: let the others read it
            return
        end = time.monotonic() + self._look_every_s + CLEAN_UP_S
        while time.monotonic() < end and not self._ask(lambda store: store.check([key])):
            time.sleep(0.1)

    @property
    def _look_every_s(self) -> float:
        return max(LOOK_EVERY_S, self._ranks / LOOKS_PER_S)

    def _watch(self, leave: Callable[[str], None]) -> None:
        while not self._stopped.wait(self._look_every_s * random.uniform(0.5, 1.0)):
            told = self.told()
            if told is not None and not self._stopped.is_set() and self.is_mine_to_end():
                try:
                    self.clean_up()
                finally:
                    leave(told)

    def _ask(self, ask: Callable[[TCPStore], Any]) -> Any:
        """What the store answers; None without one, as before rank 0 has made it, and after it has ended."""
        if self._ranks == 1 or not self._using.acquire(timeout=CLEAN_UP_S):
            return None
        try:
            if self._store is None:
                self._store = self._connected()
            return ask(self._store)
        except (RuntimeError, OSError, KeyError) as error:
            logger.debug("the job's store does not answer: %s", error)
            self._store = None
            return None
        finally:
            self._using.release()

    def _connected(self) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((host, port), CLEAN_UP_S).close()  # a TCPStore fails with many lines on stderr
        timeout = timedelta(seconds=CLEAN_UP_S)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


WATCH = FailureWatch()
"""This process's."""

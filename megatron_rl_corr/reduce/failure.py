"""When one rank fails, every rank ends soon and one message says why: agreement by collective,
and a watch thread.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, TCPStore

from megatron_rl_corr.config.problems import problems_of
from megatron_rl_corr.engines.secrets import for_message
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.reduce.collectives import collective

MEETING_INTERVAL_S = 60.0
"""Longest time between two collectives of ranks that wait for a slow result, where a collective may wait
three times as long. Gloo and NCCL end a run whose ranks wait for each other longer than
--distributed-timeout-minutes, by default 10.
"""
TURN_S = 1.0
"""The same where something may ask for a turn between two."""
POLL_INTERVAL_S = 1.0
POLLS_PER_S = 4096
"""Load limit of the job's store: the ranks of a large job poll it less often."""
CLEAN_UP_S = 8.0
"""Time that rank 0 has to leave the rollout servers in order before the job ends; the other
ranks wait for it.
"""
EXIT_TIMEOUT_S = 30.0
"""A process that knows of a failure ends at most this much later, whatever it waits for."""
MESSAGE_LENGTH = 2000

logger = logging.getLogger(__name__)


class PeerFailure(RuntimeError):
    """Another rank failed and has printed why; this rank only stops."""


class StartupError(ValueError):
    """The run can't start, or go on, as configured; the message names the flag and the remedy,
    or lists several.
    """

    problems: tuple[str, ...] = ()
    """The texts of several."""


def meeting_interval_s(turns: MeetingTurns | None = None) -> float:
    """Longest time between two collectives of ranks that wait for a slow result: a third of what a
    collective may wait.

    At most MEETING_INTERVAL_S, or TURN_S where something may ask for a turn between two. The rest of the
    limit is for ranks that are late, and for a machine under load.
    """
    if not dist.is_initialized():
        return MEETING_INTERVAL_S
    longest_s = MEETING_INTERVAL_S if turns is None else TURN_S
    backend = dist.distributed_c10d._get_default_group()._get_backend(communication_device())
    return min(longest_s, backend.options._timeout.total_seconds() / 3)


def communication_device() -> torch.device:
    """Device of the tensors that this job's collectives take: NCCL takes GPU tensors only."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@collective
def all_reduce_failure(error: BaseException | None, group: ProcessGroup | None = None) -> None:
    """Return if no rank of the group has an error; else raise on every rank.

    One collective of three numbers; every rank of the group must call it.

    Raises:
        error: on the first rank that has one.
        PeerFailure: on all others, those with an error of their own too, so that one cause is printed once.
    """
    all_reduce_done(True, error, group)


@collective
def all_reduce_first_rank(write: Callable[[], None]) -> None:
    """Rank 0 writes, and every rank learns whether it could; every rank calls it, one
    collective of two numbers.

    Raises:
        OSError, ValueError: on rank 0, as `write` does.
        PeerFailure: then, on all others.
    """
    error = None
    if dist.get_rank() == 0:
        try:
            write()
        except (OSError, ValueError) as failure:
            error = failure
    all_reduce_failure(error)


@collective
def broadcast_made[Made](make: Callable[[], Made]) -> Made:
    """What make() returns on rank 0, which alone calls it, on every rank; every rank calls this.

    Raises:
        Exception: of make(), on rank 0.
        PeerFailure: then, on the other ranks.
    """
    made: list[Any] = [None]
    error = None
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except Exception as failure:  # noqa: BLE001  raised below, on this rank, once the others know
            error = failure
    all_reduce_failure(error)
    dist.broadcast_object_list(made, src=0)
    return made[0]


@collective
def all_reduce_done(done: bool, error: BaseException | None, group: ProcessGroup | None = None) -> bool:
    """Whether every rank of the group is done: one collective of three numbers; every rank of the
    group must call it.

    Args:
        done: whether this rank is.
        error: of this rank.
        group: None: all ranks.

    Raises:
        error, PeerFailure: as `all_reduce_failure`.
    """
    return _meet(done, error, False, group)[0]


@collective
def _meet(
    done: bool, error: BaseException | None, asks: bool, group: ProcessGroup | None = None
) -> tuple[bool, bool]:
    """(whether every rank of the group is done, whether one asks for a turn), as `all_reduce_done`."""
    rank, no_rank = dist.get_rank(group), dist.get_world_size(group)
    first = no_rank if error is None else rank
    flags = torch.tensor([first, int(done), -int(asks)], device=communication_device())
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    first_failed, all_done, asked = flags.tolist()
    if first_failed == rank and error is not None:
        raise error
    if first_failed < no_rank:
        raise PeerFailure("another rank failed; its message says why")
    return bool(all_done), bool(asked)


@collective
def all_reduce_startup[Prepared](prepare: Callable[[], Prepared]) -> Prepared:
    """prepare() on every rank; every rank calls it.

    Raises:
        StartupError: on the first rank whose prepare() raised ValueError or OSError, with its
            message or list.
        PeerFailure: on all others.
    """
    prepared, error = None, None
    try:
        prepared = prepare()
    except (ValueError, OSError) as failure:
        error = StartupError(str(failure))
        error.problems = problems_of(failure)
    all_reduce_failure(error)
    return prepared


def wait_for(future: Future) -> bool:
    """True if the future is done within `meeting_interval_s`."""
    return bool(concurrent.futures.wait([future], meeting_interval_s()).done)


class MeetingTurns(Protocol):
    """What all ranks do together while they wait for something else."""

    def asks(self) -> bool:
        """True on a rank that wants `take` to be called next."""

    def take(self) -> None:
        """Do it; every rank calls it at the same meeting."""


@collective
def all_reduce_results[Result, Used](
    future: Future[Result] | None,
    use: Callable[[Result], Used],
    wait: Callable[[Future[Result]], bool] = wait_for,
    turns: MeetingTurns | None = None,
) -> Used | None:
    """use(result) on the ranks that wait for a future (None on others), once every rank has its own.

    Every rank calls it; the ranks meet in a collective at least every `meeting_interval_s`, and
    none waits for long.

    Args:
        future: what this rank waits for; None: nothing.
        use: called with the result, on this thread.
        wait: wait(future) returns after at most `meeting_interval_s` whether the future is done.
        turns: what all ranks do between two meetings, where one asks for it; on every rank, or on none.

    Raises:
        Exception: of the future or of use(), as `all_reduce_failure` raises it; other ranks'
            futures are cancelled.
    """
    used, error, waiting, done = None, None, future is not None, False
    try:
        while not done:
            if waiting and wait(future):
                waiting = False
                try:
                    used = use(future.result())
                except Exception as failure:  # noqa: BLE001  raised below, on this rank, once the others know
                    error = failure
            done, asked = _meet(not waiting, error, turns is not None and turns.asks())
            if asked:
                turns.take()
    finally:
        if waiting:  # another rank failed, or Ctrl-C
            future.cancel()
    return used


class FailureWatch:
    """Ends this process soon after another rank failed, whatever the main thread waits for.

    A rank that fails writes its number and message into the job's store (`report`). A thread of every other
    rank polls the store and ends its process; it needs no collective, as a collective may be what the main
    thread waits in, and NCCL gives up after minutes only. The watch has its own connection to the store of
    torchrun or of rank 0.

    Call `start` at the beginning of a job, `report` and `clean_up` on a rank that fails, `stop` at the
    regular end. In a job of one rank, or if it was not started, it does nothing.
    """

    def __init__(self):
        self._rank, self._ranks, self._prefix = 0, 1, ""
        self._store: TCPStore | None = None
        self._store_lock, self._exit_lock = threading.Lock(), threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._clean_ups: list[Callable[[], None]] = []
        self._reported: BaseException | None = None

    def start(self, leave: Callable[[str], None]) -> None:
        """Start the thread; on a failure elsewhere it calls leave(message), which prints it and
        ends this process.
        """
        self._rank, self._ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives an attempt
        self._prefix = f"megatron_rl_corr/attempt_{attempt}"
        self._stopped.clear()
        if self._ranks > 1:
            self._thread = threading.Thread(
                target=self._watch, args=[leave], name="failure-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread: this rank has finished, and others may take their time."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def on_failure(self, clean_up: Callable[[], None]) -> None:
        """Call clean_up() on the thread that ends this process, before it ends because any rank failed."""
        self._clean_ups.append(clean_up)

    def forget(self) -> None:
        """Call none of the clean-ups so far: what they would leave in order has ended, and a
        restart makes it anew.
        """
        self._clean_ups.clear()

    def report(self, error: BaseException) -> None:
        """Publish this rank's error; the other ranks name the first one published."""
        if isinstance(error, PeerFailure):
            return
        if self._reported is not error:  # a push tells of its failure before it leaves the servers
            self._reported = error
            EVENTS.tell("rank_failed", for_message(f"{type(error).__name__}: {error}"))
        if self._ranks > 1:
            count = len(error.problems) if isinstance(error, StartupError) else 1
            what = error if count < 2 else f"{count} problems, which its own message lists"
            message = for_message(f"{type(error).__name__}: {what}")[:MESSAGE_LENGTH]
            text = json.dumps({"rank": self._rank, "message": message})
            self._request(lambda store: store.compare_set(f"{self._prefix}/failed", "", text))

    def peer_failure(self) -> str | None:
        """One line: which other rank failed first, and why. None if no other rank has published an error."""
        key = f"{self._prefix}/failed"
        found = self._request(lambda store: store.get(key) if store.check([key]) else None)
        if not found:
            return None
        failed = json.loads(found)
        if failed["rank"] == self._rank:
            return None
        return f"rank {failed['rank']} failed: {' '.join(failed['message'].split())}"

    def claim_exit(self) -> bool:
        """True for the first thread that calls it, which must end the process; a timer does
        after EXIT_TIMEOUT_S.
        """
        if not self._exit_lock.acquire(blocking=False):
            return False
        overdue = threading.Timer(EXIT_TIMEOUT_S, os._exit, [1])
        overdue.daemon = True
        overdue.start()
        return True

    def clean_up(self) -> None:
        """Run the `on_failure` callbacks, whichever of them fail; other ranks wait for rank 0's, as the
        first process to exit ends the job.
        """
        for clean_up in self._clean_ups:
            try:
                clean_up()
            # such as a loop that is closed, or a full disk
            except (RuntimeError, ValueError, OSError) as error:
                logger.warning("before this process ends, something was not left in order: %s", error)
        if self._ranks == 1:
            return
        key = f"{self._prefix}/cleaned_up"
        if self._rank == 0:
            self._request(lambda store: store.set(key, "1"))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # the store ends with this process: let the others read it
                time.sleep(self._poll_interval_s + 1.0)
            return
        end = time.monotonic() + self._poll_interval_s + CLEAN_UP_S
        while time.monotonic() < end and not self._request(lambda store: store.check([key])):
            time.sleep(0.1)

    @property
    def _poll_interval_s(self) -> float:
        return max(POLL_INTERVAL_S, self._ranks / POLLS_PER_S)

    def _watch(self, leave: Callable[[str], None]) -> None:
        while not self._stopped.wait(self._poll_interval_s * random.uniform(0.5, 1.0)):
            failure = self.peer_failure()
            if failure is not None and not self._stopped.is_set() and self.claim_exit():
                try:
                    self.clean_up()
                finally:
                    leave(failure)

    def _request(self, ask: Callable[[TCPStore], Any]) -> Any:
        """ask(store); None without a store, as before rank 0 has made it and after it has ended."""
        if self._ranks == 1 or not self._store_lock.acquire(timeout=CLEAN_UP_S):
            return None
        try:
            if self._store is None:
                self._store = self._connect()
            return ask(self._store)
        except (RuntimeError, OSError, KeyError) as error:
            logger.debug("the job's store does not answer: %s", error)
            self._store = None
            return None
        finally:
            self._store_lock.release()

    def _connect(self) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # a TCPStore fails with many lines on stderr
        socket.create_connection((host, port), CLEAN_UP_S).close()
        timeout = timedelta(seconds=CLEAN_UP_S)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


WATCH = FailureWatch()
"""This process's watch."""

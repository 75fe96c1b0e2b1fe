"""The trainer's side of a process that asks servers: requests go there, parsed answers come back in shared
memory.

One thread sends and another waits for answers; the event loop only hands both on. So the interpreter that
trains spends some milliseconds on an answer of a hundred megabytes, or on a bucket of weights that hundreds
of servers are told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout.ingest import messages
from megatron_rl_corr.rollout.ingest.answer import ParsedAnswer

END_S = 5.0
"""Seconds that the process may take to end once its connection is closed."""
MOST_STILLBORN = 3
"""Processes that may end one after the other without a word."""
REMEDY = "see the log for why it ended; the request is sent again by a new one"
WITHOUT = "set `ingest_process` off"
WORKER = "megatron_rl_corr.rollout.ingest.worker"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Process:
    """One process, and what it was asked."""

    process: subprocess.Popen
    link: socket.socket
    loop: asyncio.AbstractEventLoop
    outbox: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    """(kind, number, value) to send; None: no more."""
    waiting: dict[int, tuple[str, str, asyncio.Future[Any]]] = field(default_factory=dict)
    """By the number of a request, what it is, the server's address and who waits for its answer."""
    has_spoken: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """It has spoken, or ended."""


class AskingProcess:
    """A process beside this one that asks servers: for samples, or to take a bucket of weights.

    It starts with the first request, or at `ready`, and another one where it has ended; it ends with this
    process at the latest. For one event loop.

    Args:
        fleet: knows what runs at each address.
        arguments: of that `Fleet`; the process makes one like it.
        without: how a user does without it, for the message that it has ended.
    """

    def __init__(self, fleet: Fleet, arguments: Mapping[str, Any], *, without: str = WITHOUT):
        self._fleet, self._arguments, self._without = fleet, dict(arguments), without
        self._current: _Process | None = None
        self._numbers = itertools.count()
        self._stillborn = 0
        self.waiting_here = 0
        """Requests that waited for this host when the process last told of a fault of it."""

    async def ready(self) -> None:
        """As `Ingest.ready`.

        Raises:
            RuntimeError: the process ends again and again before it does anything.
        """
        while not (current := self._open()).started.is_set():
            await current.started.wait()

    async def answer(self, url: str, asked: SampleRequest) -> ParsedAnswer:
        """As `Ingest.answer`.

        Raises:
            LocalFault: the process has ended.
            RuntimeError: as `ready`.
        """
        fields, server_times = await self._ask("ask", url, (url, self._fleet.name_of(url), asked))
        return ParsedAnswer(Trajectory(prompt_ids=asked.prompt_ids, **fields), server_times)

    async def announce(self, control: ServerControl, bucket: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`control.update_weights_from_distributed(**bucket)`, from the process.

        Raises:
            RolloutError: as there; LocalFault: the process has ended, and some servers may have been told.
            RuntimeError: as `ready`.
        """
        await self.ready()  # one that ends before has told nobody, and another is started
        names = {url: self._fleet.name_of(url) for url in control.base_urls}
        return await self._ask("announce", control.base_urls[0], (names, control.limits, bucket))

    async def _ask(self, kind: str, url: str, value: Any) -> Any:
        """What the process answers. url: named if it ends first."""
        current, number = self._open(), next(self._numbers)
        future: asyncio.Future[Any] = current.loop.create_future()
        current.waiting[number] = kind, url, future
        current.outbox.put((kind, number, value))
        try:
            return await future
        except asyncio.CancelledError:
            current.outbox.put(("cancel", number, None))
            raise
        finally:
            current.waiting.pop(number, None)

    async def close(self) -> None:
        """End the process, and what it was asked."""
        current, self._current = self._current, None
        if current is None:
            return
        with contextlib.suppress(OSError):
            current.link.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.to_thread(current.process.wait, END_S)
        except subprocess.TimeoutExpired:
            current.process.kill()
            await asyncio.to_thread(current.process.wait)

    def _open(self) -> _Process:
        """The process, which is started if there is none."""
        if self._current is not None:
            return self._current
        if self._stillborn == MOST_STILLBORN:
            raise RuntimeError(
                f"the process that asks the servers has ended {MOST_STILLBORN} times before it "
                f"could take a request; see its last words in the log, or {self._without}"
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                # -P: what lies in the working folder is not imported for a module of the same name.
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        self._current = current = _Process(process, ours, asyncio.get_running_loop())
        current.outbox.put(("fleet", 0, self._arguments))
        for work in (self._send, self._read):
            threading.Thread(target=work, args=[current], name="rollout-ingest", daemon=True).start()
        return current

    def _send(self, current: _Process) -> None:
        """On a thread, until the process ends: an event loop must not wait while the process is busy."""
        while (message := current.outbox.get()) is not None:
            kind, number, _ = message
            try:
                messages.send(current.link, *message)
            # no descriptor or memory; where the process has gone, `_read` sees it
            except Exception as error:  # noqa: BLE001  whatever it is, somebody waits for it
                if kind in ("ask", "announce"):
                    _, url, _ = current.waiting.get(number, (kind, "", None))
                    error = self._gone(kind, url, str(error)) if isinstance(error, OSError) else error
                    self._in_loop(current, "error", number, (error, self.waiting_here))

    def _read(self, current: _Process) -> None:
        """On a thread, until the process ends: hand its answers to those who wait."""
        inbox = messages.Inbox(current.link, freed=lambda number: current.outbox.put(("freed", number, None)))
        why = "it ended"
        with current.link:
            try:
                while True:
                    self._in_loop(current, *inbox.receive())
            except EOFError:
                pass
            except Exception as error:  # noqa: BLE001  nobody else would tell those who wait
                why = str(error) if isinstance(error, OSError) else repr(error)
            finally:
                current.outbox.put(None)
                try:
                    current.process.wait(END_S)
                except subprocess.TimeoutExpired:  # only its connection has ended
                    current.process.kill()
                self._in_loop(current, "lost", 0, why)

    def _in_loop(self, current: _Process, kind: str, number: int, value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            current.loop.call_soon_threadsafe(self._hand_on, current, kind, number, value)

    def _hand_on(self, current: _Process, kind: str, number: int, value: Any) -> None:
        if kind == "lost":
            self._lost(current, value)
            return
        current.has_spoken, self._stillborn = True, 0
        current.started.set()
        *_, future = current.waiting.get(number, (None,))
        if future is None or future.done():  # it was cancelled
            return
        if kind == "error":
            error, self.waiting_here = value
            future.set_exception(error)
        else:
            future.set_result(value)

    def _lost(self, current: _Process, why: str) -> None:
        """The process has ended, by itself if it is still ours."""
        if self._current is current:
            status = current.process.wait()
            logger.warning("the process that asks the servers has ended: %s (status %s)", why, status)
            self._current, self.waiting_here = None, 0
            self._stillborn += not current.has_spoken
        current.started.set()
        for kind, url, future in current.waiting.values():
            if not future.done():
                future.set_exception(self._gone(kind, url, why))

    def _gone(self, kind: str, url: str, why: str) -> LocalFault:
        again = kind == "ask"  # whoever asks for a sample tries again
        remedy = REMEDY if again else f"see the log for why it ended, or {self._without}"
        return LocalFault(url, "", f"the process that asks the servers is gone ({why})", remedy, sent=True)

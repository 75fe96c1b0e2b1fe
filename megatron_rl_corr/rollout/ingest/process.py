"""The trainer's side of an ingest process: requests go there, parsed answers come back in shared memory.

A thread waits for answers; the event loop only hands them on. So the interpreter that trains
spends some milliseconds on an answer of a hundred megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout.ingest import messages
from megatron_rl_corr.rollout.ingest.answer import ParsedAnswer

END_S = 5.0
"""Seconds that the process may take to end once its connection is closed."""
REMEDY = "see the log for why it ended; the request is sent again by a new one"

_Waiting = dict[int, asyncio.Future[ParsedAnswer]]
"""By the numbers of the requests."""

logger = logging.getLogger(__name__)


class IngestProcess:
    """Starts the process with the first request, and another one where it has ended. For one event loop.

    Args:
        fleet: knows what runs at each address.
        arguments: of that `Fleet`; the process makes one like it.
    """

    def __init__(self, fleet: Fleet, arguments: Mapping[str, Any]):
        self._fleet, self._arguments = fleet, dict(arguments)
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._waiting: _Waiting = {}
        """What this process was asked; the next one has its own."""
        self._numbers = itertools.count()

    async def answer(
        self, url: str, request: Request, parse: Mapping[str, Any], *, timed: bool
    ) -> ParsedAnswer:
        """As `Ingest.answer`.

        Raises:
            LocalFault: the process has ended.
        """
        link, number = self._open(), next(self._numbers)
        future: asyncio.Future[ParsedAnswer] = asyncio.get_running_loop().create_future()
        waiting = self._waiting
        waiting[number] = future
        name = self._fleet.name_of(url)
        job = {"url": url, "name": name, "request": request, "parse": dict(parse), "timed": timed}
        try:
            messages.send(link, "ask", number, job)
            return await future
        except OSError as error:
            raise _gone(url, request.endpoint, str(error)) from None
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                messages.send(link, "cancel", number, None)
            raise
        finally:
            waiting.pop(number, None)

    async def close(self) -> None:
        """End the process, and what it was asked."""
        process, link = self._process, self._socket
        self._process = self._socket = None
        if process is None or link is None:
            return
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.to_thread(process.wait, END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    def _open(self) -> socket.socket:
        """The way to the process, which is started if there is none."""
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl_corr.rollout.ingest.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._socket, self._waiting = ours, {}
        messages.send(ours, "fleet", 0, self._arguments)
        reader = threading.Thread(
            target=self._read,
            args=[ours, self._waiting, asyncio.get_running_loop()],
            name="rollout-ingest",
            daemon=True,
        )
        reader.start()
        return ours

    def _read(self, link: socket.socket, waiting: _Waiting, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread, until the process ends: hand its answers to those who wait."""
        with link, contextlib.suppress(RuntimeError):  # the loop may be closed
            while True:
                try:
                    kind, number, value = messages.receive(link)
                except (EOFError, OSError):
                    loop.call_soon_threadsafe(self._lost, link, waiting)
                    return
                loop.call_soon_threadsafe(self._hand_on, waiting, kind, number, value)

    @staticmethod
    def _hand_on(waiting: _Waiting, kind: str, number: int, value: Any) -> None:
        future = waiting.get(number)
        if future is None or future.done():  # it was cancelled
            return
        if kind == "error":
            future.set_exception(value)
        else:
            future.set_result(value)

    def _lost(self, link: socket.socket, waiting: _Waiting) -> None:
        """The process has ended, by itself if it is still ours."""
        if self._socket is link:
            status = None if self._process is None else self._process.poll()
            logger.warning("the process that receives answers has ended (status %s)", status)
            self._process = self._socket = None
        for future in waiting.values():
            if not future.done():
                future.set_exception(_gone("", "", "it ended"))


def _gone(url: str, endpoint: str, why: str) -> LocalFault:
    return LocalFault(url, endpoint, f"the process that receives answers is gone ({why})", REMEDY, sent=True)

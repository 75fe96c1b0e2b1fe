"""The process that asks servers: sends requests for samples, parses their answers and announces buckets of
weights, until the trainer's side is gone.

python -m megatron_rl_corr.rollout.ingest.worker DESCRIPTOR PARENT
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.rollout.ingest import messages
from megatron_rl_corr.rollout.ingest.answer import IngestHere

PARENT_S = 1.0
"""Seconds between two looks at whether the trainer lives: a process that it has forked may keep
the connection open.
"""
REMEDY = "free memory on this host, or raise `ulimit -n`"


class IngestWorker:
    """Answers what comes over a socket.

    Args:
        link: to the trainer's side.
        parent: the trainer's process; this one ends with it.
    """

    def __init__(self, link: socket.socket, parent: int):
        self._link, self._inbox, self._parent = link, messages.Inbox(link), parent
        self._tasks: dict[int, asyncio.Task] = {}
        self._kept: dict[int, Tensor] = {}
        """Memory of answers that the other side uses: this one gives it back to the kernel, which
        takes milliseconds.
        """
        _, _, arguments = self._inbox.receive()
        self._fleet = Fleet(**arguments)
        self._ingest = IngestHere(self._fleet)
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until the other side is gone."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link, self._receive)
        watching = loop.create_task(self._watch_parent())
        messages.send(self._link, "ready", -1, None)
        await self._ended.wait()
        loop.remove_reader(self._link)
        for task in [watching, *self._tasks.values()]:
            task.cancel()
        await self._fleet.close()

    async def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            await asyncio.sleep(PARENT_S)
        self._ended.set()

    def _receive(self) -> None:
        try:
            kind, number, value = self._inbox.receive()
        except EOFError:
            self._ended.set()
            return
        except Exception as error:  # noqa: BLE001  which request it was is not known: all are asked again
            print(f"the process that asks the servers ends: {error}; {REMEDY}", file=sys.stderr, flush=True)
            self._ended.set()
            return
        if kind == "freed":
            self._kept.pop(number, None)
        elif kind == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
        else:
            answer = self._sample if kind == "ask" else self._announce
            task = asyncio.get_running_loop().create_task(answer(number, *value))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _sample(self, number: int, url: str, name: str, asked: SampleRequest) -> None:
        async def fields_and_times() -> Any:
            self._fleet.add({url: name})
            answer = await self._ingest.answer(url, asked)
            # The prompt is there already.
            fields = {name: value for name, value in vars(answer.part).items() if name != "prompt_ids"}
            return fields, answer.server_times

        await self._answer(number, url, fields_and_times())

    async def _announce(
        self, number: int, names: Mapping[str, str], limits: Mapping[str, Any], bucket: Mapping[str, Any]
    ) -> None:
        self._fleet.add(names)
        control = ServerControl(self._fleet, list(names), **limits)
        await self._answer(number, control.base_urls[0], control.update_weights_from_distributed(**bucket))

    async def _answer(self, number: int, url: str, answer: Awaitable[Any]) -> None:
        """Hand on what is awaited, or its error. url: of the server that it is of, or the first one."""
        try:
            value = await answer
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  raised where the answer is waited for
            self._fail(number, _portable(error, url))
            return
        try:
            kept = messages.send(self._link, "answer", number, value)
        except OSError as error:
            self._fail(number, LocalFault(url, "", str(error), REMEDY, sent=True))
        except Exception as error:  # noqa: BLE001  as above
            self._fail(number, _portable(error, url))
        else:
            if kept is not None:
                self._kept[number] = kept

    def _fail(self, number: int, error: Exception) -> None:
        try:
            messages.send(self._link, "error", number, (error, self._ingest.waiting_here))
        except OSError:
            self._ended.set()


def _portable(error: Exception, url: str) -> Exception:
    """The error as the other side can make it anew; one that can't be, by its words."""
    if not hasattr(error, "detail"):  # none of a server: its place is needed
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    try:
        pickle.dumps(error)
        made = copy.copy(error)  # as the other side makes it
    except Exception:  # noqa: BLE001  an error of its own must not hide this one
        return RolloutProtocolError(url, "", f"{type(error).__name__}: {error}")
    return made


def main() -> None:
    torch.set_num_threads(1)
    # Both are the trainer's, which a terminal, torchrun and Slurm send to its group; its end is ours.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])

    async def work() -> None:
        with contextlib.suppress(EOFError, BrokenPipeError):  # the trainer was gone before this had begun
            await IngestWorker(socket.socket(fileno=descriptor), parent).run()

    asyncio.run(work())


if __name__ == "__main__":
    main()

"""The ingest process: sends requests for samples, and parses their answers, until the trainer's side is gone.

python -m megatron_rl_corr.rollout.ingest.worker DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

import torch

from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.rollout.ingest import messages
from megatron_rl_corr.rollout.ingest.answer import IngestHere


class IngestWorker:
    """Answers what comes over a socket.

    Args:
        link: to the trainer's side.
    """

    def __init__(self, link: socket.socket):
        self._link, self._tasks = link, dict[int, asyncio.Task]()
        _, _, arguments = messages.receive(link)
        self._fleet = Fleet(**arguments)
        self._ingest = IngestHere(self._fleet)
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Until the other side is gone."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._link, self._receive)
        await self._ended.wait()
        loop.remove_reader(self._link)
        for task in list(self._tasks.values()):
            task.cancel()
        await self._fleet.close()

    def _receive(self) -> None:
        try:
            kind, number, value = messages.receive(self._link)
        except (EOFError, OSError):
            self._ended.set()
            return
        if kind == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, value))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, job: dict[str, Any]) -> None:
        url, request = job["url"], job["request"]
        self._fleet.add(url, job["name"])
        try:
            kind, value = "answer", await self._ingest.answer(url, request, job["parse"], timed=job["timed"])
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  raised where the answer is waited for
            kind, value = "error", _portable(error, url, request.endpoint)
        try:
            messages.send(self._link, kind, number, value)
        except OSError:
            self._ended.set()


def _portable(error: Exception, url: str, endpoint: str) -> Exception:
    """The error as the other side can read it; another than a RolloutError by its words."""
    if isinstance(error, RolloutError):
        return error
    return RolloutProtocolError(url, endpoint, f"{type(error).__name__}: {error}")


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; its end is ours
    asyncio.run(IngestWorker(socket.socket(fileno=int(sys.argv[1]))).run())


if __name__ == "__main__":
    main()

"""Processes that announce buckets, each to its share of the servers.

A request costs the interpreter that sends it 0.1 to 0.2 ms: for each bucket of 256 servers 40 ms, about what
its 2 GiB take through a card of 400 Gb/s. Half the buckets' time would go by before all servers listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.ingest.process import AskingProcess

SERVERS_EACH = 32
"""Servers that a process tells of a bucket in some milliseconds."""
MOST_PROCESSES = 8


def announcing_processes(servers: int) -> int:
    """How many processes announce to so many servers; 0: this one does, as up to SERVERS_EACH."""
    return 0 if servers <= SERVERS_EACH else min(MOST_PROCESSES, -(-servers // SERVERS_EACH))


class Announcers:
    """Announces buckets for one sender.

    Args:
        loop: the event loop of the client.
        processes: announce, and are started here, which takes them seconds; (): this process announces.
    """

    def __init__(self, loop: LoopThread, processes: Sequence[AskingProcess] = ()):
        self._loop, self._processes = loop, processes
        self._starting = [loop.submit(process.ready()) for process in processes]
        self._place: dict[str, int] = {}
        """Address -> its process: a server stays with one, which keeps the connection to it."""

    def announce(self, control: ServerControl, bucket: dict[str, Any]) -> Future[list[dict[str, Any]]]:
        """Begin `control.update_weights_from_distributed` with these arguments.

        Returns:
            Its answers, in the order of the shares; or the first failure, which cancels the others. That of a
            process that can't start is a RuntimeError.
        """
        if not self._processes:
            return self._loop.submit(control.update_weights_from_distributed(**bucket))
        return self._loop.submit(self._shared(control, bucket))

    async def _shared(self, control: ServerControl, bucket: dict[str, Any]) -> list[dict[str, Any]]:
        shares: dict[int, list[str]] = {}
        for url in control.base_urls:
            place = self._place.setdefault(url, len(self._place) % len(self._processes))
            shares.setdefault(place, []).append(url)
        answers = await all_or_first_failure(
            [self._processes[place].announce(control.over(urls), bucket) for place, urls in shares.items()]
        )
        return [answer for share in answers for answer in share]

    def close(self) -> None:
        """End the processes."""
        if not self._processes:
            return
        for starting in self._starting:
            starting.cancel()

        async def all_closed() -> None:
            await asyncio.gather(*(process.close() for process in self._processes))

        self._loop.call(all_closed())

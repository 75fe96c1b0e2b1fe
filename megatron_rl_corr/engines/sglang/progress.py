"""Whether the scheduler of a server makes progress, from two readings of GET /v1/loads.

A server's HTTP process answers /model_info however its scheduler fares. /v1/loads shows what the scheduler
has written down last, without asking it: a scheduler that is paused, stopped or stuck writes nothing, and
one without a request may sleep. GET /server_info is answered by the scheduler itself, paused or not,
between two batches.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.sglang.responses import parse_control
from megatron_rl_corr.engines.types import Transport

WRITES_WITHIN_S = 0.1
"""A scheduler that is not paused writes down its loads right after it has answered."""


@dataclass(frozen=True)
class Loads:
    """The last loads that the schedulers of one server (one a data-parallel rank) have
    written down. R: ranks.
    """

    written: tuple[float, ...]
    """[R] When, by the server's clock."""
    running: tuple[int, ...]
    """[R] Requests in its batch."""
    waiting: tuple[int, ...]
    """[R] Requests in its queue."""
    numbers: tuple[tuple[Any, ...], ...]
    """[R] Everything else that it writes, as tokens in its cache: some of it changes with every batch."""

    @classmethod
    def parse(cls, answer: dict[str, Any]) -> "Loads | None":
        """The answer of /v1/loads (SGLang 0.5.19 on); None for another, or before anything is written."""
        try:
            ranks = sorted(answer["loads"], key=lambda rank: rank["dp_rank"])
            return (
                cls(
                    tuple(float(rank["timestamp"]) for rank in ranks),
                    tuple(int(rank["num_running_reqs"]) for rank in ranks),
                    tuple(int(rank["num_waiting_reqs"]) for rank in ranks),
                    tuple(
                        tuple(str(rank[name]) for name in sorted(rank) if name != "timestamp")
                        for rank in ranks
                    ),
                )
                if ranks
                else None
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @property
    def has_requests(self) -> bool:
        return any(self.running) or any(self.waiting)

    def is_quiet_since(self, before: "Loads") -> bool:
        """A rank with requests has written nothing since; where none has requests, no rank has."""
        if len(before.written) != len(self.written):
            return False
        same = [now == then for now, then in zip(self.written, before.written, strict=True)]
        busy = [bool(run or wait) for run, wait in zip(self.running, self.waiting, strict=True)]
        if self.has_requests:
            return any(is_same and is_busy for is_same, is_busy in zip(same, busy, strict=True))
        return all(same)

    def progressed_since(self, before: "Loads") -> bool:
        """True if schedulers that are not paused made progress between two readings.

        They did not if no number changed although a request is in a batch, nor if there is no request:
        those that the client waits for are lost. Requests that wait in a queue while no batch runs are no
        sign of silence.
        """
        return self.numbers != before.numbers or (any(self.waiting) and not any(self.running))


class LoadsProgress:
    """Reads the loads of one server again and again.

    Args:
        transport: to the server.
        url: its address.
    """

    def __init__(self, transport: Transport, url: str):
        self._transport, self._url = transport, url
        self._last: Loads | None = None

    async def silence(self, timeout_s: float) -> RolloutServerError | None:
        """Why the requests there made no progress since the last call; None: they did, or they have to wait.

        They may wait in the queue, or because the server is paused. A server without /v1/loads
        only has to answer.

        Args:
            timeout_s: limit of each request that this takes.

        Raises:
            RolloutServerError: no answer came in time.
        """
        before, loads = self._last, await self._loads(timeout_s)
        if before is None and loads is not None:  # the first reading
            self._last = loads
            return None
        if loads is None or loads.is_quiet_since(before):
            await self._transport.send(self._url, requests.server_info(), timeout_s=timeout_s)
            if loads is None:
                return None
            await asyncio.sleep(WRITES_WITHIN_S)
            loads = await self._loads(timeout_s)
            if loads is None or loads.is_quiet_since(before):  # it answers and is paused
                return None
        self._last = loads
        if loads.progressed_since(before):
            return None
        if loads.has_requests:
            return RolloutServerError(
                self._url, "/generate", None, "the requests in its batch make no progress"
            )
        if not await self._takes_requests(timeout_s):
            return None
        detail = "it has no request, though this client waits for answers"
        return RolloutServerError(self._url, "/generate", None, detail)

    async def _takes_requests(self, timeout_s: float) -> bool:
        """Its HTTP process hands on what comes; a pause of the mode abort keeps it there, not
        in the scheduler.

        Before SGLang 0.5.20 nothing tells that.
        """
        try:
            await self._transport.send(self._url, requests.ready(), timeout_s=timeout_s)
        except RolloutServerError as error:
            if error.status is None:
                raise
            return False
        return True

    async def _loads(self, timeout_s: float) -> Loads | None:
        request = requests.loads()
        try:
            status, body = await self._transport.send(self._url, request, timeout_s=timeout_s)
            return Loads.parse(
                parse_control(body, server=self._url, endpoint=request.endpoint, status=status)
            )
        except RolloutServerError as error:
            if error.status != 404:
                raise
        except RolloutError:  # something else than JSON
            pass
        return None

"""The servers of a client: which engine answers at each address, and the transport to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from megatron_rl_corr.config.run import AUTO, ENGINES
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.addresses import may_change
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.concurrency import all_or_first_failure, poll_until
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    may_be_gone,
)
from megatron_rl_corr.engines.local_faults import descriptors_needed
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request, Transport

POLL_S, LONGEST_ATTEMPT_S = 0.5, 30.0
PAUSED_POLL_S = 0.25
"""Seconds until a request is sent again that a paused server does not let wait, and least
time for its answer.
"""


class Fleet(Transport):
    """Servers of one engine or of several; a request goes to an address in the way of the engine there.

    Args:
        urls: addresses of servers, or of routers.
        engine: what they run, a name in config/run.py ENGINES; "auto": `find` asks each of them.
        timeout_s, connect_timeout_s, api_key, ca_file: as `Engine.open_transport`'s.
        max_in_flight: samples at once, for the remedy of a process that has too few descriptors;
            None: not known.
        changes: servers come and go (`change`), and none need be there at first.

    Raises:
        ValueError: no address without `changes`, an engine that is not known, or a key or file that can't be
            used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        engine: str,
        timeout_s: float,
        connect_timeout_s: float,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        max_in_flight: int | None = None,
        changes: bool = False,
    ):
        self.timeout_s = timeout_s
        """Limit of a request that has no other."""
        names = tuple(ENGINES) if engine == AUTO else (engine,)
        self._engines = {name: load_engine(name) for name in names}
        self.urls = () if changes and not urls else self._engines[names[0]].checked_urls(urls)
        self._transports = {
            name: loaded.open_transport(
                self.urls,
                timeout_s=timeout_s,
                connect_timeout_s=connect_timeout_s,
                api_key=api_key,
                ca_file=ca_file,
            )
            for name, loaded in self._engines.items()
        }
        if max_in_flight is not None:
            for transport in self._transports.values():
                transport.needed = lambda: descriptors_needed(max_in_flight, len(self.urls))
        self.dropped: tuple[str, ...] = ()
        """Addresses that `drop_silent` has forgotten."""
        self.with_sessions: set[str] = set()
        """Addresses of servers that have answered to a part of an update session."""
        self._name_at: dict[str, str] = {} if engine == AUTO else dict.fromkeys(self.urls, engine)

    @property
    def names(self) -> dict[str, str]:
        """Address -> name of the engine there, in the order of the addresses."""
        return {url: self.name_of(url) for url in self.urls}

    @property
    def engines(self) -> dict[str, Engine]:
        """Name -> engine of those that some server runs, or ran before it left, in the servers' order."""
        self.names  # noqa: B018  fails where it is not known what a server runs
        return {name: self._engines[name] for name in self._name_at.values()}

    @property
    def waiting_here(self) -> int:  # type: ignore[override]
        """Requests that wait for this process or its host, and have reached no server."""
        return sum(transport.waiting_here for transport in self._transports.values())

    def name_of(self, url: str) -> str:
        """The name in config/run.py ENGINES of what a server runs."""
        if url not in self._name_at:
            raise RuntimeError(f"it is not known what runs at {url}: call find_servers first")
        return self._name_at[url]

    def engine_of(self, url: str) -> Engine:
        """What a server runs."""
        return self._engines[self.name_of(url)]

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValueError for parameters that one of the servers' engines does not support.

        Before it is known what the servers run: that none supports.
        """
        known = all(url in self._name_at for url in self.urls)
        refusals = []
        for engine in (self.engines if known else self._engines).values():
            try:
                engine.check_sampling(sampling)
            except ValueError as refusal:
                refusals.append(refusal)
        if refusals and (known or len(refusals) == len(self._engines)):
            raise refusals[0]

    async def recognize(self, timeout_s: float) -> None:
        """Find out what runs at each address, where that is not given; a router stays what it is.

        Raises:
            RolloutServerError, RolloutProtocolError: as `find`.
        """
        names = await all_or_first_failure([self._recognized(url, timeout_s) for url in self.urls])
        self._name_at = dict(zip(self.urls, names, strict=True))

    async def find(self, timeout_s: float) -> None:
        """Find out what runs at each address, where that is not given, and put servers in the place
        of their router.

        Raises:
            RolloutServerError: an address does not answer within timeout_s seconds.
            RolloutProtocolError: none of the engines answers there, or a router has no server.
        """
        await self.recognize(timeout_s)
        found = {}
        for name, engine in self.engines.items():
            urls = [url for url in self.urls if self.name_of(url) == name]
            found |= dict.fromkeys(await engine.find_servers(urls, self._transports[name], timeout_s), name)
        self.use(found)

    async def drop_silent(self, timeout_s: float) -> dict[str, RolloutError]:
        """Forget the addresses that do not answer within timeout_s seconds, if others do; address -> why.

        One at which a proxy answers HTTP 5xx for a server that is gone does not. Where none answers,
        none is forgotten, and `find` says so.
        """

        async def cause(url: str) -> RolloutError | None:
            try:
                name = await self._recognized(url, timeout_s)
                transport, engine = self._transports[name], self._engines[name]
                try:
                    await transport.send(url, engine.model_info(), timeout_s=timeout_s)
                except RolloutServerError as error:
                    if error.status is None:
                        raise
                    # a router may refuse that question
                    await transport.send(url, engine.health(), timeout_s=timeout_s)
            except RolloutError as error:
                return error if may_be_gone(error) else None
            return None

        causes = dict(zip(self.urls, await asyncio.gather(*map(cause, self.urls)), strict=True))
        silent = {url: error for url, error in causes.items() if error is not None}
        if len(silent) == len(causes):
            return {}
        self.urls, self.dropped = tuple(url for url in self.urls if url not in silent), tuple(silent)
        return silent

    def use(self, names: Mapping[str, str]) -> None:
        """Use these servers: address -> name of the engine there."""
        self.urls, self._name_at = tuple(names), dict(names)

    def add(self, names: Mapping[str, str]) -> None:
        """Use these servers too, as `use`."""
        self.use({**self._name_at, **names})

    def change(self, joined: Mapping[str, str], gone: Collection[str]) -> None:
        """Use the `joined` servers too, as `use`, and those that are `gone` no more; what runs there stays
        known, for the requests that are still in flight.
        """
        self._name_at |= joined
        self.urls = (*(url for url in self.urls if url not in gone and url not in joined), *joined)

    async def send(self, url: str, request: Request, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """As `Transport.send`; what a server refuses because it is paused waits here until
        the server goes on.
        """
        transport, engine = self._transports[self.name_of(url)], self.engine_of(url)
        left_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + left_s
        while True:
            try:
                return await transport.send(url, request, timeout_s=left_s)
            except RolloutServerError as error:
                left_s = deadline - time.monotonic() - PAUSED_POLL_S
                if left_s < PAUSED_POLL_S or not engine.refuses_while_paused(error):
                    raise
            await asyncio.sleep(PAUSED_POLL_S)

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()

    async def _recognized(self, url: str, timeout_s: float) -> str:
        """The name of the engine that answers at an address."""
        if url in self._name_at:
            return self._name_at[url]

        async def ask(limit_s: float) -> str:
            for name, engine in self._engines.items():
                if await engine.recognizes(url, self._transports[name], limit_s):
                    return name
            known = ", ".join(engine.name for engine in self._engines.values())
            raise RolloutProtocolError(
                url, "/", f"what answers there is none of {known}; is this the address of a rollout server?"
            )

        return await poll_until(
            ask,
            timeout_s=timeout_s,
            pause_s=POLL_S,
            longest_attempt_s=LONGEST_ATTEMPT_S,
            retry=may_change,
            waited_for="it to tell what it is",
            address=url,
        )

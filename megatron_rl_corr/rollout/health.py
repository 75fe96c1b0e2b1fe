"""Health of servers: leaves out those that fail or fall silent, and takes them back once they are well again.

A server is well again once it is healthy, has the expected weights, and can sample as the run does: one
that was restarted may have been given other flags.
"""

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from megatron_rl_corr.engines.control import HEALTH_PROBE_TIMEOUT_S, ServerControl
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    StaleWeightsError,
    kept,
    may_be_gone,
)
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.server_pool import Counts, Server, ServerPool

FIRST_PROBE_S, LONGEST_BACKOFF_S = 0.5, 30.0
PROBES_OF_A_PUSH = 6
"""Probes at FIRST_PROBE_S of a server with other weights: a push gives them their name after `expect`."""

logger = logging.getLogger(__name__)


class ServerHealth:
    """Decides which servers are in a pool.

    Args:
        fleet: the way to the servers, and what each runs.
        pool: of the servers.
        counts: counts servers that are left out and that come back.
        read_timeout_s: longest time without progress of a server with requests in flight.
    """

    def __init__(self, fleet: Fleet, pool: ServerPool, counts: Counts, *, read_timeout_s: float):
        self.expected_versions: list[str] = []
        """All versions so far, in order: servers must have the last one."""
        self.required: Sequence[SamplingParams] = ()
        """A server that is taken back must be able to sample in all of these ways."""
        self._fleet, self._pool, self._counts = fleet, pool, counts
        self._read_timeout_s = read_timeout_s
        self._probes: dict[Server, asyncio.Task] = {}
        self._unreached: frozenset[str] = frozenset()
        self._watchers, self._watched = 0, None
        self._joined = asyncio.Event()
        self._released = False

    @property
    def expected_version(self) -> str | None:
        """The version that servers must report; None: any."""
        return self.expected_versions[-1] if self.expected_versions else None

    @property
    def silent(self) -> list[str]:
        """Addresses of servers that are left out because they do not answer, and did not when last asked.

        Nor do those for which a proxy answers HTTP 5xx: that may take it as long as its own limit.
        """
        return [
            server.url
            for server in self._pool.left_out
            if not server.answered
            and isinstance(why := server.refused or server.cause, RolloutServerError)
            and may_be_gone(why)
        ]

    def note_answers(self, urls: Collection[str]) -> None:
        """Take note of all servers that have answered a push. Their own probe may hang in a
        request from before.
        """
        for server in self._pool.left_out:
            server.answered = server.url in urls

    def expect(self, version: str, restarted: Collection[str] = (), missed: Collection[str] = ()) -> None:
        """Sample only from weights of this name from now on; servers that are left out are probed at once.

        Args:
            version: the name.
            restarted: addresses of servers that have them, and may have been given other flags; they are left
                out until they are well, and their requests end.
            missed: addresses of servers that the update left out; the same, but they come back after a
                later update only, whatever they call their weights: one that fell out of this one at its
                end may be paused.
        """
        self.expected_versions.append(version)
        self._released = False
        self._unreached = frozenset(missed)
        for server in self._pool.servers:
            if server.url not in restarted and server.url not in missed:
                continue
            endpoint = self._fleet.engine_of(server.url).model_info().endpoint
            why = "it missed a weight update, or was restarted"
            cause = RolloutServerError(server.url, endpoint, None, why, method="GET")
            if server.cause is None:
                self._counts.left_out += 1
                EVENTS.tell("server_left_out", str(cause), server=server.url)
                self._pool.leave_out(server, cause)
            server.abandon(cause)
            server.answered = False
        self._pool.release()
        for server in self._pool.left_out:
            server.refused = None
            self._probe(server, 0.0, updated=server.url in restarted)

    def hold_outage(self, *, released: bool = False) -> None:
        """Declare no outage until the next `expect`. released: servers lack memory until then, and
        `watching` fails.
        """
        self._released = self._released or released
        self._pool.hold()

    def leave_out(self, server: Server, joined: int, cause: RolloutError) -> None:
        """Leave a server out after a failed request; harmless twice.

        Args:
            server: the one that failed.
            joined: its `joined` when the request was sent: an older failure says nothing about it any more.
            cause: the failure.
        """
        if server.cause is not None or server.joined != joined or server.removed:
            return
        self._counts.left_out += 1
        server.flaps += 1
        logger.warning("%s server left out: %s", self._fleet.engine_of(server.url).name, cause)
        EVENTS.tell("server_left_out", str(cause), server=server.url)
        self._pool.leave_out(server, cause)
        if isinstance(cause, StaleWeightsError):
            self._refuse(server, cause)
        # A server that fails every request, and is healthy in between, gets requests less and less often.
        self._probe(server, min(FIRST_PROBE_S * 2.0 ** min(server.flaps - 1, 20), LONGEST_BACKOFF_S))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """While it is open, a server whose requests in flight make no progress is left out,
        and they are ended.

        Any number may be open at once: they share one watch, which ends with the last.

        Raises:
            RuntimeError: servers have released their memory to the trainer, and nothing may be sampled.
        """
        if self._released:
            raise RuntimeError(
                "the servers have released their memory to the trainer: push weights before sampling"
            )
        if self._watchers == 0:
            self._watched = asyncio.create_task(self._watch())
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1
            watch = self._watched
            if self._watchers == 0:
                watch.cancel()
                await asyncio.wait([watch])
            if watch.done() and not watch.cancelled():
                watch.result()  # it ends by itself only with a failure

    async def close(self) -> None:
        """Stop probing servers, and take all back."""
        probes = list(self._probes.values())
        for task in probes:
            task.cancel()
        if probes:
            await asyncio.wait(probes)
        self._probes.clear()
        for server in self._pool.left_out:
            self._pool.rejoin(server)

    def _probe(self, server: Server, delay_s: float, *, updated: bool = False) -> None:
        if server in self._probes:
            self._probes[server].cancel()
        self._probes[server] = asyncio.create_task(self._readmit(server, delay_s, updated))

    async def _readmit(self, server: Server, delay_s: float, updated: bool) -> None:
        """Ask until it is well. updated: it has just taken all of an update, and is not asked
        whether it lives.

        SGLang takes a second to say so, and longer while it is paused: a step may have sampled by then.
        """
        stale = 0
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(max(2 * delay_s, FIRST_PROBE_S), LONGEST_BACKOFF_S)
            try:
                await self._check(server.url, lives=updated)
            except LocalFault:
                continue  # it says nothing about the server
            except RolloutError as error:
                updated = False
                self._refuse(server, error)
                if isinstance(error, StaleWeightsError):
                    stale += 1
                    delay_s = FIRST_PROBE_S if stale <= PROBES_OF_A_PUSH else delay_s
                continue
            self._pool.rejoin(server)
            self._counts.rejoined += 1
            logger.warning("%s server %s is back", self._fleet.engine_of(server.url).name, server.url)
            EVENTS.tell("server_readmitted", "it is healthy and has the expected weights", server=server.url)
            return

    def _refuse(self, server: Server, error: RolloutError) -> None:
        if isinstance(error, StaleWeightsError) and not isinstance(server.refused, StaleWeightsError):
            self._counts.stale += 1
            logger.warning("rollout server refused: %s", error)
        if isinstance(error, RolloutProtocolError) and not isinstance(server.refused, RolloutProtocolError):
            logger.warning("rollout server is not taken back: %s", error)
        server.refused = kept(error)
        server.answered = server.answered and not may_be_gone(error)

    async def _check(self, url: str, *, lives: bool) -> None:
        engine = self._fleet.engine_of(url)
        if not lives:
            await self._fleet.send(url, engine.health(), timeout_s=HEALTH_PROBE_TIMEOUT_S)
        if self.expected_version is None:
            return
        request = engine.model_info()
        status, body = await self._fleet.send(url, request, timeout_s=self._read_timeout_s)
        answer = engine.parse_control(body, server=url, endpoint=request.endpoint, status=status)
        version = engine.weight_version(answer)
        if version != self.expected_version:
            raise StaleWeightsError(url, request.endpoint, version, self.expected_version)
        if url in self._unreached:
            detail = f"it fell out of the update to {version!r} before its end; the next update takes it in"
            raise RolloutProtocolError(url, request.endpoint, detail)
        control = ServerControl(self._fleet, [url], update_timeout_s=self._read_timeout_s)
        for sampling in self.required:
            problem = await control.sampling_problem(sampling)
            if problem is not None:
                raise RolloutProtocolError(url, engine.generate_endpoint, problem)

    def joined(self) -> None:
        """Servers have joined the pool: watch these too."""
        self._joined.set()

    def removed(self, server: Server, drain_s: float, why: str) -> None:
        """A server has left the pool: ask after it no more, and end what it has in flight after drain_s."""
        if (probe := self._probes.pop(server, None)) is not None:
            probe.cancel()
        endpoint = self._fleet.engine_of(server.url).generate_endpoint
        cause = RolloutServerError(server.url, endpoint, None, why)
        asyncio.get_running_loop().call_later(drain_s, server.abandon, cause)

    async def _watch(self) -> None:
        watches: dict[Server, asyncio.Task] = {}
        try:
            while True:
                for server in self._pool.servers:
                    if server not in watches:
                        watches[server] = asyncio.create_task(self._watch_server(server))
                self._joined.clear()
                joined = asyncio.create_task(self._joined.wait())
                waited = [joined, *watches.values()]
                try:
                    ended, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    joined.cancel()
                for server, watch in list(watches.items()):
                    if watch in ended:
                        watch.result()
                        del watches[server]
        finally:
            for watch in watches.values():
                watch.cancel()
            if watches:
                await asyncio.wait(watches.values())

    async def _watch_server(self, server: Server) -> None:
        """Leave the server out, and end its requests, where they have made no progress for read_timeout_s.

        Those of a server that is left out for the failure of another request too: nobody else would end them.

        The time between a check that shows progress and the next check, a fifth of read_timeout_s later,
        counts as silence. An answer is progress too: a server that has sent all of them has no request, while
        they wait here to be read, one after the other.
        """
        now, period, bound = (
            asyncio.get_running_loop().time,
            self._read_timeout_s / 5,
            0.7 * self._read_timeout_s,
        )
        pause, progress, moved = period * random.random(), None, -math.inf  # many clients watch a server
        answers = server.answers
        while not server.removed or server.outstanding:
            due = now() + pause
            await asyncio.sleep(pause)
            pause = period
            oldest = server.oldest_sent
            if oldest is None or self._pool.held:
                progress = None  # nothing to wait for, or the trainer itself pauses it and sends weights
                continue
            begun, joined = now(), server.joined
            # it may also be that this process was too busy to check
            if progress is None or begun > due + period or server.answers != answers:
                moved, answers = begun, server.answers
            engine = self._fleet.engine_of(server.url)
            progress = progress or engine.progress(self._fleet, server.url)
            since = max(moved, oldest)
            timeout_s = max(since + bound - begun, period)
            try:
                silence = await progress.silence(timeout_s)
            except RolloutError as error:  # an answer that can't be read says nothing of its requests either
                silence = error if may_be_gone(error) else None
            silent_s = now() - since
            if silence is None or now() > begun + timeout_s + period:
                moved = now()
            elif silent_s < bound:
                pause = min(period, bound - silent_s)
            elif server.joined == joined and server.oldest_sent == oldest and not self._pool.held:
                detail = f"its requests made no progress for {silent_s:.2g} s ({silence.detail})"
                cause = RolloutServerError(server.url, engine.generate_endpoint, None, detail)
                self.leave_out(server, joined, cause)
                server.abandon(cause)

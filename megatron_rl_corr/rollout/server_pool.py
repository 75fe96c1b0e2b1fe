"""Which rollout server takes the next sample: slots, least outstanding first, and which are left
out. Sends nothing.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megatron_rl_corr.engines.errors import RolloutError, RolloutOutage, kept

MEASURED_ANSWERS, KEPT_SHARE = 8, 0.95
"""Answers before which a server's speed is not judged; what is kept of the sums with each further one."""
USUAL_SPEED, LEAST_SHARE, WEIGHED_S = 0.8, 0.125, 1.0
"""From this share of the fastest server's speed on a server gets as many requests; a slower one gets fewer,
down to LEAST_SHARE; seconds between two comparisons.
"""
UNASKED_S = 60.0
"""A slower server that its share leaves without a request for so long gets one, and is judged anew by it:
with few in flight a server that was slow for a while would else never be asked again.
"""


@dataclass(eq=False)
class Server:
    """One server as its pool sees it."""

    url: str
    outstanding: int = 0
    """Requests in flight there."""
    asked: int = 0
    """Requests sent there so far."""
    cause: RolloutError | None = None
    """Why it is left out; None: it is sampled from."""
    refused: RolloutError | None = None
    """Why it may not come back yet; None: it is not left out, or has not been probed."""
    answered: bool = False
    """It is left out, and has answered the last question of a push."""
    joined: int = 0
    """How often it came back. A request that was sent before that may fail later: that failure
    no longer counts.
    """
    scopes: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """The timeouts of the requests in flight, to end them early, in the order of sending ->
    when each was sent.
    """
    silence: RolloutError | None = None
    """Why the requests in flight were ended early."""
    abandoned: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of those."""
    stopped: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Timeouts that stand still while the trainer sends weights -> the seconds that are left of each."""
    answers: int = 0
    """Samples that it has answered, read and parsed here."""
    flaps: int = 0
    """Times that it was left out since it last gave an answer."""
    place: int = 0
    """Its number in the pool's list."""
    removed: bool = False
    """It has left the pool: it ends its requests in flight, or `abandon` does."""
    tokens: float = 0.0
    """Tokens of its last answers, the older ones fading."""
    seconds: float = 0.0
    """The seconds that these took, each from its sending to its answer."""
    share: float = 1.0
    """Requests that it should have in flight where a server of usual speed has one."""
    heard: float = -math.inf
    """When its last answer came, by the loop's clock."""
    is_due: bool = False
    """It gets one request whatever its share, as `UNASKED_S` says."""
    unreached_until: float = -math.inf
    """Until then, by the loop's clock, another one is taken first: this process could not reach it, for a
    fault of its own that may be of this address alone.
    """

    @property
    def oldest_sent(self) -> float | None:
        """When the oldest request in flight was sent, by the loop's clock."""
        return next(iter(self.scopes.values()), None)

    @property
    def speed(self) -> float | None:
        """Tokens a second of one of its requests, over its last answers; None: too few."""
        return self.tokens / self.seconds if self.answers >= MEASURED_ANSWERS and self.seconds > 0 else None

    def abandon(self, cause: RolloutError) -> None:
        """End the requests in flight with TimeoutError."""
        self.silence = kept(cause)
        now = asyncio.get_running_loop().time()
        for scope in self.scopes:
            if not scope.expired():  # by its own limit, or a cause before: its request has yet to learn of it
                scope.reschedule(now)
                self.abandoned.add(scope)

    def stop_timeouts(self) -> None:
        """Let the limits of requests in flight stand still. Harmless twice."""
        now = asyncio.get_running_loop().time()
        for scope in self.scopes.keys() - self.stopped.keys() - self.abandoned:
            if not scope.expired():
                self.stopped[scope] = scope.when() - now
                scope.reschedule(None)

    def continue_timeouts(self) -> None:
        """Let them go on. Harmless without `stop_timeouts`."""
        now = asyncio.get_running_loop().time()
        for scope in self.stopped.keys() & self.scopes.keys() - self.abandoned:
            scope.reschedule(now + self.stopped[scope])
        self.stopped.clear()


def rotated(urls: Sequence[str], replica: int, replicas: int) -> list[str]:
    """The addresses from the place of a replica on, and round. Those of R replicas lie
    evenly over the list.
    """
    start = replica * len(urls) // replicas
    return [*urls[start:], *urls[:start]]


NOT_FREE = 1 << 62
"""The load of a server that is left out or full."""
LOAD_STEPS = 64
"""Parts of a request that loads are told apart by."""
CROWDED, FEW = 2, 4
"""A preferred server is taken while it has up to CROWDED * (n + FEW) requests in flight, n those
of the freest one.
"""


class ServerPool:
    """Chooses a server for each request, within a limit of requests in flight over all servers and at each.

    Args:
        urls: addresses of the servers.
        max_outstanding: requests in flight over all servers.
        max_per_server: requests in flight at each server; None: as many.
        outage_timeout_s: when every server has been left out for so many seconds, all who wait for one get
            RolloutOutage.
        replica, replicas: which of so many pools of the same servers this is. Each begins at another place
            of the list, so that all together ask servers evenly: the first of a tie would else be the same
            server for each.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_outstanding: int,
        max_per_server: int | None,
        outage_timeout_s: float,
        replica: int = 0,
        replicas: int = 1,
    ):
        if not 0 <= replica < replicas:
            raise ValueError(f"replica must be at least 0 and below replicas, got {replica} of {replicas}")
        self._place = replica, replicas
        self._max_outstanding = max_outstanding
        self._max_per_server = max_per_server or max_outstanding
        self._outage_timeout_s = outage_timeout_s
        self._idle: tuple[float, float | None] = 0.0, time.monotonic()
        """(seconds without a request in flight, the last ones left out; since when there is none now): one
        tuple, as another thread reads it.
        """
        self._waiters: deque[asyncio.Future] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_outage, self._held = False, False
        self.use(urls)

    def use(self, urls: Sequence[str]) -> None:
        """Use these servers and no others; call it before the first is taken."""
        self.outstanding = 0
        """Requests in flight over all servers."""
        self._weighed = -math.inf
        self._list([Server(url) for url in rotated(urls, *self._place)])

    def _list(self, servers: list[Server]) -> None:
        self.servers = servers
        self._at = {server.url: server for server in servers}
        self._loads = [0] * len(servers)
        """The load of each server, as one number: with hundreds of servers a request must not look at each
        of them in Python.
        """
        for place, server in enumerate(servers):
            server.place = place
            self._note_load(server)

    def add(self, urls: Sequence[str]) -> None:
        """Send these servers requests too; they begin as if they had been asked as often as the others."""
        asked = min((server.asked for server in self.servers), default=0)
        self._list([*self.servers, *(Server(url, asked=asked) for url in urls)])
        self._end_outage()

    def remove(self, urls: Collection[str]) -> list[Server]:
        """Send these servers no more requests, and forget them; those in flight go on. Returns them."""
        gone = [server for server in self.servers if server.url in urls]
        for server in gone:
            server.removed = True
            server.continue_timeouts()
        self._list([server for server in self.servers if not server.removed])
        self._time_outage()
        return gone

    @property
    def left_out(self) -> list[Server]:
        """The servers that are not sampled from now."""
        return [server for server in self.servers if server.cause is not None]

    def has_other(self, than: Collection[str]) -> bool:
        """True if a server is sampled from that has none of these addresses."""
        return any(server.cause is None and server.url not in than for server in self.servers)

    async def take(self, avoid: Collection[str] = (), prefer: str | None = None) -> Server:
        """The server for one request: waits until one has a free slot. Give it back when the
        request has ended.

        Args:
            avoid: addresses that are taken only where no other server has a slot.
            prefer: address of the server to take if it has a slot, unless it has many more
                requests than another.

        Raises:
            RolloutOutage: every server has been left out for outage_timeout_s.
        """
        while True:
            if self._is_outage:
                raise RolloutOutage([(server.cause, server.refused) for server in self.servers])
            server = self._freest(avoid, prefer)
            if server is None and not self.servers:
                self._time_outage()
            if server is not None:
                if self.outstanding == 0:
                    self._idle = self.idle_s, None
                server.outstanding += 1
                server.asked += 1
                self.outstanding += 1
                self._note_load(server)
                return server
            await self._slot_freed()

    def give_back(self, server: Server) -> None:
        """Free the slot of a request that has ended, well or not."""
        server.outstanding -= 1
        self.outstanding -= 1
        if self.outstanding == 0:
            self._idle = self._idle[0], time.monotonic()
        self._note_load(server)
        self._wake(1)

    def leave_out(self, server: Server, cause: RolloutError) -> None:
        """Send the server no more requests until it rejoins; nothing happens to one that was removed."""
        server.cause, server.refused, server.answered = kept(cause), None, False
        self._note_load(server)
        self._time_outage()

    def rejoin(self, server: Server) -> None:
        """Send the server requests again: it is healthy."""
        server.cause = server.refused = None
        server.joined += 1
        self._note_load(server)
        self._end_outage()

    def _end_outage(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._is_outage = None, False
        self._wake(len(self._waiters))

    def note_speed(self, server: Server, tokens: int, seconds: float) -> None:
        """Take note of an answer, of so many tokens after so many seconds, and deal by the servers' speeds.

        The speed is that of one request, Σ tokens / Σ seconds over a server's last answers: more requests
        make it smaller, so that shares settle, while the tokens of the whole server would grow with its
        share. Servers within USUAL_SPEED of the fastest count as equal, so noise moves nothing.
        """
        now = asyncio.get_running_loop().time()
        server.tokens = KEPT_SHARE * server.tokens + tokens
        server.seconds = KEPT_SHARE * server.seconds + seconds
        server.heard, server.is_due = now, False
        if now - self._weighed < WEIGHED_S:
            return
        self._weighed = now
        speeds = {one: one.speed for one in self.servers if one.speed is not None}
        fastest = max(speeds.values(), default=0.0)
        for one, speed in speeds.items():
            relative = speed / fastest if fastest else 1.0
            one.share = 1.0 if relative >= USUAL_SPEED else max(relative, LEAST_SHARE)
            if one.share < 1.0 and not one.outstanding and now - one.heard > UNASKED_S:
                one.is_due, one.tokens, one.seconds = True, 0.0, 0.0
            self._note_load(one)

    @property
    def idle_s(self) -> float:
        """Seconds since it was made in which no request was in flight; from any thread."""
        before, since = self._idle
        return before + (0.0 if since is None else time.monotonic() - since)

    @property
    def servers_wanted(self) -> int:
        """Servers that the requests of now would keep busy: ceil(min(in flight + waiting, max_outstanding) /
        max_per_server).

        Example: 30 in flight, 50 waiting, at most 64 in flight and 16 at a server: ceil(64 / 16) = 4.
        """
        wanted = min(self.outstanding + self.waiting, self._max_outstanding)
        return math.ceil(wanted / self._max_per_server)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot; from any thread."""
        return sum(not waiter.done() for waiter in list(self._waiters))

    def hold(self) -> None:
        """Until `release` no outage is declared, and no request reaches its own limit: servers that are
        paused do not answer.
        """
        self._held = True
        for server in self.servers:
            server.stop_timeouts()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def release(self) -> None:
        """The time of an outage begins anew, if there is one."""
        self._held = False
        for server in self.servers:
            server.continue_timeouts()
        self._time_outage()

    @property
    def held(self) -> bool:
        """Servers are paused, as `hold` says."""
        return self._held

    def _time_outage(self) -> None:
        waits = self._timer is None and not self._is_outage and not self._held
        if waits and len(self.left_out) == len(self.servers):
            self._timer = asyncio.get_running_loop().call_later(self._outage_timeout_s, self._declare_outage)

    def _freest(self, avoid: Collection[str], prefer: str | None) -> Server | None:
        if self.outstanding >= self._max_outstanding:
            return None
        if not self.servers:
            return None
        freest = self.servers[self._loads.index(min(self._loads))]
        if not self._is_free(freest):
            return None
        now = asyncio.get_running_loop().time()
        if freest.url in avoid or freest.unreached_until > now:
            freest = min(
                filter(self._is_free, self.servers),
                key=lambda s: (s.url in avoid or s.unreached_until > now, self._loads[s.place]),
            )
        preferred = None if prefer in avoid else self._at.get(prefer)
        if preferred is not None and self._is_free(preferred):
            return preferred if preferred.outstanding <= CROWDED * (freest.outstanding + FEW) else freest
        return freest

    def _is_free(self, server: Server) -> bool:
        return self._loads[server.place] != NOT_FREE

    def _note_load(self, server: Server) -> None:
        """Its requests in flight, as many as they are for its speed, then how often it was asked, as one
        number; after a change of any of these.
        """
        if server.removed:
            return
        free = server.cause is None and server.outstanding < self._max_per_server
        # one more of a server with share 1/2 is as much as two more of another
        share = 1.0 if server.is_due and not server.outstanding else server.share
        load = round(LOAD_STEPS * ((server.outstanding + 1) / share - 1))
        self._loads[server.place] = load << 32 | server.asked if free else NOT_FREE

    async def _slot_freed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was woken, and will not use the slot
                self._wake(1)
            raise

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():  # a cancelled one stays in the line until it is met here
                waiter.set_result(None)
                count -= 1

    def _declare_outage(self) -> None:
        self._timer, self._is_outage = None, True
        self._wake(len(self._waiters))


@dataclass
class Counts:
    """Events since a client was made, as numbers that only grow: those of a step are differences
    of two readings.
    """

    samples: int = 0
    """Samples returned."""
    tokens: int = 0
    """Their response tokens."""
    prefilled: int = 0
    """Prompt tokens of all requests that a server had not cached, and computed."""
    stop: int = 0
    """Samples that ended with a stop id or text."""
    length: int = 0
    """Samples that ended with max_new_tokens."""
    abort: int = 0
    """Samples cut short, and returned so because max_continuations were used up."""
    cut: int = 0
    """Samples that were cancelled while a server sampled them."""
    cut_tokens: int = 0
    """Their tokens by then, of the servers that returned them."""
    continuations: int = 0
    """Requests that took up an aborted sample where it was cut."""
    retries: int = 0
    """Requests sent again, because the server failed or did not answer; no token of the
    failed ones is used.
    """
    left_out: int = 0
    """Times that a server was left out."""
    rejoined: int = 0
    """Times that one came back."""
    stale: int = 0
    """Times that a server was refused because its weights were not the trainer's."""
    missed_stops: int = 0
    """Samples in which the server missed a stop text; what it sampled after that is left out."""
    nonfinite_logprobs: int = 0
    """Tokens returned whose log-prob was null, NaN or infinite; NaN in the trajectory."""

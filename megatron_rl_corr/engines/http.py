"""Sends one request to a rollout server over HTTP: the body of a 2xx answer, or a `RolloutServerError`."""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from megatron_rl_corr.config.urls import is_key
from megatron_rl_corr.engines.addresses import UnusableAddress, mistaken_scheme
from megatron_rl_corr.engines.errors import RolloutServerError, UnreadableAnswer, body_start, shown
from megatron_rl_corr.engines.local_faults import PAUSES_S, WAIT_S, LocalFault, local_fault
from megatron_rl_corr.engines.secrets import keep_secret
from megatron_rl_corr.engines.types import Request, Transport


def checked_key(api_key: str | None) -> str | None:
    """The key, if a header can carry it.

    Raises:
        ValueError: it can't; the message does not contain the key.
    """
    if api_key is not None and not is_key(api_key):
        raise ValueError(
            "api_key must be printable ASCII without spaces around it: is there a line end at its end?"
        )
    return api_key


def certificates(ca_file: str | Path | None, urls: Sequence[str]) -> ssl.SSLContext | bool:
    """How https servers are verified: by the authorities of a PEM file alone, or (None) by the system's.

    Raises:
        ValueError: the file is no PEM file, or there are addresses and none is https.
    """
    if ca_file is None:
        return True
    if urls and not any(url.startswith("https://") for url in urls):
        raise ValueError(f"`ca_file` {ca_file} has no effect: no server address is https://; leave it out")
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise ValueError(f"`ca_file` {ca_file} is not a PEM file of certificates: {error}") from None


def no_remedy(endpoint: str, status: int, detail: str) -> str:
    """No advice on a failed request: `remedy` of `HTTPTransport` where an engine knows none."""
    return ""


UNPACKED = {"Accept-Encoding": "identity"}
"""A header of every request: a megabyte that is compressed may become a gigabyte."""
KEPT_S = 2.0
"""Seconds that an idle connection is kept between the buckets of a push: servers close theirs after 5."""
MOST_OF_A_FAILURE = 1 << 16
"""Bytes of an answer that is no 2xx: its start goes into a message."""


SLOW_S = 60.0
"""Seconds that the body of an answer may take after its headers, beside those that SLOWEST gives it. Servers
compute first, and then send all of it.
"""
SLOWEST = 1 << 16
"""Bytes of a body that give it a second more."""


class TooSlow(Exception):
    """The body of an answer comes more slowly than it may."""


class TooLong(ValueError):
    """An answer is longer than it may be, or hides how long it is."""


class HTTPTransport(Transport):
    """An HTTP session, opened by the first request and bound to that request's event loop.

    Args:
        timeout_s: limit of a request, from its start to the end of its answer.
        connect_timeout_s: limit of making a connection.
        api_key: sent as a bearer token; never in an error message.
        tls: how https servers are verified, as `certificates` returns it.
        remedy: what to do about an answer of (endpoint, HTTP status, start of the body), or "".
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        api_key: str | None = None,
        tls: ssl.SSLContext | bool = True,
        remedy: Callable[[str, int, str], str] = no_remedy,
    ):
        self._tls, self._remedy = tls, remedy
        self.timeout_s = timeout_s
        self.connect_timeout_s = connect_timeout_s
        self._api_key = api_key
        keep_secret(self, api_key)  # a server may quote what it was sent
        self.needed: Callable[[], int] | None = None
        self.waiting_here = 0
        self._answered: set[str] = set()
        """Addresses that have answered in their protocol: one that breaks a connection later is
        looked at no more.
        """
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        """Close the sessions. The next request opens another."""
        if self._sessions:
            self._check_loop()
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()
        self._loop = None

    async def send(self, url: str, request: Request, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Send one request and return (status, body) of its 2xx answer.

        Args:
            url: the server's address, as `checked_urls` returns it.
            request: what to send.
            timeout_s: limit from the start of the request to the end of its answer; math.inf: none, once
                there is a connection; None: the transport's own.

        Raises:
            RolloutServerError: no answer, or one with another status; UnusableAddress where
                there will be none.
            LocalFault: this process can reach nobody. It has tried for WAIT_S, where nothing had been sent.
            UnreadableAnswer: one that is longer than the request allows, or compressed, which
                could hide a length.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        deadline, pauses = loop.time() + min(WAIT_S, limit), iter(PAUSES_S)
        while True:
            try:
                return await self._send(url, request, limit)
            except LocalFault as fault:
                pause = next(pauses, PAUSES_S[-1])
                if fault.sent or loop.time() + pause > deadline:
                    raise
            self.waiting_here += 1
            try:
                await asyncio.sleep(pause)
            finally:
                self.waiting_here -= 1

    async def _send(self, url: str, request: Request, limit: float) -> tuple[int, bytes]:
        """One attempt of `send`."""
        session = self._open_session(kept=request.keeps_connection)
        timeout = aiohttp.ClientTimeout(
            total=None if limit == math.inf else limit,
            sock_connect=min(self.connect_timeout_s, limit),
            ceil_threshold=math.inf,  # to the moment, not to the next full second
        )
        try:
            # A redirect would carry the key to another server.
            async with session.request(
                request.method,
                url + request.endpoint,
                data=request.body,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                status, well = response.status, 200 <= response.status < 300
                body = await read_body(
                    response, request.max_bytes if well else MOST_OF_A_FAILURE, slow_s=SLOW_S
                )
        except TooLong as error:
            if well:
                raise UnreadableAnswer(url, request.endpoint, str(error)) from None
            body = str(error).encode()
        except TooSlow as error:
            raise self._error(url, request, None, str(error), timed_out=True) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RuntimeError) as error:
            if (fault := local_fault(error, needed=self.needed and self.needed())) is not None:
                sent = not isinstance(error, (aiohttp.ClientConnectorError, RuntimeError))
                raise LocalFault(url, request.endpoint, *fault, sent=sent) from None
            if isinstance(error, RuntimeError):
                raise
            if url not in self._answered and (
                mistake := await mistaken_scheme(url, error, self.connect_timeout_s)
            ):
                what, remedy = mistake
                raise UnusableAddress(
                    url, request.endpoint, what, method=request.method, remedy=remedy
                ) from None
            # The cause is not shown: it may quote the answer.
            reason = _reason(error, limit, self.connect_timeout_s)
            raise self._error(url, request, None, reason, timed_out=isinstance(error, TimeoutError)) from None
        self._answered.add(url)
        if not well:
            raise self._error(url, request, status, body_start(body))
        return status, body

    def _open_session(self, *, kept: bool) -> aiohttp.ClientSession:
        """The session whose connections are kept for KEPT_S, or the one that ends each with its request."""
        if kept not in self._sessions:
            headers = {"Content-Type": "application/json", **UNPACKED}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._loop = self._loop or asyncio.get_running_loop()
            self._sessions[kept] = aiohttp.ClientSession(
                headers=headers,
                auto_decompress=False,
                trust_env=False,  # a proxy from the environment cannot reach a server on the loopback
                # one server's would go to all at its host, whatever their port
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(
                    ssl=self._tls,
                    limit=0,  # control requests must not queue behind samples
                    # The server closes idle connections after some seconds, and a POST that meets a closing
                    # one can't be repeated safely; against sampling, the time to connect is nothing.
                    force_close=not kept,
                    **({"keepalive_timeout": KEPT_S} if kept else {}),
                    socket_factory=_kept_alive,
                ),
            )
        self._check_loop()
        return self._sessions[kept]

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "the HTTP session belongs to another event loop: use one LoopThread for all calls"
            )

    def _error(
        self, url: str, request: Request, status: int | None, detail: str, *, timed_out: bool = False
    ) -> RolloutServerError:
        remedy = "" if status is None else self._remedy(request.endpoint, status, detail)
        return RolloutServerError(
            url,
            request.endpoint,
            status,
            detail,
            method=request.method,
            remedy=remedy,
            timed_out=timed_out,
        )


def open_http(
    urls: Sequence[str],
    *,
    timeout_s: float,
    connect_timeout_s: float,
    api_key: str | None = None,
    ca_file: str | Path | None = None,
    remedy: Callable[[str, int, str], str],
) -> HTTPTransport:
    """As `Engine.open_transport`. remedy: as `HTTPTransport`."""
    return HTTPTransport(
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        api_key=checked_key(api_key),
        tls=certificates(ca_file, urls),
        remedy=remedy,
    )


async def read_body(response: aiohttp.ClientResponse, most: int, *, slow_s: float | None = None) -> bytes:
    """The body of an answer that was asked for with the headers UNPACKED, in a session that unpacks nothing.

    Args:
        response: whose body has not been read.
        most: bytes of it, at most.
        slow_s: seconds that it may take, beside one for each SLOWEST bytes; None: as long as the request may.
            A time in which this process was too busy to read does not count.

    Raises:
        TooLong: it has more, or is compressed; what has come so far is dropped.
        TooSlow: so far it has taken more than slow_s + its bytes / SLOWEST, in seconds.
        aiohttp.ClientError: the connection broke.
    """
    # as it came: a key in it must be found
    encoding = response.headers.get("Content-Encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise TooLong(
            f"its answer is compressed ({shown(encoding)}), which it was asked not to do: how long is it?"
        )
    parts, length, spent_s, now = [], 0, 0.0, asyncio.get_running_loop().time
    while True:
        begun, part = now(), None
        try:
            async with asyncio.timeout(slow_s and slow_s / 10) as scope:
                part = await response.content.readany()
        except TimeoutError:
            if not scope.expired():  # the limit of the whole request
                raise
        spent_s += min(now() - begun, (slow_s or math.inf) / 10)
        if part == b"":
            break
        parts.append(part or b"")
        length += len(parts[-1])
        if slow_s is not None and spent_s > slow_s + length / SLOWEST:
            raise TooSlow(
                f"timed out: its answer comes too slowly, {length} bytes in {spent_s:.3g} s after its headers"
            )
        if length > most:
            raise TooLong(
                f"its answer has more than the {most} bytes that an answer to this request can have"
            )
    return b"".join(parts)


def _kept_alive(address: tuple) -> socket.socket:
    """A socket with TCP keep-alive: a connection is silent while its answer is computed.

    So the kernel notices a host that is gone, and a load balancer does not take the connection for idle.
    """
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return made


def _reason(error: Exception, limit: float, connect_limit: float) -> str:
    """Why there was no answer, in a few words."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return f"timed out connecting ({min(limit, connect_limit):g} s)"
    if isinstance(error, TimeoutError):
        return f"timed out after {limit:g} s"
    if isinstance(error, aiohttp.ClientConnectorError):
        if isinstance(error.os_error, ConnectionRefusedError):
            return "connection refused"
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return f"the connection broke in the middle of the answer ({shown(str(error))})"
    return f"{type(error).__name__}: {shown(str(error))}"

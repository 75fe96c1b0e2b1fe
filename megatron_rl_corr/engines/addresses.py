"""Addresses at which no server will ever answer as asked, told at once from those of servers
that are starting.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import aiohttp

from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError

_LATER = (408, 425, 429)
"""Statuses below 500 that ask the client to come again."""


class UnusableAddress(RolloutServerError):
    """Nothing that speaks this address's protocol is there, or nothing that is trusted; asking again
    changes nothing.
    """

    def __init__(self, url: str, endpoint: str, detail: str, *, method: str, remedy: str):
        super().__init__(url, endpoint, None, detail, method=method, remedy=remedy)

    def __reduce__(self):
        return _unusable, (self.url, self.endpoint, self.detail, self.method, self.remedy)


def is_loopback(url: str) -> bool:
    """True if a server's address is this host's own: it then sees the same files, unless it
    is in a container.
    """
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def may_change(error: RolloutError) -> bool:
    """True if a server that starts, or a proxy before it, may answer otherwise later."""
    if isinstance(error, UnusableAddress) or not isinstance(error, RolloutServerError):
        return False
    return error.status is None or error.status >= 500 or error.status in _LATER


async def mistaken_scheme(url: str, error: Exception, limit_s: float) -> tuple[str, str] | None:
    """(what is wrong, the remedy) where a request failed because of http or https in its address;
    None: it did not.

    Args:
        url: the server's address.
        error: of aiohttp, before any answer came.
        limit_s: longest look at a port that may speak TLS.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"certificate verify failed: {cause.verify_message}", (
                "name the certificates of its authority in `ca_file`, and give the host as the certificate "
                "names it"
            )
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return "what answers there speaks no TLS", f"is it http://{url.removeprefix('https://')}?"
    if (
        isinstance(error, aiohttp.ServerDisconnectedError)
        and url.startswith("http://")
        and (await _speaks_tls(url, limit_s))
    ):
        return "it closed the connection, and speaks TLS", f"is it https://{url.removeprefix('http://')}?"
    return None


async def _speaks_tls(url: str, limit_s: float) -> bool:
    """True if a TLS handshake succeeds at this address, whoever it is."""
    parts = urlsplit(url)
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # nothing is sent there
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=anybody)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def _unusable(url, endpoint, detail, method, remedy):
    return UnusableAddress(url, endpoint, detail, method=method, remedy=remedy)

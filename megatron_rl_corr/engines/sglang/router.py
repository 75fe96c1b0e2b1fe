"""Finds the servers behind an SGLang router.

A router passes each request to one server of its choice, but a pause or a weight update is for all of
them, and the client decides which servers are left out until their weights are right. So the client asks
the router once for its servers, and then speaks to these.
"""

from collections.abc import Sequence

import orjson

from megatron_rl_corr.config.urls import checked_urls
from megatron_rl_corr.engines.addresses import may_change
from megatron_rl_corr.engines.concurrency import all_or_first_failure, poll_until
from megatron_rl_corr.engines.control import HEALTH_PROBE_TIMEOUT_S
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError, shown
from megatron_rl_corr.engines.sglang.requests import model_info
from megatron_rl_corr.engines.types import Request, Transport

POLL_S = 0.5
WORKERS = Request("GET", "/workers")  # sglang-router 0.3.2; a server has no such endpoint


async def recognizes(url: str, transport: Transport, timeout_s: float) -> bool:
    """True if a router, or a server, of SGLang answers at an address."""
    for request in (WORKERS, model_info()):
        try:
            await transport.send(url, request, timeout_s=timeout_s)
            return True
        except RolloutServerError as error:
            if error.status != 404:
                raise
    return False


async def servers_behind(urls: Sequence[str], transport: Transport, timeout_s: float) -> tuple[str, ...]:
    """The addresses, each router's replaced by those of its servers, in its order.

    Waits for an answer of each address, and for a router to have registered a server.

    Args:
        urls: of servers and routers.
        transport: to them.
        timeout_s: limit of the wait.

    Raises:
        RolloutServerError: no answer came.
        RolloutProtocolError: a router has no server, or servers that the client can't speak to.
    """

    async def find(url: str, limit_s: float) -> list[str]:
        try:
            _, body = await transport.send(url, WORKERS, timeout_s=limit_s)
        except RolloutServerError as error:
            if error.status == 404:  # it answers, and knows no workers: a server
                return [url]
            raise
        return _worker_urls(url, body)

    async def wait_for(url: str) -> list[str]:
        return await poll_until(
            lambda limit_s: find(url, limit_s),
            timeout_s=timeout_s,
            pause_s=POLL_S,
            longest_attempt_s=HEALTH_PROBE_TIMEOUT_S,
            retry=_may_change,
            waited_for="it",
            address=url,
        )

    lists = await all_or_first_failure([wait_for(url) for url in urls])
    return checked_urls([url for found in lists for url in found])


class _NoWorker(RolloutProtocolError):
    """A router has no server yet."""


def _may_change(error: RolloutError) -> bool:
    return isinstance(error, _NoWorker) or may_change(error)


def _worker_urls(url: str, body: bytes) -> list[str]:
    try:
        workers = orjson.loads(body)["workers"]
        kinds = {worker["worker_type"] for worker in workers}
        found = [worker["url"] for worker in workers]
        if not set(map(type, found)) <= {str}:
            raise TypeError(f"a url is no text: {found}")
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RolloutProtocolError(
            url, WORKERS.endpoint, f"it is no list of workers: {shown(error)}"
        ) from None
    kinds = {str(kind) for kind in kinds}
    if kinds - {"regular"}:
        raise RolloutProtocolError(
            url,
            WORKERS.endpoint,
            f"its workers are {', '.join(sorted(kinds))}: prefill and decode in servers "
            "of their own are not supported; start regular workers",
        )
    split = [worker for worker in found if "@" in worker]
    if split:
        raise RolloutProtocolError(
            url,
            WORKERS.endpoint,
            f"its worker {split[0]} is one data-parallel rank of a server; start the router "
            "without --dp-aware",
        )
    try:
        for worker in found:
            checked_urls([worker])
    except ValueError as error:
        raise RolloutProtocolError(url, WORKERS.endpoint, str(error)) from None
    if not found:
        raise _NoWorker(url, WORKERS.endpoint, "this router has no worker; start its servers")
    return found

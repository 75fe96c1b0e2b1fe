"""Finds the servers behind an SGLang router.

A router passes each request to one server of its choice, but a pause or a weight update is for all of them, and who is
left out until its weights are right is the client's to say: it asks the router once, and then speaks to the servers.
"""

import asyncio
import time
from collections.abc import Sequence

import orjson

from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.fan_out import all_or_first_failure
from megatron_rl_corr.engines.http import HEALTH_PROBE_TIMEOUT_S, Transport, checked_urls
from megatron_rl_corr.engines.sglang.requests import Request

POLL_S = 0.5
WORKERS = Request("GET", "/workers")  # sglang-router 0.3.2; a server has no such endpoint


async def servers_behind(urls: Sequence[str], transport: Transport, timeout_s: float) -> tuple[str, ...]:
    """The addresses, each router's replaced by those of its servers, in its order.

    Waits up to timeout_s for an answer of each, and for a router to have registered a server. Raises
    RolloutServerError where none comes, RolloutProtocolError for a router whose servers can't be spoken to.
    """
    deadline = time.monotonic() + timeout_s

    async def ask(url: str) -> list[str]:
        while True:
            waited, failure = time.monotonic() >= deadline, None
            try:
                probe_s = min(max(0.1, deadline - time.monotonic()), HEALTH_PROBE_TIMEOUT_S)
                _, body = await transport.send(url, WORKERS, timeout_s=probe_s)
                found = _worker_urls(url, body)
                if found:
                    return found
                failure = RolloutProtocolError(url, WORKERS.endpoint, "this router has no worker; start its servers")
            except RolloutServerError as error:
                if error.status == 404:  # it answers, and knows no workers: a server
                    return [url]
                if error.status is not None and error.status < 500:
                    raise
                failure = error
            if waited:
                failure.add_note(f"waited {timeout_s:g} s for it")
                raise failure
            await asyncio.sleep(POLL_S)

    lists = await all_or_first_failure([ask(url) for url in urls])
    return checked_urls([url for found in lists for url in found])


def _worker_urls(url: str, body: bytes) -> list[str]:
    try:
        workers = orjson.loads(body)["workers"]
        kinds = {worker["worker_type"] for worker in workers}
        found = [worker["url"] for worker in workers]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise RolloutProtocolError(url, WORKERS.endpoint, f"it is no list of workers: {error!r}") from error
    if kinds - {"regular"}:
        raise RolloutProtocolError(
            url, WORKERS.endpoint, f"its workers are {', '.join(sorted(kinds))}: prefill and decode in servers "
            "of their own are not supported; start regular workers",
        )  # fmt: skip
    split = [worker for worker in found if "@" in worker]
    if split:
        raise RolloutProtocolError(
            url, WORKERS.endpoint, f"its worker {split[0]} is one data-parallel rank of a server; start the router "
            "without --dp-aware",
        )  # fmt: skip
    return found

"""Which servers can take an update: who answers, and what a trainer that was killed has left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine
from typing import Any

from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.memory import ALL_MEMORY, MemoryPart
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient

PATIENCE_S, PAUSE_S = 1.5, 0.5
"""How long a server that answered before may be gone before an update goes on without it; the time
between requests.
"""

RELEASE_S = 6.0
"""Seconds that a process which ends spends on `WeightServers.release`; each of the two requests
has a third of it.
"""

logger = logging.getLogger(__name__)


def reported_versions(client: RolloutClient, loop: LoopThread, present: Collection[str]) -> list[str | None]:
    """What each server of the client calls its weights; None: it does not answer.

    A server of `present` that is sampled from is asked for PATIENCE_S: a proxy that is loaded anew is gone
    for a moment. One that hangs has used that up with its first request.

    Args:
        client: of all servers.
        loop: its event loop.
        present: addresses of those that took part in the last update, or in this one.

    Raises:
        RolloutError: no server answers.
    """
    end, waited_for = time.monotonic() + PATIENCE_S, set(present) - set(client.left_out)
    while True:
        failure = None
        try:
            versions = loop.call(client.versions_for_update())
        except RolloutError as error:
            failure, versions = error, [None] * len(client.base_urls)
        silent = {url for url, version in zip(client.base_urls, versions, strict=True) if version is None}
        if not silent & waited_for or time.monotonic() > end:
            if failure is not None:
                raise failure
            return versions
        time.sleep(PAUSE_S)


def unfinished(version: str) -> str:
    """What a server's weights are called while those of `version` are sent."""
    return f"unfinished {version}"


def without_cache(version: str) -> str:
    """The same, of a server that has released the memory of its keys and values (`weight_sync.memory`)."""
    return unfinished(f"without cache {version}")


def released(version: str) -> str:
    """What they are called while it has released all of its memory: they were of this version."""
    return f"released {version}"


def changing(version: str) -> str:
    """What they are called while it releases memory or takes it again: nobody knows which it has."""
    return f"changing memory {version}"


def is_changing(name: str) -> bool:
    """True if nobody knows which memory a server has whose weights have this name; only a
    restart mends that.
    """
    return name.startswith(changing(""))


_STATES = (without_cache(""), unfinished(""), released(""), changing(""))


def weights_of(name: str) -> str:
    """The version in a name of weights, whatever state the name tells."""
    state = next((state for state in _STATES if name.startswith(state)), "")
    return name[len(state) :]


def missing_memory(name: str) -> tuple[MemoryPart, ...]:
    """What a server lacks whose weights have this name."""
    if name.startswith(released("")):
        return ALL_MEMORY
    return ("cache",) if name.startswith(without_cache("")) else ()


def check_memory(url: str, name: str, *, endpoint: str, colocated: bool) -> None:
    """Check that a trainer can update a server whose weights have this name.

    Args:
        url, endpoint: for the error.
        name: of the weights.
        colocated: the trainer can give memory back.

    Raises:
        RolloutProtocolError: nobody knows which memory it has, or it lacks some.
    """
    if is_changing(name):
        raise RolloutProtocolError(
            url,
            endpoint,
            f"its weights are called {name!r}: its answer was lost when it was asked to release memory or to "
            "take it again, or the trainer was killed meanwhile, and nobody knows which it has; restart the "
            "server",
        )
    if missing_memory(name) and not colocated:
        raise RolloutProtocolError(
            url,
            endpoint,
            f"its weights are called {name!r}: it has released its memory to a trainer with `colocate`, "
            "whose next push or start gives it back; or restart the server",
        )


def is_interrupted(name: str) -> bool:
    """True if a trainer has begun with this server what it has not ended: a push, or a turn on its GPUs."""
    return name.startswith(_STATES)


async def wait_updatable(client: RolloutClient, timeout_s: float) -> None:
    """Return once every server can sample, or `is_interrupted` by a trainer that was killed: the next
    push resumes it.

    A trainer that was killed shortly before or after its update has left a server paused whose weights have a
    usual name; SGLang calls itself unhealthy then. Every server that answers is told to go on, which is
    harmless otherwise.

    Raises:
        RolloutServerError: one could not after timeout_s; its last failure.
    """
    try:
        versions = await client.reported_versions()
    except RolloutServerError:  # none answers yet
        versions = [None] * len(client.base_urls)
    named = dict(zip(client.base_urls, versions, strict=True))
    others = [url for url, version in named.items() if version is None or not is_interrupted(version)]
    paused = [client.control([url]).continue_generation() for url in others if named[url] is not None]
    await asyncio.gather(*map(briefly, paused))
    await client.control(others).wait_healthy(timeout_s)


async def briefly(request: Coroutine[Any, Any, object]) -> None:
    """Send a request and wait a short time: a server handles it even without a reader of the answer."""
    try:
        async with asyncio.timeout(RELEASE_S / 3):
            await request
    except (RolloutError, TimeoutError) as error:
        logger.warning("a rollout server did not take the end of a push: %s", error)

"""An event loop whose clock moves only when nothing can run: waits take no time, and are just as
long as they say.

So a test of limits, pauses and bounds does not depend on the machine's speed. Servers are functions of the
test, as in stand_in_server.py, and no socket is between: a socket's bytes would come by the real clock.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.http import HTTPTransport
from megatron_rl_corr.rollout import RolloutClient

TURN_S = 1e-9
"""What a turn of the loop takes."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Skips the time to its next timer. A loop that waits for nothing at all raises, as it
    would wait for ever.
    """

    def __init__(self):
        super().__init__()
        self._now, self._ready_now = 0.0, self._selector.select
        self._selector.select = self._select

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now

    def block(self, seconds: float) -> None:
        """Let time pass while the loop can do nothing, as code does that is no coroutine."""
        self._now += seconds

    def _select(self, timeout: float | None) -> list:
        found = self._ready_now(0)
        if not found and timeout is None:
            raise RuntimeError("every task waits for what never comes")
        if not found:
            # A clock that stood still would never reach a time that is nearer than a float resolves.
            self._now += max(TURN_S, timeout)
        return found


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, in virtual time; within it `asyncio.get_running_loop()` is a VirtualLoop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


def run_client(scenario: Callable, *handlers: Callable, **options: Any) -> Any:
    """`await scenario(client)` with one server for each handler, as stand_in_server.run, in virtual time."""
    urls = [f"http://server-{number}:1" for number in range(len(handlers))]

    async def inner():
        defaults = {"vocab_size": 10, "outage_timeout_s": 0.1}
        async with RolloutClient(urls, **(defaults | options)) as client:
            return await asyncio.wait_for(scenario(client), timeout=600)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPTransport, "send", _sender(dict(zip(urls, handlers, strict=True))))
        return run(inner())


def _sender(handlers: dict[str, Callable]) -> Callable:
    """HTTPTransport.send to functions of this process."""

    async def send(self, url, request, *, timeout_s=None):
        def failure(status, detail):
            return RolloutServerError(url, request.endpoint, status, detail, method=request.method)

        path, hung_up, handle = request.endpoint.partition("?")[0], [], handlers[url]
        if path == "/v1/loads" and not getattr(handle, "shows_loads", False):
            raise failure(404, "")

        async def body():
            return orjson.loads(request.body or b"")

        asked = SimpleNamespace(
            path=path, json=body, transport=SimpleNamespace(close=lambda: hung_up.append(True))
        )
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                answer = await handle(asked)
        except orjson.JSONDecodeError:  # as a web server answers for a handler that wanted a body
            raise failure(500, "no JSON") from None
        except TimeoutError:
            raise failure(None, f"timed out after {limit:g} s") from None
        if hung_up:
            raise failure(None, "it closed the connection without an answer")
        if not 200 <= answer.status < 300:
            raise failure(answer.status, answer.text or "")
        return answer.status, answer.body or b""

    return send

"""Calls of an environment's methods, plain or async, none of which holds up the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_rl_corr.data.worker_pool import ThreadWorker, WorkerPool, awaited


class UserCalls:
    """async methods run on the event loop; plain ones in one thread, one at a time, as if they were the only ones.

    A call may take limit_s (None: as long as it likes), time in line not counted. A plain one that takes longer keeps
    its thread, as it can't be ended, and the next ones get another. For one event loop.
    """

    def __init__(self, limit_s: float | None = None):
        self._limit_s = limit_s
        self._pool = WorkerPool(_thread, limit_s=limit_s)
        self._starting: asyncio.Task | None = None

    async def __call__(self, method: Callable, *given: Any) -> Any:
        """What the method returns, or raises; CallTimeout past the limit.

        A tool may try to end the program, or cancel what it waits for; asyncio would end the loop or the episode
        without a word, and the run would wait for ever. So these are RuntimeErrors here.
        """
        if not inspect.iscoroutinefunction(method):
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._pool.start(1))
            value = await self._pool.call(functools.partial(method, *given))
            if not inspect.isawaitable(value):
                return value
        else:
            value = method(*given)
        return await awaited(value, self._limit_s)

    async def close(self) -> None:
        """Give the thread back."""
        await self._pool.close()


async def _thread() -> ThreadWorker:
    return ThreadWorker("rollout-environment")

"""Calls of the user's code that may take long, fail or never end, kept off the event loop:
processes or a thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from megatron_rl_corr.events import EVENTS

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""Seconds that a coroutine has to end once it is cancelled."""
RESTARTS = 5
"""Attempts to put a new worker in the place of one that is gone, after 1, 2, 4, ... seconds."""


class CallTimeout(Exception):
    """A call took longer than it may."""


class WorkerGone(Exception):
    """The worker ended during a call; the message says how."""


class Worker(Protocol):
    """Answers one call at a time."""

    async def ask(self, job: Any) -> Any:
        """The answer.

        Raises:
            WorkerGone: the worker ended instead.
        """

    async def end(self) -> None:
        """End the worker, without waiting for a call that is running."""


class WorkerPool:
    """Workers, each of which answers one call at a time; more calls wait in line.

    A call that takes longer than limit_s raises CallTimeout; its worker is ended and replaced. A call goes on
    when its caller is cancelled. For one event loop.

    Args:
        start: starts a worker.
        limit_s: seconds that a call may take, time in line not counted; None: no limit.
    """

    def __init__(self, start: Callable[[], Awaitable[Worker]], *, limit_s: float | None):
        self._start, self._limit_s = start, limit_s
        self._free: asyncio.Queue[Worker | BaseException] = asyncio.Queue()
        self._workers: set[Worker] = set()
        self._tasks: set[asyncio.Task] = set()

    async def start(self, count: int) -> None:
        """Start so many workers at the same time.

        Raises:
            Exception: the first failure to start one, after all workers have ended.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(self._join())
        except BaseExceptionGroup as failures:
            await self.close()
            raise failures.exceptions[0] from None

    async def call(self, job: Any, left: list[asyncio.Task] | None = None) -> Any:
        """The answer of the first worker that is free.

        Args:
            job: what the worker is asked.
            left: where the caller is cancelled during the call, the call, which goes on, is added to it.

        Raises:
            CallTimeout: the call took longer than limit_s.
            WorkerGone: its worker ended during the call.
            ValueError, OSError: a worker is gone and could not be replaced.
        """
        worker = await self._free.get()
        if isinstance(worker, BaseException):
            self._free.put_nowait(worker)  # for the others in line
            raise worker
        task = self._begin(self._ask(worker, job))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is not lost
            if left is not None:
                left.append(task)
            raise

    async def close(self) -> None:
        """End all workers and what they are doing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        workers, self._workers = self._workers, set()
        await asyncio.gather(*(worker.end() for worker in workers))

    async def _join(self) -> None:
        worker = await self._start()
        self._workers.add(worker)
        self._free.put_nowait(worker)

    async def _ask(self, worker: Worker, job: Any) -> Any:
        lost = None
        try:
            async with asyncio.timeout(self._limit_s) as scope:
                return await worker.ask(job)
        except TimeoutError:
            if not scope.expired():  # the call's own
                raise
            lost = f"it took longer than {self._limit_s:g} s"
            raise CallTimeout(lost) from None
        except WorkerGone as gone:
            lost = str(gone)
            raise
        finally:
            if lost is not None:
                self._workers.discard(worker)
                EVENTS.tell("worker_replaced", lost)
                self._begin(self._replace(worker))
            else:
                self._free.put_nowait(worker)

    async def _replace(self, worker: Worker) -> None:
        """Start a new worker for one that is gone. If that fails for good, every later call
        raises the failure.
        """
        await worker.end()
        for attempt in range(RESTARTS):
            try:
                return await self._join()
            except (ValueError, OSError) as error:
                failure = error
                logger.warning(
                    "a worker could not be replaced (attempt %d of %d): %s", attempt + 1, RESTARTS, error
                )
                await asyncio.sleep(2**attempt)
        self._free.put_nowait(failure)

    def _begin(self, coroutine: Any) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


class ThreadWorker:
    """Runs plain functions in a daemon thread. One that never ends keeps its thread; it can't be ended."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def ask(self, job: Callable[[], Any]) -> Any:
        """What the function returns or raises; exit() and the like become a RuntimeError."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._jobs.put((job, loop, answer))
        return await answer

    async def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, loop, answer = asked
            try:
                settle = (_set_result, job())
            except BaseException as error:  # noqa: BLE001  raised where it is awaited
                settle = (_set_exception, as_exception(error))
            try:
                loop.call_soon_threadsafe(settle[0], answer, settle[1])
            except RuntimeError:  # the loop is closed, and so is every caller
                return


async def awaited(answer: Awaitable[Any], limit_s: float | None) -> Any:
    """What the user's coroutine returns.

    It runs in a task of its own: one that catches its cancellation and goes on is left behind after GRACE_S.

    Args:
        answer: the coroutine.
        limit_s: seconds that it may take; None: no limit.

    Raises:
        CallTimeout: it took longer.
        Exception: what it raises, converted by `as_exception`.
    """
    task = asyncio.get_running_loop().create_task(_as_exceptions(answer))
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:  # past the limit, and where the caller is cancelled
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=GRACE_S)
    if not done:
        raise CallTimeout(f"it took longer than {limit_s:g} s")
    if task.cancelled():  # not by this function
        raise RuntimeError("it waited for something that was cancelled")
    return task.result()


async def _as_exceptions(answer: Awaitable[Any]) -> Any:
    """exit() and Ctrl-C would end the loop from within a task."""
    try:
        return await answer
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise as_exception(error) from error


def as_exception(error: BaseException) -> Exception:
    """The error, or a RuntimeError for one that must not be raised on a loop: exit(), a
    cancellation, StopIteration.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    what = f"it called exit({error.code!r})" if isinstance(error, SystemExit) else f"it raised {error!r}"
    raised = RuntimeError(what)
    raised.__cause__ = error
    return raised


def _set_result(answer: asyncio.Future, value: Any) -> None:
    if not answer.done():
        answer.set_result(value)


def _set_exception(answer: asyncio.Future, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


class UserCalls:
    """Calls the user's methods: async ones on the event loop, plain ones in one thread, one at a time.

    A plain call that takes longer than limit_s keeps its thread, since it can't be ended, and the next calls
    get another. For one event loop.

    Args:
        limit_s: seconds that a call may take, time in line not counted; None: no limit.
    """

    def __init__(self, limit_s: float | None = None):
        self._limit_s = limit_s
        self._pool = WorkerPool(_thread, limit_s=limit_s)
        self._starting: asyncio.Task | None = None

    async def __call__(self, method: Callable, *given: Any) -> Any:
        """What the method returns.

        A tool may try to end the program, or cancel what it waits for. asyncio would then end the loop or the
        episode without an error, and the run would wait for ever; here these become RuntimeErrors.

        Raises:
            CallTimeout: it took longer than limit_s.
            Exception: what it raises.
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
        """End the thread."""
        await self._pool.close()


async def _thread() -> ThreadWorker:
    return ThreadWorker("rollout-environment")

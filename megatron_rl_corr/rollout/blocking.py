"""Runs coroutines on one asyncio loop in a background thread, for callers that are not asynchronous."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

EXIT_TIMEOUT_S = 5.0
"""Seconds that cancelled coroutines have to end when the loop is closed."""


class LoopThread:
    """One event loop in a daemon thread, so that HTTP goes on while the caller computes or broadcasts.

        with LoopThread() as loop:
            pending = loop.submit(client.update_weights_from_distributed(...))
            broadcast(tensors)          # in this thread, at the same time
            pending.result()

    Whatever is bound to a loop (an HTTP session) must be made, used and closed on this one.
    """

    def __init__(self, name: str = "rollout-http"):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Start a coroutine; cancelling the future cancels it.

        Raises:
            RuntimeError: the loop is closed.
        """
        if self._loop.is_closed() or not self._thread.is_alive():
            coro.close()
            raise RuntimeError("the loop thread is closed")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def call(self, coro: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Run a coroutine to its end and return its result.

        Args:
            coro: what is run; an exception of its own is raised here.
            timeout: in seconds; None: no limit.

        Raises:
            TimeoutError: it took longer, and was cancelled.
            RuntimeError: the loop is closed, or this is its own thread.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("call() on the loop's own thread would wait for itself: use await")
        future = self.submit(coro)
        try:
            return future.result(timeout)
        except BaseException:  # a timeout or Ctrl-C in the waiting thread must not leave the request running
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, end the loop and its thread. Closing twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            pending = asyncio.all_tasks(self._loop)
            for task in pending:
                task.cancel()
            if pending:
                self._loop.run_until_complete(asyncio.wait(pending, timeout=EXIT_TIMEOUT_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

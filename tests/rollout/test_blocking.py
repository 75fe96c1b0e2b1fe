"""The loop thread: results, failures, timeouts and what is left running."""

import asyncio
import concurrent.futures
import threading

import pytest

from megatron_rl_corr.rollout import LoopThread


async def sleep_and_note(notes, seconds=30.0):
    try:
        await asyncio.sleep(seconds)
        notes.append("finished")
    except asyncio.CancelledError:
        notes.append("cancelled")
        raise


def test_call_when_the_coroutine_returns_or_raises_then_so_does_the_call():
    async def name_of_thread():
        return threading.current_thread().name

    async def fail():
        raise KeyError("x")

    with LoopThread("http") as loop:
        assert loop.call(name_of_thread()) == "http"
        with pytest.raises(KeyError, match="x"):
            loop.call(fail())


def test_call_when_the_timeout_passes_then_the_coroutine_is_cancelled():
    notes = []
    with LoopThread() as loop:
        with pytest.raises(TimeoutError):
            loop.call(sleep_and_note(notes), timeout=0.05)
        loop.call(asyncio.sleep(0))  # lets the cancellation arrive
        assert notes == ["cancelled"]


def test_submit_when_the_caller_goes_on_then_the_coroutine_runs_meanwhile():
    with LoopThread() as loop:
        reached = threading.Event()

        async def reach():
            reached.set()
            return 3

        future = loop.submit(reach())
        assert reached.wait(10)  # this thread does not touch the loop
        assert future.result(10) == 3


def test_close_when_coroutines_still_run_then_they_are_cancelled_and_later_ones_refused():
    notes = []
    loop = LoopThread()
    future = loop.submit(sleep_and_note(notes))
    loop.call(asyncio.sleep(0))
    loop.close()
    loop.close()
    assert notes == ["cancelled"]
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(sleep_and_note(notes))


def test_call_when_made_on_the_loops_own_thread_then_refused_instead_of_waiting_for_itself():
    with LoopThread() as loop:

        async def nested():
            loop.call(asyncio.sleep(0))

        with pytest.raises(RuntimeError, match="use await"):
            loop.call(nested())

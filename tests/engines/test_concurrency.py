"""Requests again and again until a deadline, on a clock that moves only where the code waits."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_rl_corr.engines import concurrency
from megatron_rl_corr.engines.errors import RolloutServerError

SILENT = RolloutServerError("http://a:1", "/health", None, "connection refused")


@pytest.fixture
def clock(monkeypatch):
    """Its `now` is what time.monotonic returns, and asyncio.sleep adds to it."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)

    async def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(concurrency, "time", clock)
    monkeypatch.setattr(concurrency, "asyncio", SimpleNamespace(sleep=sleep))
    return clock


def poll(clock, *, lasts_s, succeeds_at=None, timeout_s=3.2):
    """[(begins after, may take)] of each attempt, in seconds, and the error that ended them or None."""
    attempts, begin = [], clock.now

    async def attempt(limit_s):
        attempts.append((round(clock.now - begin, 6), round(limit_s, 6)))
        clock.now += min(lasts_s, limit_s)
        if succeeds_at is None or clock.now - begin < succeeds_at:
            raise SILENT

    try:
        asyncio.run(
            concurrency.poll_until(
                attempt,
                timeout_s=timeout_s,
                pause_s=0.5,
                longest_attempt_s=2.0,
                retry=lambda error: True,
                waited_for="a server",
            )
        )
    except RolloutServerError as error:
        return attempts, error
    return attempts, None


def test_poll_when_nothing_answers_then_the_last_attempt_begins_as_the_time_ends(clock):
    attempts, error = poll(clock, lasts_s=0.0)
    # Each 0.5 s, and the last 0.2 s after the one at 3.0: not at 2.7 s, where another pause
    # would pass the end.
    assert [begins for begins, _ in attempts] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.2]
    assert [limit for _, limit in attempts] == [2.0, 2.0, 2.0, 1.7, 1.2, 0.7, 0.2, 0.1]
    assert error.__notes__[-1] == "waited 3.2 s for a server"


def test_poll_when_an_attempt_takes_the_rest_of_the_time_then_it_was_the_last(clock):
    # 2 s, a pause, and the 0.7 s that are left.
    assert poll(clock, lasts_s=9.0)[0] == [(0.0, 2.0), (2.5, 0.7)]


def test_poll_when_a_server_answers_in_the_last_half_second_then_that_is_the_answer(clock):
    attempts, error = poll(clock, lasts_s=0.0, succeeds_at=3.1)
    assert attempts[-1][0] == 3.2 and error is None


@pytest.mark.parametrize("silence_is_tried_again", [True, False])
def test_poll_when_the_last_attempt_is_cut_short_then_the_answer_before_it_is_the_error(
    clock, silence_is_tried_again
):
    loading = RolloutServerError("http://a:1", "/health", 503, "loading")

    async def attempt(limit_s):  # a server that takes 0.15 s to say that it is not ready
        clock.now += min(0.15, limit_s)
        raise loading if limit_s >= 0.15 else SILENT

    # At 0 and 0.65 s it answers; at 1.2 s there are 0.1 s, in which it can't.
    with pytest.raises(RolloutServerError) as raised:
        asyncio.run(
            concurrency.poll_until(
                attempt,
                timeout_s=1.2,
                pause_s=0.5,
                longest_attempt_s=2.0,
                retry=lambda error: error is loading or silence_is_tried_again,
                waited_for="a server",
            )
        )
    assert raised.value is loading and loading.__notes__ == ["waited 1.2 s for a server"]
    assert round(clock.now, 6) == 101.3


def test_wait_when_it_lasts_then_told_on_stderr_with_the_last_failure_and_no_more_afterwards(
    capsys, monkeypatch
):
    monkeypatch.setattr(concurrency.Waits, "FIRST_S", 0.05)
    monkeypatch.setattr(concurrency.Waits, "EVERY_S", 0.1)

    async def refused(_):
        raise RolloutServerError("http://a:1", "/health", None, "connection refused")

    async def silent(_):
        await asyncio.sleep(0.4)

    async def wait(attempt, address):
        await concurrency.poll_until(
            attempt,
            timeout_s=0.4,
            pause_s=0.02,
            longest_attempt_s=1.0,
            retry=lambda error: True,
            waited_for="it to become healthy",
            address=address,
        )

    async def scenario():
        waits = [wait(refused, "http://a:1"), *[wait(silent, f"http://s{n}:1") for n in range(4)]]
        answers = await asyncio.gather(*waits, return_exceptions=True)
        lines = capsys.readouterr().err.splitlines()
        await asyncio.sleep(0.3)
        assert capsys.readouterr().err == ""
        return answers, lines

    answers, lines = asyncio.run(scenario())
    assert isinstance(answers[0], RolloutServerError) and answers[1:] == [None] * 4
    assert 3 <= len(lines) <= 5
    first = "[rollout] waiting up to 0 s for http://a:1: it to become healthy (connection refused); "
    assert lines[0].startswith(first)
    assert "http://s0:1: it to become healthy (no answer yet)" in lines[0] and lines[0].endswith(
        "; and 2 others"
    )


def test_wait_when_it_is_short_then_nothing_is_told(capsys):
    async def well(_):
        return 1

    async def scenario():
        await concurrency.poll_until(
            well,
            timeout_s=1,
            pause_s=0.1,
            longest_attempt_s=1,
            retry=lambda error: True,
            waited_for="it",
            address="http://a:1",
        )
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert capsys.readouterr().err == ""

"""Several requests at once, and one request again and again until a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from megatron_rl_corr.engines.errors import RolloutError


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first exception among the answers, with the others as its notes; return if there is none."""
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"also: {other}")
        raise failures[0]


async def all_or_first_failure(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all calls at once; the first failure cancels the others and is raised as itself.

    Args:
        calls: coroutines.

    Returns:
        Their results, in the order of the calls.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


async def poll_until[Found](
    attempt: Callable[[float], Awaitable[Found]], *, timeout_s: float, pause_s: float, longest_attempt_s: float,
    retry: Callable[[RolloutError], bool], waited_for: str,
) -> Found:  # fmt: skip
    """Call `attempt` until it succeeds or the time is over; the last failure is raised then, with a note.

    Where a last attempt of less than pause_s has run out of time, the failure before it is raised, which tells more.

    Args:
        attempt: called with the seconds that it may take, from 0.1 to longest_attempt_s.
        timeout_s: time for all attempts together; the last one begins as it ends.
        pause_s: time between two attempts, but for the last, which waits for no more than what is left.
        longest_attempt_s: limit of one attempt.
        retry: whether to try again after this error; another one is raised at once, as is what is no RolloutError.
        waited_for: ends the note "waited 3 s for ...".
    """
    deadline, before = time.monotonic() + timeout_s, None
    while True:
        begun = time.monotonic()
        limit_s = min(max(0.1, deadline - begun), longest_attempt_s)
        try:
            return await attempt(limit_s)
        except RolloutError as error:
            if not retry(error):
                raise
            now = time.monotonic()
            left_s = deadline - now
            if left_s <= 0:
                cut_short = limit_s < pause_s and now - begun > 0.9 * limit_s
                failure = before if cut_short and before is not None else error
                failure.add_note(f"waited {timeout_s:g} s for {waited_for}")
                raise failure from failure.__cause__
            before = error
        await asyncio.sleep(min(pause_s, left_s))

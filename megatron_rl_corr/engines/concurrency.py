"""Several requests at once, and one request again and again until a deadline."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from megatron_rl_corr.engines.errors import RolloutError


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first exception among the answers, with the others as its notes; return if there is none."""
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"also: {other}")
        raise failures[0]


async def all_or_raise_first(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all calls at once, each to its end; their results in order, or the failures as
    `raise_first` raises them.
    """
    answers = await asyncio.gather(*calls, return_exceptions=True)
    raise_first(answers)
    return answers


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


@dataclass(eq=False)
class Wait:
    """Somebody who is waited for."""

    address: str
    waited_for: str
    deadline: float
    """By time.monotonic."""
    why: str = "no answer yet"
    """Why it goes on."""


class Waits:
    """All waits of an event loop: what lasts for FIRST_S is told on stderr, then every EVERY_S, in one line.

    Nobody else would say why a start is silent: it may wait for a minute for an address at which nobody is.
    """

    FIRST_S, EVERY_S, NAMED = 1.0, 5.0, 3
    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Waits]] = WeakKeyDictionary()

    def __init__(self):
        self._open: list[Wait] = []
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of_loop(cls) -> Waits:
        """Those of the running loop."""
        return cls._of.setdefault(asyncio.get_running_loop(), cls())

    @contextmanager
    def telling(self, wait: Wait) -> Iterator[None]:
        """The wait is told of while this is open."""
        self._open.append(wait)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.FIRST_S, self._tell)
        try:
            yield
        finally:
            self._open.remove(wait)
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tell(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.EVERY_S, self._tell)
        named = "; ".join(
            f"{wait.address}: {wait.waited_for} ({wait.why})" for wait in self._open[: self.NAMED]
        )
        others = f"; and {len(self._open) - self.NAMED} others" if len(self._open) > self.NAMED else ""
        left = max(wait.deadline for wait in self._open) - time.monotonic()
        print(
            f"[rollout] waiting up to {max(0.0, left):.0f} s for {named}{others}", file=sys.stderr, flush=True
        )


async def poll_until[Found](
    attempt: Callable[[float], Awaitable[Found]],
    *,
    timeout_s: float,
    pause_s: float,
    longest_attempt_s: float,
    retry: Callable[[RolloutError], bool],
    waited_for: str,
    address: str = "",
) -> Found:
    """Call `attempt` until it succeeds or the time is over; the last failure is raised then, with a note.

    Where a last attempt of at most pause_s has run out of time, the failure before it is raised, which
    tells more.

    Args:
        attempt: called with the seconds that it may take, from 0.1 to longest_attempt_s.
        timeout_s: time for all attempts together; the last one begins as it ends.
        pause_s: time between two attempts, but for the last, which waits for no more than what is left.
        longest_attempt_s: limit of one attempt.
        retry: whether to try again after this error; another one is raised at once, as is what is
            no RolloutError.
        waited_for: ends the note "waited 3 s for ...".
        address: who is waited for, in the lines that `Waits` prints meanwhile; "": nothing is printed.
    """
    wait = Wait(address, waited_for, time.monotonic() + timeout_s)
    with Waits.of_loop().telling(wait) if address else nullcontext():
        return await _poll(attempt, wait, timeout_s, pause_s, longest_attempt_s, retry)


async def _poll[Found](
    attempt: Callable[[float], Awaitable[Found]],
    wait: Wait,
    timeout_s: float,
    pause_s: float,
    longest_attempt_s: float,
    retry: Callable[[RolloutError], bool],
) -> Found:
    before, deadline = None, wait.deadline
    while True:
        begun = time.monotonic()
        limit_s = min(max(0.1, deadline - begun), longest_attempt_s)
        try:
            return await attempt(limit_s)
        except RolloutError as error:
            now = time.monotonic()
            left_s = deadline - now
            cut_short = left_s <= 0 and limit_s <= pause_s and now - begun > 0.9 * limit_s
            tells_less = cut_short and before is not None
            if not retry(error) and not tells_less:
                raise
            if left_s <= 0:
                failure = before if tells_less else error
                failure.add_note(f"waited {timeout_s:g} s for {wait.waited_for}")
                raise failure from failure.__cause__
            before, wait.why = error, error.detail
        await asyncio.sleep(min(pause_s, left_s))

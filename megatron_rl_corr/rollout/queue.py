"""Groups of samples, begun ahead of the training that takes them: how far, and what becomes of old ones.

G groups a step; version v is that of the weights after v steps.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout import versions


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. number: its place in the sequence of all groups."""

    number: int
    trajectories: list[Trajectory]
    rewards: list[float]
    """Of each trajectory."""

    @property
    def oldest_version(self) -> int:
        return min(versions.number(trajectory.oldest_version) for trajectory in self.trajectories)


@dataclass(frozen=True)
class Taken:
    """What a step trains on, and how the stream stood when it was taken."""

    groups: list[Group]
    """[G], by number."""
    ready: int
    """Groups that were done and are left for later steps."""
    running: int
    """Groups that were being sampled."""
    dropped: int
    """Groups put aside for their age since the step before."""


class GroupStream:
    """Keeps G * max_lag groups in hand beside a step's own, and gives out G a step in the order they are done.

    A step's groups may be begun once the weights are within max_lag versions of that step's. So max_lag 0 is on-policy:
    groups are begun with the weights of their step, and none runs while weights change. One that takes long may still
    be older than max_lag when it is done: it is trained on like the others or, with drop_stale, put aside and another
    begun, which prefers short responses.

    draw() gives the number of the next group to begin, and sample(number) samples and scores it whole; None, where a
    sample failed for good, and then another group is begun in its place. Steps are [first, last), by the version they
    start from. For one event loop.
    """

    def __init__(
        self, sample: Callable[[int], Coroutine[Any, Any, Group | None]], draw: Callable[[], int], *,
        groups_per_step: int, first: int, last: int, max_lag: int = 0, drop_stale: bool = False,
    ):  # fmt: skip
        if groups_per_step < 1 or max_lag < 0:
            raise ValueError(f"groups_per_step must be at least 1 and max_lag 0, got {groups_per_step} and {max_lag}")
        self._sample, self._draw = sample, draw
        self._per_step, self._first, self._last, self._version = groups_per_step, first, last, first
        self._max_lag, self._drop_stale = max_lag, drop_stale
        self._running: dict[asyncio.Task, int] = {}
        self._done: deque[Group] = deque()
        self._begun, self._dropped, self._replaced = 0, 0, 0
        self._failure: BaseException | None = None
        self._closing = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> int:
        """Groups that are done and not taken."""
        return len(self._done)

    @property
    def running(self) -> int:
        return len(self._running)

    async def take(self, version: int) -> Taken:
        """The groups of the step that starts from `version`; a sample's failure ends all others and is raised."""
        dropped, self._version = self._dropped, version
        try:
            while self._failure is None:
                if self._drop_stale:
                    self._drop(version)
                self._begin()
                if len(self._done) >= self._per_step:
                    groups = [self._done.popleft() for _ in range(self._per_step)]
                    groups.sort(key=lambda group: group.number)
                    return Taken(groups, self.ready, self.running, self._dropped - dropped)
                self._changed.clear()
                await self._changed.wait()
            raise self._failure
        except BaseException:
            await self.close()
            raise

    def untrained(self) -> list[int]:
        """The numbers that were drawn and whose groups have not been taken, nor dropped or replaced."""
        return [*self._running.values(), *(group.number for group in self._done)]

    async def close(self) -> None:
        """End what is being sampled."""
        self._closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self) -> None:
        """Every group that may be, at the present version."""
        steps = min(self._version + 1 + self._max_lag, self._last) - self._first
        for _ in range(steps * self._per_step + self._dropped + self._replaced - self._begun):
            number = self._draw()
            task = asyncio.get_running_loop().create_task(self._sample(number))
            self._begun += 1
            self._running[task] = number
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        """A failure is kept for `take`, which may be called much later."""
        del self._running[task]
        if task.cancelled():
            if not self._closing:  # by what it awaited: nobody else would tell
                self._failure = self._failure or RuntimeError("sampling a group was cancelled from within")
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
        elif task.result() is None:
            self._replaced += 1
            if not self._closing and self._failure is None:
                self._begin()  # at once, also while a step is trained
        else:
            self._done.append(task.result())
        self._changed.set()

    def _drop(self, version: int) -> None:
        fresh = [group for group in self._done if group.oldest_version >= version - self._max_lag]
        self._dropped += len(self._done) - len(fresh)
        self._done = deque(fresh)

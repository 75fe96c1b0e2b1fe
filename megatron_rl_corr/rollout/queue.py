"""Keeps groups running ahead of the training that takes them: how far ahead, and what happens to old groups.

G groups a step; version v is that of the weights after v steps. A step is a batch here, however many updates it makes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout import versions


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. number: its place in the sequence of all groups."""

    number: int
    trajectories: list[Trajectory]
    rewards: list[float]
    """The reward of each trajectory."""
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    """Of each trajectory its named rewards, before their weights; empty where the environment gave the reward."""

    @property
    def oldest_version(self) -> int:
        return min(versions.number(trajectory.oldest_version) for trajectory in self.trajectories)


@dataclass(frozen=True)
class Taken:
    """The groups of a step, and the state of the stream when they were taken."""

    groups: list[Group]
    """[G], by number."""
    ready: int
    """Groups that were done and are left for later steps."""
    running: int
    """Groups that were being sampled."""
    dropped: int
    """Groups put aside for their age since the step before."""


class GroupStream:
    """Samples G * max_lag groups ahead, and returns G groups for each step in the order in which they are done.

    A step's groups may begin once the weights are within max_lag versions of that step's. So max_lag 0 is on-policy:
    groups begin with the weights of their step, and none runs while weights change. A group that takes long may still
    be older than max_lag when it is done: it is trained on like the others or, with drop_stale, put aside and replaced
    by another, which prefers short responses.

    For one event loop.

    Args:
        sample: sample(number) samples and scores a whole group; None: one of its samples failed for good, and another
            group is begun in its place.
        draw: the number of the next group to begin.
        groups_per_step: G.
        first, last: the steps are [first, last), by the weight version that they start from.
        max_lag: versions that the weights may be behind a step's when its groups begin.
        drop_stale: put groups aside that are older than max_lag when they are done.

    Raises:
        ValueError: groups_per_step below 1 or max_lag below 0.
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
        self._taken: list[int] = []
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
        """The groups of the step that starts from this weight version: waits until G are done.

        Raises:
            BaseException: what `sample` raised, after all other groups are cancelled.
        """
        dropped, self._version = self._dropped, version
        try:
            while self._failure is None:
                if self._drop_stale:
                    self._drop(version)
                self._begin()
                if len(self._done) >= self._per_step:
                    groups = [self._done.popleft() for _ in range(self._per_step)]
                    groups.sort(key=lambda group: group.number)
                    self._taken = [group.number for group in groups]
                    return Taken(groups, self.ready, self.running, self._dropped - dropped)
                self._changed.clear()
                await self._changed.wait()
            raise self._failure
        except BaseException:
            await self.close()
            raise

    def untrained(self, *, with_taken: bool = False) -> list[int]:
        """The numbers that were drawn and whose groups are not trained, nor dropped or replaced.

        with_taken: no update was made with the groups that were taken last, so that they count too.
        """
        waiting = [group.number for group in self._done] + (self._taken if with_taken else [])
        return [*self._running.values(), *waiting]

    async def close(self) -> None:
        """Cancel the groups that are being sampled."""
        self._closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self) -> None:
        """Begin every group that may begin at the present version."""
        steps = min(self._version + 1 + self._max_lag, self._last) - self._first
        for _ in range(steps * self._per_step + self._dropped + self._replaced - self._begun):
            number = self._draw()
            task = asyncio.get_running_loop().create_task(self._sample(number))
            self._begun += 1
            self._running[task] = number
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        """Keep the group, or its failure for `take`, which may be called much later."""
        del self._running[task]
        if task.cancelled():
            if not self._closing:  # by what it awaited; without this the failure would be lost
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

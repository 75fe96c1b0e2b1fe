"""Samples and scores groups ahead of the training that takes them: how far ahead, and what happens to old groups.

G groups a step; version v is that of the weights after v steps. A step is a batch here, however many updates it makes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Drawn, GroupNumbers
from megatron_rl_corr.rollout.episodes import Episodes
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. number: its place in the sequence of all groups."""

    number: int
    trajectories: list[Trajectory]
    rewards: list[float]
    """The reward of each trajectory."""

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


class GroupSampler:
    """Samples and scores the groups of one replica; a group with a failed sample is dropped and counted.

    Args:
        client: of the servers.
        prompts: the data set.
        numbers: this replica's share of the group numbers.
        sampling: parameters of every sample.
        group_size: samples of a group.
        rewards: scores each sample as it ends.
        failures: counts failed samples, and ends the run above a bound.
        failed_prompts: prompts that are left out because their groups failed.
        on_failed: the reward of a sample whose reward function failed; None: its group is dropped, as after any other
            failure.
        episodes: for an environment; None: a sample is one response.
    """

    def __init__(
        self, client: RolloutClient, prompts: PromptDataset, numbers: GroupNumbers, sampling: SamplingParams, *,
        group_size: int, rewards: Rewards, failures: Failures, failed_prompts: FailedPrompts, on_failed: float | None,
        episodes: Episodes | None,
    ):  # fmt: skip
        self._client, self._prompts, self._numbers, self._sampling = client, prompts, numbers, sampling
        self._group_size, self._rewards, self._on_failed = group_size, rewards, on_failed
        self._failures, self._failed_prompts = failures, failed_prompts
        self._episodes = episodes
        rewards.late = self._late

    def draw(self) -> int:
        """The next number whose prompt is not left out."""
        while True:
            number = self._numbers.draw()
            if not self._failed_prompts.leaves_out(self._prompts.at(number).index, number):
                return number

    def drawn(self, running: list[int]) -> Drawn:
        """Where this replica stands, while `running` are not trained yet."""
        return self._numbers.drawn(running)

    async def sample(self, number: int) -> Group | None:
        """Sample and score the group of this number; None: one of its samples failed for good.

        Raises:
            TooManyFailures: nearly all samples fail.
        """
        prompt, lengths, rewards = self._prompts.at(number), [], [0.0] * self._group_size

        async def score(trajectory: Trajectory) -> None:
            index = trajectory.sample_index
            lengths.append(int(trajectory.sampled.sum()))
            try:
                rewards[index] = await self._rewards.score(prompt, trajectory)
            except SampleFailure as failure:
                self._failures.failed(failure, f"sample {index} of row {prompt.index} of the data set")
                if self._on_failed is None:
                    raise
                rewards[index] = self._on_failed
            else:
                self._failures.scored()

        how = {"samples_per_prompt": self._group_size, "group_numbers": [number], "on_sample": score}
        try:
            if self._episodes is None:
                trajectories = await self._client.generate([prompt.input_ids], self._sampling, **how)
            else:
                trajectories = await self._episodes.generate(self._client, [prompt], self._sampling, **how)
        except SampleFailure as failure:
            if not failure.cause.startswith("reward_"):  # those are counted one by one
                self._failures.failed(failure, f"a sample of row {prompt.index} of the data set")
            self._failures.dropped(prompt, number, lengths)
            self._failures.check()
            return None
        self._failures.kept()
        self._failures.check()
        return Group(number, trajectories, rewards)

    def _late(self, failure: SampleFailure | None) -> None:
        """Count a call of the reward function that ended after its group had been dropped."""
        if failure is None:
            self._failures.scored()
        else:
            self._failures.failed(failure, "a sample of a group that was dropped already")

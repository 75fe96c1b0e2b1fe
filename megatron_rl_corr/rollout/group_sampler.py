"""Samples and scores the groups of one replica: the servers' responses, their rewards, and
what failed of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards, Score
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Drawn, GroupNumbers
from megatron_rl_corr.rollout.episodes import SampleMaker
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.queue import Group
from megatron_rl_corr.rollout.sampling import sampling_of_row
from megatron_rl_corr.rollout.trace import CURRENT, GroupTrace, clock

TRUNCATED = "truncated"


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
        on_failed: the reward of a sample whose reward failed; None: its group is dropped, as after
            any other failure.
        episodes: for an environment; None: a sample is one response. It may give several trajectories of a
            sample, its branches, one behind the other, and calls on_sample once for each sample: with the
            branch of the latest turn, which is scored. Rewards that it gives branches are finite in float32.
        drop_truncated: drop a group of which a sample was cut (finish reason length), or one of its branches.
        traces: note the times of every group.
        begun: what a checkpoint has of groups that were being sampled, by their numbers.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompts: PromptDataset,
        numbers: GroupNumbers,
        sampling: SamplingParams,
        *,
        group_size: int,
        rewards: Rewards,
        failures: Failures,
        failed_prompts: FailedPrompts,
        on_failed: float | None,
        episodes: SampleMaker | None,
        drop_truncated: bool = False,
        traces: bool = False,
        begun: Mapping[int, BegunGroup] | None = None,
    ):
        self._client, self._prompts, self._numbers, self._sampling = client, prompts, numbers, sampling
        self._group_size, self._rewards = group_size, rewards
        self._failed_score = None if on_failed is None else Score(on_failed)
        self._failures, self._failed_prompts = failures, failed_prompts
        self._episodes, self._drop_truncated, self._traces = episodes, drop_truncated, traces
        rewards.late = self._late
        self._resumed = dict(begun or {})
        """Groups that go on when they are drawn."""
        self._begun: dict[int, BegunGroup] = {}
        """Those that are being sampled, judged by the filter included."""

    def draw(self) -> int:
        """The next number whose prompt is not left out and can be used.

        A group of before a checkpoint goes on: its row may have been left out since it was drawn.
        """
        while True:
            goes_on, number = self._numbers.goes_on, self._numbers.draw()
            left_out = not goes_on and self._failed_prompts.leaves_out(self._prompts.index_at(number), number)
            if not left_out and self._prompts.can_be_drawn(number):
                return number

    def drawn(
        self, running: Iterable[int] = (), *, waiting: Iterable[int] = (), again: Iterable[int] = ()
    ) -> Drawn:
        """Where this replica stands, while these are not trained yet, as in `Drawn`."""
        return self._numbers.drawn(running, waiting=waiting, again=again)

    def begun(self, open_: Collection[int]) -> list[BegunGroup]:
        """What was sampled of groups that are not done, for a checkpoint.

        Args:
            open_: the numbers that a run draws again which goes on from it.
        """
        found = [*self._begun.values(), *self._resumed.values()]
        copies = [one.copied() for one in found if one.number in open_]
        return [one for one in copies if not one.is_empty]

    def forget_older(self, oldest: int) -> None:
        """Leave out what a checkpoint has of groups that could not begin yet, with samples of before
        this version: they would be trained too old.
        """
        stale = [number for number, one in self._resumed.items() if one.oldest_version < oldest]
        for number in stale:
            del self._resumed[number]
        if stale:
            why = f"stale: they have samples of before version {oldest}, and begin only now"
            EVENTS.tell("groups_sampled_again", why, groups=stale)

    async def sample(self, number: int) -> Group | None:
        """Sample and score the group of this number; None: one of its samples failed for good.

        Call it in a task of its own, within which the group is then judged: till that ends `begun` has it.

        Raises:
            TooManyFailures: nearly all samples fail.
        """
        trace = GroupTrace(number) if self._traces else None
        CURRENT.set(trace)  # each group is sampled by a task of its own
        begun = self._begun[number] = self._resumed.pop(number, None) or BegunGroup(number)
        asyncio.current_task().add_done_callback(lambda _: self._begun.pop(number, None))
        if begun.whole is not None:
            return begun.whole
        prompt, lengths = self._prompts.at(number), []
        sampling = sampling_of_row(self._sampling, prompt)
        scores: list[Score | None] = [None] * self._group_size
        scored: list[Trajectory | None] = [None] * self._group_size

        async def score(trajectory: Trajectory) -> None:
            index = trajectory.sample_index
            scored[index] = trajectory
            lengths.append(int(trajectory.sampled.sum()))
            if index in begun.scores:
                scores[index] = begun.scores[index] or self._failed_score
                return
            if self._drop_truncated and trajectory.finish_reason == "length":
                raise SampleFailure(TRUNCATED, "it was cut")  # ends the others of the group too
            begin = clock()
            try:
                scores[index] = await self._rewards.of_sample(prompt, trajectory)
            except SampleFailure as failure:
                scores[index] = self._failed(failure, index, prompt, number)
            else:
                if not self._rewards.compares:
                    self._failures.scored()
            finally:
                if trace is not None:
                    trace.rewards.append((index, begin, clock()))
            begun.scores[index] = None if scores[index] is self._failed_score else scores[index]

        how = {"samples_per_prompt": self._group_size, "group_numbers": [number], "on_sample": score}
        how["begun"] = {number: begun}
        try:
            if self._episodes is None:
                trajectories = await self._client.generate([prompt.input_ids], sampling, **how)
            else:
                trajectories = await self._episodes.generate(self._client, [prompt], sampling, **how)
            if self._drop_truncated and any(one.finish_reason == "length" for one in trajectories):
                raise SampleFailure(TRUNCATED, "it was cut")
            if self._rewards.compares:
                compared = clock()
                scores = await self._compared(prompt, number, scored, scores)
                if trace is not None:
                    trace.rewards.append((None, compared, clock()))
        except asyncio.CancelledError:
            self._failures.cut(lengths)
            raise
        except SampleFailure as failure:
            if failure.cause == TRUNCATED:
                self._failures.truncated(prompt, number, lengths)
                return None
            if not failure.cause.startswith("reward_"):  # those are counted one by one
                what = f"a sample of row {prompt.index} of the data set"
                self._failures.failed(failure, what, group=number, row=prompt.index)
            self._failures.dropped(prompt, number, lengths)
            self._failures.check()
            return None
        self._failures.kept()
        self._failures.check()
        own = [scores[one.sample_index] for one in trajectories]
        rewards = [self._reward_of(*pair) for pair in zip(trajectories, own, strict=True)]
        begun.whole = Group(number, trajectories, rewards, [score.parts for score in own], trace)
        return begun.whole

    def _reward_of(self, branch: Trajectory, score: Score) -> float:
        """The branch's own reward where its source gave it one, else its sample's."""
        given = score is not self._failed_score and branch.environment_reward is not None
        reward = branch.environment_reward if given else score.reward
        assert np.isfinite(np.float32(reward)), f"a branch has the reward {reward}"
        return reward

    async def _compared(
        self, prompt: Prompt, number: int, trajectories: list[Trajectory], scores: list[Score]
    ) -> list[Score]:
        """The scores with the rewards of the whole group; a sample that has failed before keeps its own."""
        failed = [score is self._failed_score for score in scores]
        try:
            whole = await self._rewards.of_group(prompt, trajectories, scores)
        except SampleFailure as failure:
            indices = [index for index, before in enumerate(failed) if not before]
            for index in indices[:-1]:
                self._count_failed(failure, index, prompt, number)
            return [self._failed(failure, indices[-1], prompt, number)] * len(scores) if indices else scores
        for before in failed:
            if not before:
                self._failures.scored()
        return [own if before else score for own, before, score in zip(scores, failed, whole, strict=True)]

    def _failed(self, failure: SampleFailure, index: int, prompt: Prompt, number: int) -> Score:
        """Count a sample whose reward failed. Returns the score that it gets, or raises the failure."""
        self._count_failed(failure, index, prompt, number)
        if self._failed_score is None:
            raise failure
        return self._failed_score

    def _count_failed(self, failure: SampleFailure, index: int, prompt: Prompt, number: int) -> None:
        what = f"sample {index} of row {prompt.index} of the data set"
        self._failures.failed(failure, what, group=number, row=prompt.index, sample=index)

    def _late(self, failure: SampleFailure | None) -> None:
        """Count a call of the reward function that ended after its group had been dropped."""
        if failure is None:
            self._failures.scored()
        else:
            self._failures.failed(failure, "a sample of a group that was dropped already")

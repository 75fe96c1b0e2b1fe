"""Samples and scores the groups of one replica: the servers' responses, their rewards, and what failed of them."""

from __future__ import annotations

import asyncio

from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Drawn, GroupNumbers
from megatron_rl_corr.rollout.episodes import Episodes
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.queue import Group


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
        """The next number whose prompt is not left out and can be used."""
        while True:
            number = self._numbers.draw()
            left_out = self._failed_prompts.leaves_out(self._prompts.index_at(number), number)
            if not left_out and self._prompts.can_be_drawn(number):
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
        except asyncio.CancelledError:
            self._failures.cut(lengths)
            raise
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

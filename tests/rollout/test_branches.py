"""Groups whose samples have several sequences: an episode is scored, counted and filtered once."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan, episode_numbers
from megatron_rl_corr.mcore.batch.collect_metrics import count_samples
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_filter import has_spread
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.groups import Group, PutAside, Taken

PROMPTS = PromptDataset([Prompt(row, [row + 1]) for row in range(4)])


def sequence(sample, branch, tokens=2, *, version="3", reason="stop", reward=None, first=20):
    return Trajectory(
        prompt_index=0,
        sample_index=sample,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.arange(first, first + tokens),
        rollout_logprobs=torch.full((tokens,), -1.0),
        finish_reason=reason,
        weight_versions=(VersionSpan(version, 0, tokens),),
        cached_tokens=0,
        server="http://here",
        environment_reward=reward,
        branch=branch,
    )


class Agents:
    """Gives the sequences, and calls on_sample with the place of each sample's last one."""

    def __init__(self, sequences, last):
        self.sequences, self.last = sequences, last

    async def generate(
        self, client, prompts, sampling, *, samples_per_prompt, group_numbers, on_sample, begun
    ):
        for place in self.last:
            await on_sample(self.sequences[place])
        return self.sequences


class Lengths:
    """The reward of a sample is its tokens; of a group they are those over its largest."""

    def __init__(self, compares=False, fails=None):
        self.compares, self.fails, self.scored, self.groups = compares, fails, [], []

    async def of_sample(self, prompt, sample):
        if sample.sample_index == self.fails:
            raise SampleFailure("reward_error", "no")
        self.scored.append((sample.sample_index, sample.branch))
        own = sample.environment_reward
        return Score(float(sample.output_ids.numel()) if own is None else own, {"tokens": 1.0})

    async def of_group(self, prompt, samples, scores):
        self.groups.append([(one.sample_index, one.branch) for one in samples])
        return [Score(score.reward / 10, score.parts) for score in scores]


def sampled(sequences, last, rewards, *, on_failed=None, drop_truncated=False):
    failures = Failures(1.0)
    sampler = GroupSampler(
        SimpleNamespace(),
        PROMPTS,
        GroupNumbers(Cursor(0), 0, 1),
        None,
        group_size=len(last),
        rewards=rewards,
        failures=failures,
        failed_prompts=FailedPrompts(len(PROMPTS)),
        on_failed=on_failed,
        episodes=Agents(sequences, last),
        drop_truncated=drop_truncated,
    )
    return asyncio.run(sampler.sample(0)), failures


THREE = [sequence(0, 0, 2), sequence(0, 1, 5), sequence(0, 2, 3), sequence(1, 0, 4)]


def test_group_when_a_sample_has_three_sequences_then_its_latest_is_scored_and_all_have_its_reward():
    rewards = Lengths()
    group, failures = sampled(THREE, [1, 3], rewards)
    assert rewards.scored == [(0, 1), (1, 0)] and failures.ended == 2
    assert group.rewards == [5.0, 5.0, 5.0, 4.0] and group.trajectories == THREE
    assert group.reward_parts == [{"tokens": 1.0}] * 4 and group.episode_parts == [{"tokens": 1.0}] * 2
    assert [len(episode) for episode in group.episodes] == [3, 1] and group.episode_rewards == [5.0, 4.0]


def test_group_when_rewards_compare_its_samples_then_they_get_one_sequence_of_each():
    rewards = Lengths(compares=True)
    group, _ = sampled(THREE, [1, 3], rewards)
    assert rewards.groups == [[(0, 1), (1, 0)]] and group.rewards == [0.5, 0.5, 0.5, 0.4]


def test_group_when_sequences_have_rewards_of_their_own_then_the_episode_has_their_mean():
    own = [replace(one, environment_reward=float(number)) for number, one in enumerate(THREE)]
    group, _ = sampled(own, [2, 3], Lengths())
    assert group.rewards == [0.0, 1.0, 2.0, 3.0] and group.episode_rewards == [1.0, 3.0]


def test_group_when_a_reward_fails_then_all_sequences_of_its_sample_have_the_substitute():
    own = [replace(one, environment_reward=7.0) for one in THREE]
    group, failures = sampled(own, [2, 3], Lengths(fails=0), on_failed=-1.0)
    assert group.rewards == [-1.0, -1.0, -1.0, 7.0]
    assert failures.ended == 2 and failures.by_cause["reward_error"] == 1


@pytest.mark.parametrize("last", [[1, 3], [2, 3]])
def test_truncated_when_any_sequence_was_cut_then_the_sample_was(last):
    cut = [replace(one, finish_reason="length" if one.branch == 1 else "stop") for one in THREE]
    group, failures = sampled(cut, last, Lengths(), drop_truncated=True)
    assert group is None and failures.truncated_groups == 1 and failures.by_cause.total() == 0
    group, failures = sampled(THREE, last, Lengths(), drop_truncated=True)
    assert group is not None and failures.truncated_groups == 0


def test_truncated_when_masked_then_the_sequences_that_were_cut_alone():
    """The rest of the episode is trained, with the reward of all of it."""
    cut = [replace(one, finish_reason="length" if one.branch == 1 else "stop") for one in THREE]
    how = {"length": 16, "version": 3, "mask_truncated": True, "with_episodes": True}
    batch = RolloutBatch.from_trajectories(cut, torch.tensor([0.5, 0.5, 0.5, 1.0]), **how)
    assert batch.in_loss.tolist() == [True, False, True, True]
    assert batch.episodes.tolist() == [0, 0, 0, 1]


def test_episode_numbers_when_branches_follow_each_other_then_one_each_sample():
    assert episode_numbers(THREE) == [0, 0, 0, 1]
    assert episode_numbers([sequence(0, 0), sequence(0, 0)]) == [0, 1]  # of no agent: samples of one number
    assert episode_numbers([sequence(0, 0), sequence(1, 1), sequence(1, 2)]) == [0, 1, 1]
    assert episode_numbers([]) == []


def test_spread_when_sequences_of_one_sample_differ_then_samples_decide():
    assert not has_spread(Group(0, THREE, [1.0, 2.0, 3.0, 2.0]))
    assert has_spread(Group(0, THREE, [1.0, 1.0, 1.0, 2.0]))
    assert not has_spread(Group(0, THREE, [0.1] * 4))


def test_put_aside_when_a_sample_has_three_sequences_then_it_is_one_and_its_tokens_all():
    aside = PutAside()
    aside.count(Group(0, THREE, [-1.0, -1.0, -1.0, 2.0]))
    assert (aside.groups, aside.above_0, aside.samples, aside.tokens, aside.rewards) == (1, 1, 2, 14, 1.0)


def test_counts_when_samples_have_several_sequences_then_an_episode_counts_once():
    cut = [
        sequence(0, 0, 2, reason="length"),
        sequence(0, 1, 5, version="4"),
        sequence(0, 2, 3, reason="length"),
    ]
    silent = replace(sequence(1, 0, 4), rollout_logprobs=torch.full((4,), torch.nan))
    groups = [
        Group(0, [*cut, silent], [1.0] * 4),
        # The second sample repeats both sequences of the first.
        Group(
            1, [sequence(0, 0), sequence(0, 1, 3), sequence(1, 0), sequence(1, 1, 3)], [0.0, 0.0, 1.0, 1.0]
        ),
    ]
    counted = count_samples(Taken(groups, ready=0, running=0, dropped=0), 5, None)
    expected = {
        "samples": 4,
        "tokens": 14 + 10,
        "token_lags": 5 * 1 + 19 * 2,
        "mixed": 1,
        "length": 1,
        "unscored": 1,
        "equal_groups": 1,
        "duplicates": 1,
    }
    assert {name: counted[name] for name in expected} == expected

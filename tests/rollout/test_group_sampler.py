"""Groups of which one sample always fails, with a client and a reward that need no server."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.errors import TooManyFailures
from megatron_rl_corr.rollout import Prompt, PromptDataset, SampleFailure
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import HOPELESS_GROUPS, FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream

GROUP = 32
PROMPTS = PromptDataset([Prompt(index, [1]) for index in range(40)])


class Client:
    """Samples of one token, one after the other."""

    async def generate(self, prompts, sampling, *, samples_per_prompt, group_numbers, on_sample, begun):
        samples = [
            SimpleNamespace(sample_index=n, sampled=torch.ones(1), environment_reward=None)
            for n in range(samples_per_prompt)
        ]
        for sample in samples:
            await asyncio.sleep(0)
            await on_sample(sample)
        return samples


class LastFails:
    """The reward of each group's last sample fails, in rows that `fails` is true for: 1 of 32, 3 %."""

    def __init__(self, fails):
        self.fails = fails

    compares = False

    async def of_sample(self, prompt, sample):
        if sample.sample_index == GROUP - 1 and self.fails(prompt.index):
            raise SampleFailure("reward_timeout", "it took longer than 5 s")
        return Score(1.0)


def step(fails, max_fraction, limit_s=20.0):
    """What one step of 4 groups takes, and the failures that were counted."""
    failures = Failures(max_fraction)
    sampler = GroupSampler(
        Client(),
        PROMPTS,
        GroupNumbers(Cursor(0), 0, 1),
        None,
        group_size=GROUP,
        rewards=LastFails(fails),
        failures=failures,
        failed_prompts=FailedPrompts(len(PROMPTS)),
        on_failed=None,
        episodes=None,
    )
    stream = GroupStream(sampler.sample, sampler.draw, groups_per_step=4, first=0, last=1)
    return asyncio.run(asyncio.wait_for(stream.take(0), limit_s)), failures


def test_step_when_each_group_has_one_failed_sample_then_the_run_ends_though_they_are_few_of_all():
    with pytest.raises(TooManyFailures) as error:
        step(lambda row: True, 0.05)
    text = str(error.value)
    assert text.startswith(
        f"the last {HOPELESS_GROUPS} groups of a replica were all dropped for a sample that failed"
    )
    assert f"By cause: reward_timeout {HOPELESS_GROUPS}. " in text and "it took longer than 5 s" in text


def test_step_when_a_prompt_in_ten_can_be_sampled_then_it_comes_to_its_groups():
    taken, failures = step(lambda row: row % 10 != 0, 0.05)
    assert [PROMPTS.at(group.number).index % 10 for group in taken.groups] == [0] * 4
    assert failures.groups > 3


class Fails(Client):
    """Every sample fails at the servers."""

    async def generate(self, prompts, sampling, **how):
        raise SampleFailure("retries", "HTTP 500: scheduler is gone")


@pytest.mark.parametrize(("client", "cause"), [(Fails(), "retries"), (Client(), "reward_timeout")])
def test_sample_when_it_fails_then_told_once_with_its_group_and_row(client, cause, told):
    sampler = GroupSampler(
        client,
        PROMPTS,
        GroupNumbers(Cursor(0), 0, 1),
        None,
        group_size=GROUP,
        rewards=LastFails(lambda row: True),
        failures=Failures(1.0),
        failed_prompts=FailedPrompts(len(PROMPTS)),
        on_failed=None,
        episodes=None,
    )
    assert asyncio.run(sampler.sample(7)) is None
    [(kind, failed), (dropped, _)] = told
    assert (kind, dropped) == ("sample_failed", "group_dropped")
    assert failed["cause"] == cause and failed["group"] == 7 and failed["row"] == PROMPTS.at(7).index
    assert failed.get("sample") == (None if cause == "retries" else GROUP - 1)


class Cut(Client):
    """The samples of some rows are cut, and take their time; those of others end by themselves."""

    def __init__(self, cut):
        self.cut, self.ended = cut, 0

    async def generate(self, prompts, sampling, *, samples_per_prompt, group_numbers, on_sample, begun):
        reason = "length" if self.cut(PROMPTS.at(group_numbers[0]).index) else "stop"
        samples = [
            SimpleNamespace(
                sample_index=n,
                sampled=torch.ones(3),
                environment_reward=None,
                finish_reason=reason if n == 1 else "stop",
            )
            for n in range(samples_per_prompt)
        ]
        for sample in samples:
            await asyncio.sleep(0)
            await on_sample(sample)
            self.ended += 1
        return samples


def drop_truncated(cut):
    failures, client = Failures(1.0), Cut(cut)
    sampler = GroupSampler(
        client,
        PROMPTS,
        GroupNumbers(Cursor(0), 0, 1),
        None,
        group_size=4,
        rewards=LastFails(lambda row: False),
        failures=failures,
        failed_prompts=FailedPrompts(len(PROMPTS)),
        on_failed=None,
        episodes=None,
        drop_truncated=True,
    )
    stream = GroupStream(sampler.sample, sampler.draw, groups_per_step=4, first=0, last=1)
    return asyncio.run(asyncio.wait_for(stream.take(0), 20.0)), failures, client


def test_truncated_samples_when_dropped_then_their_groups_are_replaced_at_once_and_counted_as_no_failure():
    taken, failures, client = drop_truncated(lambda row: row % 4 != 0)
    assert [PROMPTS.at(group.number).index % 4 for group in taken.groups] == [0] * 4
    assert failures.truncated_groups == failures.groups > 3 and sum(failures.by_cause.values()) == 0
    # The first two samples of each dropped group had ended; the other two were not waited for.
    assert failures.lengths == [2 * failures.groups, 6 * failures.groups]
    assert client.ended == 16 + failures.groups and failures.since_last()["truncated"] == failures.groups


def test_truncated_samples_when_all_groups_have_one_then_the_run_ends_with_the_remedy():
    with pytest.raises(
        TooManyFailures,
        match=f"the last {HOPELESS_GROUPS} groups of a replica were all dropped for a "
        "sample that was cut, .* larger `max_new_tokens`, or use `truncated_samples` mask",
    ):
        drop_truncated(lambda row: True)


def test_step_when_the_user_allows_all_failures_then_it_is_not_ended():
    with pytest.raises(TimeoutError):
        step(lambda row: True, 1.0, limit_s=1.0)

"""Which groups are begun at which version, and which are taken; samples are made by hand."""

import asyncio
import itertools

import pytest
import torch

from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout.queue import Group, GroupStream


class Sampler:
    """Groups that are done when a test says so. weights: the version that a group begun now is sampled with."""

    def __init__(self):
        self.weights, self.begun, self.ended, self.lost, self._waiting = 0, [], [], set(), {}

    async def __call__(self, number):
        self.begun.append(number)
        version, self._waiting[number] = self.weights, asyncio.get_running_loop().create_future()
        try:
            await self._waiting[number]
        except BaseException:
            self.ended.append(number)
            raise
        return None if number in self.lost else Group(number, [sample_of(version)], [0.0])

    async def finish(self, *numbers):
        for number in numbers:
            self._waiting[number].set_result(None)
            await settle()

    def cancel(self, number):
        self._waiting[number].cancel()

    def fail(self, number, error):
        self._waiting[number].set_exception(error)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def sample_of(version):
    return Trajectory(
        prompt_index=0, sample_index=0, prompt_ids=torch.tensor([1]), output_ids=torch.tensor([2]),
        rollout_logprobs=torch.tensor([-1.0]), finish_reason="stop",
        weight_versions=(VersionSpan(str(version), 0, 1),), cached_tokens=0, server="http://here",
    )  # fmt: skip


def run(scenario, **options):
    async def inner():
        sampler = Sampler()
        options_ = {"groups_per_step": 2, "first": 0, "last": 10} | options
        numbers = itertools.count(options_["first"] * options_["groups_per_step"])
        stream = GroupStream(sampler, lambda: next(numbers), **options_)
        await asyncio.wait_for(scenario(stream, sampler), timeout=20)
        await stream.close()

    asyncio.run(inner())


def numbers(taken):
    return [group.number for group in taken.groups]


def test_take_when_max_lag_is_0_then_only_the_steps_own_groups_are_begun_and_none_runs_on():
    async def scenario(stream, sampler):
        for version in range(2):
            step = asyncio.create_task(stream.take(version))
            await settle()
            assert sampler.begun == list(range(2 * version + 2)) and not step.done()
            await sampler.finish(2 * version + 1, 2 * version)  # the later one first
            taken = await step
            assert numbers(taken) == [2 * version, 2 * version + 1]
            assert (taken.ready, taken.running, taken.dropped) == (0, 0, 0)

    run(scenario)


def test_take_when_max_lag_is_1_then_a_step_more_is_begun_and_those_done_first_are_taken():
    async def scenario(stream, sampler):
        step = asyncio.create_task(stream.take(0))
        await settle()
        assert sampler.begun == [0, 1, 2, 3]
        await sampler.finish(3, 0)
        assert numbers(await step) == [0, 3]
        # Version 1 allows groups 4 and 5; 1 and 2 are still running.
        await sampler.finish(2)
        sampler.weights = 1
        step = asyncio.create_task(stream.take(1))
        await settle()
        assert sampler.begun == [0, 1, 2, 3, 4, 5]
        await sampler.finish(5, 4)
        taken = await step
        assert numbers(taken) == [2, 5] and (taken.ready, taken.running) == (0, 2)

    run(scenario, max_lag=1)


async def straggle(stream, sampler):
    """Steps 0 and 1 of max_lag 1 take groups 0, 2 and 3, 4, while group 1, of version 0, runs on; then it is done."""
    for version, done in enumerate([(0, 2), (3, 4)]):
        sampler.weights = version
        step = asyncio.create_task(stream.take(version))
        await settle()
        await sampler.finish(*done)
        assert numbers(await step) == list(done)
    sampler.weights = 2
    await sampler.finish(1)


def test_take_when_a_group_is_older_than_max_lag_then_it_is_taken_like_the_others():
    async def scenario(stream, sampler):
        await straggle(stream, sampler)
        step = asyncio.create_task(stream.take(2))
        await settle()
        assert sampler.begun == list(range(8))
        await sampler.finish(5)
        taken = await step
        assert numbers(taken) == [1, 5] and taken.dropped == 0
        assert [group.oldest_version for group in taken.groups] == [0, 1]

    run(scenario, max_lag=1)


def test_take_when_old_groups_are_dropped_then_another_is_begun_in_its_place():
    async def scenario(stream, sampler):
        await straggle(stream, sampler)
        step = asyncio.create_task(stream.take(2))
        await settle()
        assert sampler.begun == list(range(9))  # 8 of four steps, and one for group 1
        await sampler.finish(5, 8)
        taken = await step
        assert numbers(taken) == [5, 8] and (taken.dropped, taken.running) == (1, 2)
        assert [group.oldest_version for group in taken.groups] == [1, 2]

    run(scenario, max_lag=1, drop_stale=True)


def test_take_when_the_run_ends_then_no_group_is_begun_that_no_step_needs():
    async def scenario(stream, sampler):
        step = asyncio.create_task(stream.take(3))
        await settle()
        assert sampler.begun == [6, 7, 8, 9]  # steps 3 and 4, though max_lag allows up to 6
        await sampler.finish(6, 7)
        await step

    run(scenario, first=3, last=5, max_lag=3)


def test_take_when_a_group_fails_then_the_others_are_ended_and_it_is_raised_by_the_next_take():
    async def scenario(stream, sampler):
        step = asyncio.create_task(stream.take(0))
        await settle()
        await sampler.finish(0, 1)
        await step
        sampler.fail(3, OSError("the tool broke"))
        await settle()
        with pytest.raises(OSError, match="the tool broke"):
            await stream.take(1)
        assert sorted(sampler.ended) == [2, 3]

    run(scenario, max_lag=1)


def test_take_when_a_group_is_lost_then_another_is_begun_at_once_even_between_steps():
    async def scenario(stream, sampler):
        sampler.lost = {1, 3}
        step = asyncio.create_task(stream.take(0))
        await settle()
        assert sampler.begun == [0, 1, 2, 3]
        await sampler.finish(1)
        assert sampler.begun == [0, 1, 2, 3, 4]
        await sampler.finish(0, 4)
        assert numbers(await step) == [0, 4]
        await sampler.finish(3, 2)  # nobody waits
        assert sampler.begun == [0, 1, 2, 3, 4, 5]
        assert sorted(stream.untrained()) == [2, 5]  # what a later run has to sample again
        step = asyncio.create_task(stream.take(1))
        await settle()
        assert sampler.begun == [*range(8)]  # two steps of two, two lost, and the next step's two
        await sampler.finish(7)
        assert numbers(await step) == [2, 7] and sorted(stream.untrained()) == [5, 6]
        assert sorted(stream.untrained(with_taken=True)) == [2, 5, 6, 7]  # no update was made with them

    run(scenario, max_lag=1)


def test_take_when_a_group_is_lost_at_the_end_of_the_run_then_only_that_one_is_made_up_for():
    async def scenario(stream, sampler):
        sampler.lost = {0}
        step = asyncio.create_task(stream.take(0))
        await settle()
        await sampler.finish(0, 1, 2)
        assert numbers(await step) == [1, 2] and sampler.begun == [0, 1, 2]

    run(scenario, last=1, max_lag=3)


def test_take_when_a_group_is_cancelled_from_within_then_raised_instead_of_waiting_for_ever():
    async def scenario(stream, sampler):
        step = asyncio.create_task(stream.take(0))
        await settle()
        sampler.cancel(1)
        with pytest.raises(RuntimeError, match="cancelled from within"):
            await step
        assert sorted(sampler.ended) == [0, 1]

    run(scenario)


def test_stream_when_a_step_needs_no_group_or_the_lag_is_negative_then_refused():
    for wrong in ({"groups_per_step": 0}, {"max_lag": -1}):
        with pytest.raises(ValueError, match="groups_per_step"):
            run(None, **wrong)

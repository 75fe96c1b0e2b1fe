"""Which groups are begun at which version, and which are taken; samples are made by hand."""

import asyncio
import itertools
import json
from dataclasses import asdict

import pytest
import torch

from megatron_rl_corr.engines.errors import GroupsFilteredOut
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, GroupNumbers
from megatron_rl_corr.rollout.group_filter import has_spread
from megatron_rl_corr.rollout.groups import StreamState
from megatron_rl_corr.rollout.queue import Group, GroupStream, Selection
from tests.faults.drills import drill


class Sampler:
    """Groups that are done when a test says so. weights: the version that a group begun now
    is sampled with.
    """

    def __init__(self):
        self.weights, self.begun, self.ended, self.lost, self._waiting = 0, [], [], set(), {}
        self.flat = set()

    async def __call__(self, number):
        self.begun.append(number)
        version, self._waiting[number] = self.weights, asyncio.get_running_loop().create_future()
        try:
            await self._waiting[number]
        except BaseException:
            self.ended.append(number)
            raise
        rewards = [1.0, 1.0] if number in self.flat else [0.0, 1.0]
        return None if number in self.lost else Group(number, [sample_of(version)] * 2, rewards)

    async def finish(self, *numbers):
        for number in numbers:
            self._waiting[number].set_result(None)
            await settle()

    def cancel(self, number):
        self._waiting[number].cancel()

    def fail(self, number, error):
        self._waiting[number].set_exception(error)

    async def step(self, stream, version, *finished):
        """Take this step once these groups are done, in this order; the weights are the step's."""
        self.weights = version
        step = asyncio.create_task(stream.take(version))
        await settle()
        await self.finish(*finished)
        return await asyncio.wait_for(step, 5)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def sample_of(version):
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.tensor([2]),
        rollout_logprobs=torch.tensor([-1.0]),
        finish_reason="stop",
        weight_versions=(VersionSpan(str(version), 0, 1),),
        cached_tokens=0,
        server="http://here",
    )


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
    """Steps 0 and 1 of max_lag 1 take groups 0, 2 and 3, 4, while group 1, of version 0, runs on;
    then it is done.
    """
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


def test_take_when_no_number_can_be_drawn_for_a_replacement_then_raised_instead_of_waiting_for_ever():
    async def scenario(stream, sampler):
        sampler.lost = {0}
        step = asyncio.create_task(stream.take(0))
        await settle()
        stream._draw = lambda: 1 / 0
        await sampler.finish(0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(step, 5)

    run(scenario)


def test_stream_when_a_step_needs_no_group_or_the_lag_is_negative_then_refused():
    for wrong in ({"groups_per_step": 0}, {"max_lag": -1}):
        with pytest.raises(ValueError, match="groups_per_step"):
            run(None, **wrong)


async def spread(group):
    return has_spread(group)


def test_take_when_groups_have_no_spread_then_others_take_their_places_and_their_numbers_are_used_up():
    async def scenario(stream, sampler):
        sampler.flat = {0, 2}
        taken = await sampler.step(stream, 0, 0, 2, 1, 3)
        assert sampler.begun == [0, 1, 2, 3] and numbers(taken) == [1, 3]
        # Two samples of a token each, and rewards of 1, in either group.
        aside = taken.filtered
        assert (aside.groups, aside.above_0, aside.samples, aside.tokens, aside.rewards) == (2, 2, 4, 4, 4.0)
        assert stream.untrained() == [] and stream.untrained(with_taken=True) == [1, 3]
        taken = await sampler.step(stream, 1, 4, 5)
        assert numbers(taken) == [4, 5] and taken.filtered.groups == 0

    run(scenario, selection=Selection(spread))


def test_take_when_groups_are_sampled_ahead_and_filtered_between_steps_then_replaced_at_once():
    async def scenario(stream, sampler):
        sampler.flat = {1, 4}
        assert numbers(await sampler.step(stream, 0, 5, 0)) == [0, 5]
        await sampler.finish(1, 4)  # nobody waits
        assert sampler.begun == [*range(8)] and sorted(stream.untrained()) == [2, 3, 6, 7]
        taken = await sampler.step(stream, 1, 7, 2)
        assert numbers(taken) == [2, 7] and (taken.filtered.groups, taken.ready) == (2, 0)
        assert sampler.begun == [*range(10)]

    run(scenario, max_lag=2, selection=Selection(spread))


@pytest.mark.parametrize("lag", [0, 2])
def test_take_when_no_group_passes_then_the_limit_ends_it_and_no_more_are_sampled(lag):
    async def scenario(stream, sampler):
        sampler.flat = set(range(100))
        step = asyncio.create_task(stream.take(0))
        await settle()
        while not step.done():
            await sampler.finish(*[n for n in sampler.begun if not sampler._waiting[n].done()][:1])
        with pytest.raises(
            GroupsFilteredOut, match="0 of the 2 groups .* mean reward of those is 1, above 0 in"
        ):
            await step
        # 2.5 times the two groups of each step that is under way.
        assert len(sampler.begun) == 5 * (lag + 1)

    run(scenario, max_lag=lag, selection=Selection(spread, limit=2.5))


def test_take_when_no_group_passes_and_the_step_is_filled_then_the_last_ones_and_the_next_begins_anew():
    async def scenario(stream, sampler):
        sampler.flat = {*range(4), 5, *range(8, 20)}
        taken = await sampler.step(stream, 0, 0, 1, 2, 3)
        assert numbers(taken) == [2, 3] and (taken.refilled, taken.filtered.groups) == (2, 4)
        taken = await sampler.step(stream, 1, 4, 5, 6)
        assert numbers(taken) == [4, 6] and (taken.refilled, taken.filtered.groups) == (0, 1)
        taken = await sampler.step(stream, 2, 7, 8, 9, 10)
        assert numbers(taken) == [7, 10] and (taken.refilled, taken.filtered.groups) == (1, 3)

    run(scenario, selection=Selection(spread, limit=2.0, refills=True))


def test_take_when_a_group_is_lost_while_others_are_filtered_then_it_does_not_count_for_the_limit():
    async def scenario(stream, sampler):
        sampler.flat, sampler.lost = {0, 1}, {2, 3, 4, 5}
        taken = await sampler.step(stream, 0, 0, 1, 2, 3, 4, 5, 6, 7)
        assert numbers(taken) == [6, 7] and taken.filtered.groups == 2

    run(scenario, selection=Selection(spread, limit=2.0))


def test_take_when_the_filter_can_not_judge_a_group_then_it_is_replaced_and_not_counted():
    async def judge(group):
        return None if group.number == 0 else True

    async def scenario(stream, sampler):
        taken = await sampler.step(stream, 0, 0, 1, 2)
        assert numbers(taken) == [1, 2] and taken.filtered.groups == 0 and stream.untrained() == []

    run(scenario, selection=Selection(judge))


def test_take_when_oversampled_without_lag_then_the_rest_has_ended_before_it_returns_and_is_drawn_again_first(
    told,
):
    async def scenario(stream, sampler):
        taken = await sampler.step(stream, 0, 2, 1)
        assert sampler.begun == [0, 1, 2, 3] and numbers(taken) == [1, 2]
        assert sampler.ended == [0, 3] and (taken.aborted, taken.running, taken.ready) == (2, 0, 0)
        assert stream.untrained() == [0, 3] and stream.running == 0
        taken = await sampler.step(stream, 1, 4, 0)
        assert sampler.begun[4:] == [0, 3, 4, 5] and numbers(taken) == [0, 4]
        assert stream.untrained() == [3, 5] and stream.untrained(with_taken=True) == [3, 5, 0, 4]

    run(scenario, selection=Selection(oversampling=2.0))
    assert [(kind, facts["groups"]) for kind, facts in told] == [
        ("surplus_ended", [0, 3]),
        ("surplus_ended", [3, 5]),
    ]


def test_take_when_surplus_is_done_without_lag_then_it_is_counted_and_sampled_again_with_the_new_weights(
    told,
):
    async def scenario(stream, sampler):
        step = asyncio.create_task(stream.take(0))
        await settle()
        for number in (0, 1, 2):  # in one turn of the loop
            sampler._waiting[number].set_result(None)
        taken = await step
        assert numbers(taken) == [0, 1] and (taken.aborted, taken.surplus.groups, taken.surplus.tokens) == (
            0,
            1,
            2,
        )
        assert stream.untrained() == [2]
        taken = await sampler.step(stream, 1, 2, 3)
        assert [group.oldest_version for group in taken.groups] == [1, 1]

    run(scenario, selection=Selection(oversampling=1.5))
    assert [(kind, facts["groups"]) for kind, facts in told][0] == ("surplus_ended", [2])


def test_take_when_oversampled_with_lag_then_each_straggler_is_made_up_for_and_none_in_time_is_too_old():
    async def scenario(stream, sampler):
        assert numbers(await sampler.step(stream, 0, 0, 1)) == [0, 1]
        assert sampler.begun == [0, 1, 2, 3]  # no more than without over-sampling
        await sampler.finish(2)  # and 3 runs on
        taken = await sampler.step(stream, 1, 4)
        assert sampler.begun[4:] == [4, 5, 6] and numbers(taken) == [2, 4]
        assert (taken.kept_surplus, taken.running, taken.aborted) == (1, 3, 0)
        await sampler.finish(5, 6)
        taken = await sampler.step(stream, 2)
        # 3 is the only straggler left, so three more at most beside it.
        assert sampler.begun[7:] == [7, 8] and numbers(taken) == [5, 6]
        assert min(group.oldest_version for group in taken.groups) == 1
        await sampler.finish(3, 7, 8)
        taken = await sampler.step(stream, 3)
        assert numbers(taken) == [3, 7] and taken.ready == 1  # 8, surplus, is kept
        assert sampler.begun[9:] == [9] and stream.untrained() == [9, 8]

    run(scenario, max_lag=1, selection=Selection(oversampling=2.0))


def test_take_when_filtered_and_oversampled_then_a_resumed_stream_draws_only_the_rest():
    async def scenario(stream, sampler):
        sampler.flat = {0, 4}
        taken = await sampler.step(stream, 0, 0, 2, 1)
        # three for two, one in the place of 0
        assert numbers(taken) == [1, 2] and sampler.begun == [0, 1, 2, 3]
        assert stream.untrained() == [3]

        numbers_left, again = GroupNumbers(Cursor(4, (3,)), 0, 1), Sampler()
        resumed = GroupStream(
            again,
            numbers_left.draw,
            groups_per_step=2,
            first=1,
            last=9,
            selection=Selection(spread, oversampling=1.5),
        )
        for one, each in ((stream, sampler), (resumed, again)):
            each.flat = {4}
            taken = await each.step(one, 1, 4, 5, 6)
            assert each.begun[-4:] == [3, 4, 5, 6] and numbers(taken) == [5, 6] and one.untrained() == [3]
        assert numbers_left.drawn(resumed.untrained()) == Drawn(7, running=(3,))

    run(scenario, selection=Selection(spread, oversampling=1.5))


def test_close_when_groups_are_aborted_and_run_then_all_end_and_none_is_begun():
    async def scenario(stream, sampler):
        await sampler.step(stream, 0, 0, 1)
        step = asyncio.create_task(stream.take(1))
        await settle()
        step.cancel()
        await asyncio.wait([step])
        assert stream.running == 0 and sorted(sampler.ended) == [2, 2, 3, 4] and len(sampler.begun) == 6

    run(scenario, selection=Selection(oversampling=1.5))


@pytest.mark.parametrize(
    ("rewards", "passes"),
    [
        ([1.0, 1.0], False),
        ([0.1] * 7, False),
        ([1.0, 1.0 + 1e-9], False),
        ([1.0, 1.0000001], True),
        ([0.0, -0.0], False),
        ([1.0], False),
        ([0.0, 1e-30], True),
    ],
)
def test_spread_when_rewards_are_equal_as_float32_then_there_is_none(rewards, passes):
    assert has_spread(Group(0, [sample_of(0)] * len(rewards), rewards)) == passes


def resumed_stream(state, base, sampler, **options):
    """A run that goes on behind a checkpoint, as a leader makes it: all that is kept went through JSON."""
    kept = asdict(
        GroupNumbers(Cursor(base), 0, 1).drawn(state.running, waiting=state.waiting, again=state.again)
    )
    place = Drawn.parse(json.loads(json.dumps(kept | {"counts": state.counts()})))
    draw = GroupNumbers(Cursor(0), 0, 1, place).draw
    state = StreamState.resumed(place.waiting, place.counts)
    return GroupStream(sampler, draw, groups_per_step=2, last=10, resumed=state, **options)


def test_take_when_the_checkpoint_holds_groups_then_they_are_taken_first_and_not_sampled():
    """Of 5, 0 and 4 that waited, 0 was lost with its file; 2 was running."""

    async def scenario(stream, sampler):
        again = Sampler()
        state = StreamState((5, 0, 4), running=(2,))
        place = Drawn(6, waiting=(0,), running=(2,))  # without those that the checkpoint holds
        ready = [Group(number, [sample_of(0)], [1.0]) for number in (5, 4)]
        resumed = GroupStream(
            again,
            GroupNumbers(Cursor(0), 0, 1, place).draw,
            groups_per_step=2,
            first=1,
            last=10,
            max_lag=2,
            resumed=state,
            ready=ready,
        )
        assert resumed.state().waiting == (5, 4)  # 0 is not done yet
        step = asyncio.create_task(resumed.take(1))
        await settle()
        assert again.begun == [0, 2, 6, 7]
        await again.finish(2, 6)
        assert not step.done()  # for 0, which is before 4
        await again.finish(0)
        taken = await step
        assert numbers(taken) == [0, 5] and ready[0] in taken.groups
        assert resumed.waiting()[0] is ready[1]
        assert resumed.waiting(with_taken=True)[:2] == taken.groups
        assert numbers(await again.step(resumed, 2)) == [2, 4]
        await resumed.close()
        assert not {5, 4} & set(again.begun)

    run(scenario)


@drill(
    "a checkpoint with groups done and running, at lag 2",
    promised="those that waited are taken first, in order",
)
def test_take_when_a_run_goes_on_then_groups_that_waited_are_taken_first_in_their_order():
    async def scenario(stream, sampler):
        assert numbers(await sampler.step(stream, 0, 1, 3)) == [1, 3]
        await sampler.finish(5, 0, 4)  # and 2 is running
        state = stream.state()
        assert (state.waiting, state.running) == ((5, 0, 4), (2,))
        assert stream.state(with_taken=True).waiting == (1, 3, 5, 0, 4)  # no update was made with the first
        assert numbers(await sampler.step(stream, 1)) == [0, 5]  # the run that never ended
        again = Sampler()
        resumed = resumed_stream(state, 6, again, first=1, max_lag=2)
        step = asyncio.create_task(resumed.take(1))
        await settle()
        assert again.begun == [5, 0, 4, 2, 6, 7]
        await again.finish(2, 7, 4, 0)
        assert not step.done()
        assert resumed.state().waiting == (0, 4, 2, 7)  # what another checkpoint would keep
        await again.finish(5)
        assert numbers(await step) == [0, 5]
        assert numbers(await again.step(resumed, 2)) == [2, 4]
        assert numbers(await again.step(resumed, 3, 6)) == [6, 7]
        await resumed.close()

    run(scenario, max_lag=2)


def test_take_when_groups_that_waited_are_lost_or_never_drawn_again_then_others_take_their_places():
    async def scenario(_, sampler):
        sampler.lost, drawn = {5}, iter([5, 4, *range(6, 20)])  # 0 is of a prompt that is left out
        stream = GroupStream(
            sampler,
            lambda: next(drawn),
            groups_per_step=2,
            first=1,
            last=10,
            max_lag=1,
            resumed=StreamState((5, 0, 4)),
        )
        assert numbers(await sampler.step(stream, 1, 6, 5, 7, 4)) == [4, 6]
        assert numbers(await sampler.step(stream, 2, 8)) == [7, 8]
        await stream.close()

    run(scenario)


def test_take_when_no_update_was_made_with_oversampled_groups_then_a_run_that_goes_on_takes_the_same_ones():
    async def scenario(stream, sampler):
        assert numbers(await sampler.step(stream, 0, 2, 1)) == [1, 2]
        again = Sampler()
        resumed = resumed_stream(
            stream.state(with_taken=True), 4, again, first=0, selection=Selection(oversampling=2.0)
        )
        assert numbers(await again.step(resumed, 0, 0, 2, 3, 1)) == [1, 2]
        assert again.begun == [1, 2, 0, 3]
        await resumed.close()

    run(scenario, selection=Selection(oversampling=2.0))


@pytest.mark.parametrize("refills", [False, True])
def test_take_when_groups_were_filtered_before_the_checkpoint_then_they_count_for_the_limit_of_the_step(
    refills,
):
    async def scenario(stream, sampler):
        sampler.flat = set(range(2, 100))
        assert numbers(await sampler.step(stream, 0, 0, 1)) == [0, 1]
        await sampler.finish(2, 3, 4)  # of the four that may fail: 2 x (2 - 1) x (1 + 1)
        state = stream.state()
        assert state.filtered.groups == 3 and state.running == (5, 6)
        again = Sampler()
        again.flat = sampler.flat
        resumed = resumed_stream(state, 7, again, first=1, max_lag=1, selection=stream._selection)
        step = asyncio.create_task(resumed.take(1))
        await settle()
        while not step.done():
            await again.finish(*[n for n in again.begun if not again._waiting[n].done()][:1])
        # Four open places of two steps, and one more may fail.
        assert again.begun == [5, 6, 7, 8, 9]
        if refills:
            assert numbers(await step) == [8, 9]
        else:
            with pytest.raises(GroupsFilteredOut):
                await step
        await resumed.close()

    run(scenario, max_lag=1, selection=Selection(spread, limit=2.0, refills=refills))


def test_take_when_groups_are_filtered_then_one_sample_of_some_of_them_is_kept_to_be_measured():
    async def scenario(stream, sampler):
        sampler.flat = set(range(6))
        taken = await sampler.step(stream, 0, 0, 1, 2, 3, 4, 5, 6, 7)
        assert taken.filtered.groups == 6 and len(taken.aside) == 2  # of group 3 none can be
        assert len({id(one) for one in taken.aside}) == 2
        taken = await sampler.step(stream, 1, 8, 9)
        assert taken.aside == []

    def choose(group):
        return None if group.number == 3 else group.trajectories[1]

    run(scenario, selection=Selection(spread, measured=2, choose=choose))

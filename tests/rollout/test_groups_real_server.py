"""Groups of a real server that a filter replaces, and surplus groups, whose work at the server ends."""

import asyncio

import pytest

from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.rollout import Prompt, PromptDataset, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_filter import GroupFilter
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream, Selection

GROUPS, GROUP_SIZE, STEPS = 3, 2, 4
PROMPTS = PromptDataset([Prompt(i, [1 + i, 2, 3], label=i % 2) for i in range(30)])
FILTERS = """
async def odd(prompt, group):
    assert len(group.trajectories) == len(group.rewards) and group.trajectories[0].output_ids.numel() == 3
    group.rewards.clear()  # a copy: training must not see this
    if prompt.index % 5 == 0:
        raise LookupError("no such row")
    prompt.metadata["changed"] = True
    return prompt.label == 1
"""


class Parity:
    """The reward of a sample: whether its first id is odd."""

    compares = False

    async def of_sample(self, prompt, trajectory):
        return Score(float(trajectory.output_ids[0] % 2))


def run(server, spec, scenario, *, tokens=3, **options):
    """await scenario(stream, client, failures, scored): scored has the rewards of every group
    that was sampled.
    """

    async def inner():
        failures, scored = Failures(0.5), {}
        async with RolloutClient([server.url], vocab_size=100, engine=server.engine) as client:
            numbers = GroupNumbers(Cursor(0), 0, 1)
            sampler = GroupSampler(
                client,
                PROMPTS,
                numbers,
                SamplingParams(tokens, ignore_eos=True),
                group_size=GROUP_SIZE,
                rewards=Parity(),
                failures=failures,
                failed_prompts=FailedPrompts(len(PROMPTS)),
                on_failed=None,
                episodes=None,
            )

            async def sample(number):
                group = await sampler.sample(number)
                scored[number] = list(group.rewards)
                return group

            chosen = GroupFilter(spec, PROMPTS, failures)
            stream = GroupStream(
                sample,
                sampler.draw,
                groups_per_step=GROUPS,
                first=0,
                last=STEPS,
                selection=Selection(chosen.passes),
                **options,
            )
            try:
                await asyncio.wait_for(scenario(stream, failures, scored, numbers), 60)
            finally:
                await stream.close()
                await chosen.close()

    asyncio.run(inner())


@pytest.mark.parametrize("lag", [0, 1])
def test_steps_when_groups_need_a_spread_then_every_other_is_replaced_and_no_number_is_lost(companion, lag):
    async def scenario(stream, failures, scored, numbers):
        taken = [await stream.take(step) for step in range(STEPS)]
        groups = [group for step in taken for group in step.groups]
        assert len(groups) == GROUPS * STEPS and all(len(set(group.rewards)) == 2 for group in groups)
        flat = {number for number, rewards in scored.items() if len(set(rewards)) == 1}
        assert flat and sum(step.filtered.groups for step in taken) == len(flat)
        assert sum(step.filtered.above_0 for step in taken) == sum(scored[number][0] for number in flat)
        # A later run draws what is neither trained nor filtered, and no filtered prompt has failed.
        left = numbers.drawn(stream.untrained())
        assert {group.number for group in groups} | flat | set(left.open) == set(range(left.base))
        assert failures.groups == 0 and failures.ended == len(scored) * GROUP_SIZE

    run(companion, "spread", scenario, max_lag=lag)


def test_steps_when_the_users_filter_fails_for_some_rows_then_their_groups_are_lost_and_counted(
    companion, tmp_path
):
    file = tmp_path / "filters.py"
    file.write_text(FILTERS)

    async def scenario(stream, failures, scored, numbers):
        rows = []
        for step in range(STEPS):
            taken = await stream.take(step)
            rows += [PROMPTS.at(group.number) for group in taken.groups]
            assert all(len(group.rewards) == GROUP_SIZE for group in taken.groups)
        assert all(row.label == 1 and row.index % 5 and not row.metadata for row in rows)
        failed = sum(PROMPTS.at(number).index % 5 == 0 for number in scored)
        assert failed and failures.by_cause["group_filter"] == failures.groups == failed
        assert (
            "`group_filter`" in failures.texts["group_filter"]
            and "no such row" in failures.texts["group_filter"]
        )

    run(companion, f"{file}:odd", scenario)


def test_take_when_surplus_runs_at_the_server_then_it_is_idle_when_the_step_has_its_groups(companion):
    async def scenario(client):
        async def sample(number):
            sampling = SamplingParams(4 if number in (1, 3) else 500, ignore_eos=True)
            return await sampler(sampling).sample(number)

        def sampler(sampling):
            return GroupSampler(
                client,
                PROMPTS,
                None,
                sampling,
                group_size=GROUP_SIZE,
                rewards=Parity(),
                failures=failures,
                failed_prompts=None,
                on_failed=None,
                episodes=None,
            )

        failures, drawn = Failures(0.5), iter(range(9))
        stream = GroupStream(
            sample,
            lambda: next(drawn),
            groups_per_step=2,
            first=0,
            last=1,
            selection=Selection(oversampling=2.0),
        )
        taken = await stream.take(0)
        await client.flush_cache()  # refused while a request runs or waits
        assert [group.number for group in taken.groups] == [1, 3] and taken.aborted == 2
        counts = client.counts()
        assert (
            counts["cut"] == 2 * GROUP_SIZE
            and counts["cut_tokens"] > 0
            and counts["samples"] == 2 * GROUP_SIZE
        )
        assert failures.cut_lengths == [0, 0] and failures.groups == 0

    async def inner():
        async with RolloutClient([companion.url], vocab_size=100, engine=companion.engine) as client:
            await asyncio.wait_for(scenario(client), 120)

    asyncio.run(inner())

"""Rewards that are slow, fail and hang, on samples of a real server: what is counted is what was planted."""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl_corr.engines.errors import TooManyFailures
from megatron_rl_corr.rollout import Prompt, PromptDataset, Rewards, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream
from tests.faults.drills import drill
from tools.process_group import descendants

PLANTED = Path(__file__).resolve().parents[2] / "benchmarks/planted_reward.py"
GROUPS, GROUP_SIZE, STEPS = 4, 4, 14
# The context of the server's model is shorter than this one.
TOO_LONG = [2] * 5000
LIMIT_S = 3.0
"""Of a reward: one that sleeps for 0.2 s is none that hangs, on a machine whose cores are taken
for a second too.
"""


def run(server, scenario, spec, prompts, **options):
    """await scenario(stream, failures) with everything around it; no process is left."""

    async def inner():
        rewards = Rewards(spec, workers=2, limit_s=LIMIT_S)
        failures = Failures(options.pop("max_fraction", 0.05))
        await rewards.start()
        workers = len(descendants(os.getpid()))
        try:
            async with RolloutClient([server.url], vocab_size=100, engine=server.engine) as client:
                sampler = GroupSampler(
                    client,
                    prompts,
                    GroupNumbers(Cursor(0), 0, 1),
                    SamplingParams(3, ignore_eos=True),
                    group_size=GROUP_SIZE,
                    rewards=rewards,
                    failures=failures,
                    failed_prompts=FailedPrompts(len(prompts)),
                    on_failed=options.pop("on_failed", None),
                    episodes=None,
                )
                stream = GroupStream(
                    sampler.sample, sampler.draw, groups_per_step=GROUPS, first=0, last=STEPS, **options
                )
                try:
                    return await asyncio.wait_for(scenario(stream, failures), 120)
                finally:
                    await stream.close()
                    # calls of dropped groups end by themselves, and are counted
                    await asyncio.sleep(LIMIT_S + 0.5)
                    assert len(descendants(os.getpid())) == workers
        finally:
            await rewards.close()

    return asyncio.run(inner())


@drill("rewards that sleep, raise and hang", promised="each costs its group, which is replaced and counted")
@pytest.mark.parametrize(("lag", "on_failed"), [(2, None), (0, -1.0)])
def test_steps_when_rewards_sleep_raise_and_hang_then_none_is_lost_and_counts_are_those_planted(
    companion, tmp_path, monkeypatch, lag, on_failed
):
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PLANTED", str(calls))
    monkeypatch.setenv("SLEEP_S", "0.2")
    prompts = PromptDataset([Prompt(i, TOO_LONG if i == 7 else [1 + i, 2, 3]) for i in range(60)])

    async def scenario(stream, failures):
        taken = [await stream.take(step) for step in range(STEPS)]
        groups = [group for step in taken for group in step.groups]
        assert len(groups) == STEPS * GROUPS and all(len(group.rewards) == GROUP_SIZE for group in groups)
        drawn = {group.number for group in groups}
        assert len(drawn) == len(groups)
        # What was drawn is trained or was replaced; the prompt that no server takes is among the latter.
        replaced = failures.groups
        assert drawn < set(range(len(groups) + replaced)) and not stream.untrained()
        assert not any(prompts.at(number).index == 7 for number in drawn)
        return groups, failures

    groups, failures = run(
        companion, scenario, f"{PLANTED}:reward", prompts, max_lag=lag, on_failed=on_failed
    )
    planted = Counter(calls.read_text())
    assert planted["h"] >= 1 and planted["r"] >= 3 and planted["s"] >= 10
    assert failures.by_cause["reward_error"] == planted["r"]
    assert failures.by_cause["reward_timeout"] == planted["h"]
    assert failures.by_cause["refused"] >= 1  # of the prompt that is too long
    values = [reward for group in groups for reward in group.rewards]
    assert values.count(-1.0) == (0 if on_failed is None else planted["r"] + planted["h"])
    if on_failed is None:
        assert failures.groups > 1 and 0 < failures.lengths[0] <= failures.groups * GROUP_SIZE
        assert failures.lengths[1] == 3 * failures.lengths[0]
    else:
        assert failures.groups == 1


@drill("a reward that fails for every sample", promised="the run ends with the user's traceback")
def test_step_when_the_reward_fails_for_every_sample_then_the_run_ends_with_its_traceback(
    companion, tmp_path
):
    (tmp_path / "wrong.py").write_text(
        "def reward(prompt, ids, reason):\n    return prompt.metadata['anwser']\n"
    )
    prompts = PromptDataset([Prompt(i, [1 + i, 2, 3], {"answer": 1}) for i in range(60)])

    async def scenario(stream, failures):
        with pytest.raises(
            TooManyFailures, match="(?s)100 of the last 100 samples .*prompt.metadata.*KeyError"
        ) as end:
            await stream.take(0)
        assert str(end.value).count("Traceback") == 1

    run(companion, scenario, f"{tmp_path}/wrong.py:reward", prompts)

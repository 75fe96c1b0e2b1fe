"""Collects samples from recorded responses, by the client and through the queue. Run where the
engine is installed.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest

import megatron_rl_corr
from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.rollout import Prompt, PromptDataset, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream

GREEDY_LENGTH = SamplingParams(8, temperature=0.5, top_p=0.9)  # SGLang would need a top_k beside it


class CountTokens:
    """A reward function of this process: the number of tokens."""

    compares = False

    async def of_sample(self, prompt, trajectory):
        return Score(float(trajectory.output_ids.numel()))


def recorded(path):
    """Four responses to prompt [1] and four to [2]; the n-th is n + 1 times the id n, each of log-prob -n."""
    lines = [
        {
            "prompt_ids": [prompt],
            "output_ids": [n] * (n + 1),
            "logprobs": [-float(n)] * (n + 1),
            "version": "1",
        }
        for prompt in (1, 2)
        for n in range(4)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


async def main(folder):
    assert Path(megatron_rl_corr.__file__).parents[1] == folder, "the copy is what is imported"
    path = recorded(folder / "recorded.jsonl")
    async with RolloutClient([path], vocab_size=10, engine="replay_recorded") as client:
        await client.wait_healthy(1)
        samples = await client.generate([[1], [2]], GREEDY_LENGTH, samples_per_prompt=4)
        assert [(s.prompt_index, s.sample_index) for s in samples] == [
            (p, n) for p in (0, 1) for n in range(4)
        ]
        for sample in samples:
            length = sample.output_ids.numel()
            assert sample.output_ids.tolist() == [length - 1] * length and sample.server == path
            assert sample.rollout_logprobs.tolist() == [1.0 - length] * length
        with pytest.raises(UnsupportedByEngine, match="recorded samples does not support pause mode retract"):
            await client.pause_generation("retract")
    async with RolloutClient([path], vocab_size=10, engine="replay_recorded") as client:
        prompts = PromptDataset([Prompt(0, [1]), Prompt(1, [2])])
        sampler = GroupSampler(
            client,
            prompts,
            GroupNumbers(Cursor(0), 0, 1),
            GREEDY_LENGTH,
            group_size=4,
            rewards=CountTokens(),
            failures=Failures(0.0),
            failed_prompts=FailedPrompts(2),
            on_failed=None,
            episodes=None,
        )
        stream = GroupStream(sampler.sample, sampler.draw, groups_per_step=2, first=0, last=1)
        taken = await stream.take(0)
        assert [group.number for group in taken.groups] == [0, 1]
        assert [sorted(group.rewards) for group in taken.groups] == [[1.0, 2.0, 3.0, 4.0]] * 2
        assert {group.oldest_version for group in taken.groups} == {1}


asyncio.run(main(Path(sys.argv[1])))

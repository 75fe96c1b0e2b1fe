"""Rollouts on held-out prompts, every --eval-interval steps: one sample a prompt, none of which is trained on.

Prompts are dealt out over the replicas; each replica's leader samples its share with the training's sampling
parameters, environment and reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.data.prompts import Prompt
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.mcore.collect import SampleSource
from megatron_rl_corr.parallel.failure import all_reduce_results, communication_device
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout.seeds import evaluation_number


@dataclass(frozen=True)
class Evaluation:
    """Samples `prompts` after every `every`-th step and averages their rewards."""

    layout: Layout
    source: SampleSource
    """Its prompts are the held-out ones, None on ranks that ask for no samples."""
    sampling: SamplingParams
    every: int

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` steps."""
        return step % self.every == 0

    def all_reduce_metrics(self) -> dict[str, float]:
        """Mean reward and length, and the share that hit the length limit: on every rank, which all call."""
        prompts, mine = self.source.prompts, []
        if self.layout.is_data_leader:
            mine = [prompts.rows[place] for place in range(self.layout.dp_rank, len(prompts), self.layout.dp_size)]
        sampling = self.source.loop.submit(self._sample(mine)) if mine else None
        own = all_reduce_results(sampling, _sums)
        sums = torch.zeros(5, dtype=torch.float64) if own is None else own
        sums = sums.to(communication_device())
        dist.all_reduce(sums)
        *totals, count, failed = sums.tolist()
        names = ("eval/reward", "eval/response_length", "eval/length_fraction")
        means = {name: total / count if count else math.nan for name, total in zip(names, totals, strict=True)}
        return means | {"eval/failed": failed}

    async def _sample(self, prompts: list[Prompt]) -> list[tuple[Trajectory, float] | None]:
        """A sample of each prompt and its reward; None where it failed for good."""
        places = range(self.layout.dp_rank, len(self.source.prompts), self.layout.dp_size)
        numbers = [evaluation_number(place) for place in places]
        return await all_or_first_failure([self._scored(*one) for one in zip(prompts, numbers, strict=True)])

    async def _scored(self, prompt: Prompt, number: int) -> tuple[Trajectory, float] | None:
        client, episodes = self.source.client, self.source.episodes
        try:
            if episodes is None:
                [sample] = await client.generate([prompt.input_ids], self.sampling, group_numbers=[number])
            else:
                [sample] = await episodes.generate(client, [prompt], self.sampling, group_numbers=[number])
            return sample, await self.source.rewards.score(prompt, sample)
        except SampleFailure as failure:
            warn(f"row {prompt.index} of --rollout-eval-prompts failed for good ({failure.cause}): {failure}")
            return None


def _sums(scored: list[tuple[Trajectory, float] | None]) -> torch.Tensor:
    """[5] float64: sum of rewards, sampled tokens, samples cut by the length limit, samples, failed samples."""
    good = [one for one in scored if one is not None]
    tokens = sum(int(sample.sampled.sum()) for sample, _ in good)
    cut = sum(sample.finish_reason == "length" for sample, _ in good)
    rewards = sum(reward for _, reward in good)
    return torch.tensor([rewards, tokens, cut, len(good), len(scored) - len(good)], dtype=torch.float64)

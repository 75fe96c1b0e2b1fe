"""Rollouts on held-out prompts, every --eval-interval steps: one sample a prompt, and nothing is trained on it.

Prompts are dealt out over the replicas; each replica's leader asks the servers for its share, with the training's
sampling, environment and reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl_corr.mcore.compat import Layout
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.meeting import all_reduce_answer
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import EnvironmentFactory
from megatron_rl_corr.rollout.episodes import generate_episodes
from megatron_rl_corr.rollout.prompts import Prompt
from megatron_rl_corr.rollout.rewards import RewardFunction, score
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """Samples `prompts` after every `every`-th step."""

    layout: Layout
    client: RolloutClient
    loop: LoopThread
    prompts: list[Prompt]
    sampling: SamplingParams
    reward: RewardFunction | None
    environment: EnvironmentFactory | None
    max_turns: int | None
    every: int

    def is_due(self, step: int) -> bool:
        """After so many steps."""
        return step % self.every == 0

    def all_reduce_metrics(self) -> dict[str, float]:
        """Mean reward and length, and the share that hit the length limit: on every rank, which all call."""
        mine = self.prompts[self.layout.dp_rank :: self.layout.dp_size] if self.layout.is_data_leader else []
        sampling = self.loop.submit(self._sample(mine)) if mine else None
        own = all_reduce_answer(sampling, lambda samples: self._sums(samples, mine))
        sums = torch.zeros(4, dtype=torch.float64) if own is None else own
        sums = sums.to(communication_device())
        dist.all_reduce(sums)
        *totals, count = sums.tolist()
        names = ("eval/reward", "eval/response_length", "eval/length_fraction")
        return {name: total / count for name, total in zip(names, totals, strict=True)}

    async def _sample(self, prompts: list[Prompt]) -> list[Trajectory]:
        if self.environment is None:
            return await self.client.generate([prompt.input_ids for prompt in prompts], self.sampling)
        return await generate_episodes(
            self.client, prompts, self.sampling, environment=self.environment, max_turns=self.max_turns
        )

    def _sums(self, samples: list[Trajectory], prompts: list[Prompt]) -> torch.Tensor:
        """[4]: of rewards, of sampled tokens, of samples that were cut, and their number."""
        rewards = score(samples, prompts, self.reward)
        tokens = sum(int(sample.sampled.sum()) for sample in samples)
        cut = sum(sample.finish_reason == "length" for sample in samples)
        return torch.tensor([rewards.double().sum().item(), tokens, cut, len(samples)], dtype=torch.float64)

"""Samples of one step: the leader of each data-parallel replica asks the servers; the replica receives."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_rl_corr.core.metrics import Mean, Metric, Sum
from megatron_rl_corr.mcore.arguments import RolloutOptions
from megatron_rl_corr.mcore.batch import RolloutBatch, broadcast_to_replica
from megatron_rl_corr.mcore.compat import Layout
from megatron_rl_corr.mcore.route_transport import scatter_routes
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.meeting import ROUND_S, all_reduce_answer
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import EnvironmentFactory
from megatron_rl_corr.rollout.episodes import generate_episodes
from megatron_rl_corr.rollout.prompts import Prompt, PromptDataset
from megatron_rl_corr.rollout.rewards import RewardFunction, score
from megatron_rl_corr.rollout.routed_experts import has_routes, pack
from megatron_rl_corr.rollout.stream import GroupStream, Taken
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.router_replay import Replay

PROGRESS_EVERY_S = 10.0
"""So often a leader tells the user how far it has come."""
COUNTED = (
    "samples", "tokens", "token_lags", "mixed", "length", "abort", "ready", "running", "dropped", "retries",
    "continuations", "left_out", "route_tokens", "route_bytes", "unrouted",
)  # fmt: skip
"""What a replica's leader counts in a step, in the order it is broadcast in."""


class Collector:
    """Collects a global batch of `samples` rows, group_size of each prompt, in steps [first, last)."""

    def __init__(
        self, options: RolloutOptions, layout: Layout, *, samples: int, length: int, steps: tuple[int, int],
        client: RolloutClient, loop: LoopThread, prompts: PromptDataset, reward: RewardFunction | None,
        environment: EnvironmentFactory | None = None, replay: Replay | None = None, sequence_parallel: bool = False,
    ):
        share = samples // layout.dp_size
        if samples % layout.dp_size or share % options.group_size:
            raise ValueError(
                f"--global-batch-size {samples} must be a multiple of --rollout-group-size "
                f"{options.group_size} times the data-parallel size {layout.dp_size}: "
                "a prompt's samples stay on one replica"
            )
        check_they_fit(prompts, "--rollout-prompts", options.max_new_tokens, length)
        self._options, self._layout, self._length, self._rows = options, layout, length, share
        self._client, self._loop, self._prompts = client, loop, prompts
        self._reward, self._environment = reward, environment
        self._groups, self._prompts_per_step = share // options.group_size, samples // options.group_size
        # A step's prompts are one permutation of the data set; its groups are asked for one by one.
        self._prompts_of = functools.lru_cache(maxsize=options.max_lag + 2)(self._own_prompts)
        self._stream = GroupStream(
            self._sample, groups_per_step=self._groups, first=steps[0], last=steps[1], max_lag=options.max_lag,
            drop_stale=options.stale_samples == "drop",
        )
        self._counted = client.counts()
        self._replay, self._sequence_parallel = replay, sequence_parallel
        self.device = communication_device()
        self.trajectories: list[Trajectory] = []
        """The last step's samples of this replica, on its data leader."""
        self.metrics: dict[str, Metric] = {}
        """How the last step's samples came, this replica's share."""
        self.sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p,
            top_k=options.top_k,
        )

    def collect(self, step: int) -> RolloutBatch:
        """This rank's share of a step, whose number is its weights' version; every rank calls it.

        Rows of its replica, whole or, under context parallelism, their columns.
        """
        batch, counted = self._all_reduce_taken(step)
        counted = counted.to(self.device)
        broadcast_to_replica([counted], self._layout)
        # What a replica counts once is told by one of the ranks that share its rows.
        self.metrics = collection_metrics(
            counted if self._layout.cp_group.rank() == 0 else torch.zeros_like(counted),
            with_routes=self._replay is not None,
        )
        whole = batch.broadcast(
            self._layout, with_support=self.sampling.truncated, num_turns=self._options.max_turns
        )
        own = whole.context_slice(self._layout.cp_group.rank(), self._layout.cp_group.size())
        return own if self._replay is None else replace(own, routes=self._scatter_routes())

    def _scatter_routes(self) -> torch.Tensor:
        """[N, t, M, k]: the routes of this rank's tokens and layers."""
        shape, packed = self._replay.shape, None
        if self._layout.is_data_leader:
            packed = pack([sample.routed_experts for sample in self.trajectories], self._length, shape)
        return scatter_routes(
            packed, self._rows, self._length, shape=shape, stage_layers=self._replay.stage_layers, layout=self._layout,
            sequence_parallel=self._sequence_parallel,
        )

    def close(self) -> None:
        """End what is being sampled ahead."""
        self._loop.call(self._stream.close())

    def _own_prompts(self, step: int) -> list[Prompt]:
        first = self._layout.dp_rank * self._groups
        return self._prompts.batch(step, self._prompts_per_step)[first : first + self._groups]

    def _prompt(self, number: int) -> Prompt:
        """Of a group of this replica."""
        step, place = divmod(number, self._groups)
        return self._prompts_of(step)[place]

    async def _sample(self, number: int) -> list[Trajectory]:
        prompt, samples = self._prompt(number), self._options.group_size
        if self._environment is None:
            return await self._client.generate([prompt.input_ids], self.sampling, samples_per_prompt=samples)
        return await generate_episodes(
            self._client, [prompt], self.sampling, environment=self._environment,
            max_turns=self._options.max_turns, samples_per_prompt=samples,
        )

    def _all_reduce_taken(self, step: int) -> tuple[RolloutBatch, torch.Tensor]:
        """A leader's batch and what it counted, zeros on other ranks; back when every leader has its own.

        All ranks meet at least every ROUND_S, however long the slowest leader waits for its samples.
        """
        taking = self._loop.submit(self._stream.take(step)) if self._layout.is_data_leader else None
        started = time.monotonic()

        def read(taken: Taken) -> tuple[RolloutBatch, torch.Tensor]:
            return self._batch(taken, step), torch.tensor(self._count(taken, step), dtype=torch.float64)

        own = all_reduce_answer(taking, read, lambda taking: self._has_arrived(taking, step, started))
        if own is None:
            return RolloutBatch.empty(self._rows, self._length), torch.zeros(len(COUNTED), dtype=torch.float64)
        return own

    def _has_arrived(self, taking: concurrent.futures.Future, step: int, started: float) -> bool:
        """Within ROUND_S. A slow collection says how far it has come, every ten seconds; a fast one stays silent."""
        end = time.monotonic() + ROUND_S
        while time.monotonic() < end:
            if concurrent.futures.wait([taking], PROGRESS_EVERY_S).done:
                return True
            tokens = self._client.counts()["tokens"] - self._counted["tokens"]
            speed = tokens / (time.monotonic() - started)
            print(f"[rollout] step {step + 1}: {self._stream.ready} of {self._groups} groups are done, "
                  f"{self._stream.running} are running, {speed:.0f} tokens/s", flush=True)  # fmt: skip
        return False

    def _batch(self, taken: Taken, version: int) -> RolloutBatch:
        self.trajectories = [
            replace(trajectory, prompt_index=place)
            for place, group in enumerate(taken.groups) for trajectory in group.trajectories
        ]
        rewards = score(self.trajectories, [self._prompt(group.number) for group in taken.groups], self._reward)
        return RolloutBatch.from_trajectories(
            self.trajectories, rewards, length=self._length, version=version, num_turns=self._options.max_turns
        )

    def _count(self, taken: Taken, version: int) -> list[float]:
        """In the order of COUNTED."""
        counts = self._client.counts()
        since = {name: counts[name] - self._counted[name] for name in counts}
        self._counted = counts
        by_version = [
            (version - int(span.version), int(sample.sampled[span.start : span.end].sum()))
            for sample in self.trajectories for span in sample.weight_versions
        ]
        own = {
            "samples": len(self.trajectories),
            "tokens": sum(tokens for _, tokens in by_version),
            "token_lags": sum(lag * tokens for lag, tokens in by_version),
            "mixed": sum(len(sample.weight_versions) > 1 for sample in self.trajectories),
            "length": sum(sample.finish_reason == "length" for sample in self.trajectories),
            "abort": sum(sample.finish_reason == "abort" for sample in self.trajectories),
            "ready": taken.ready, "running": taken.running, "dropped": taken.dropped,
            "route_tokens": 0, "route_bytes": 0, "unrouted": 0,
        }  # fmt: skip
        if self._replay is not None:
            routes, experts = [sample.routed_experts for sample in self.trajectories], self._replay.shape.experts
            own["route_tokens"] = sum(len(rows) for rows in routes)
            own["route_bytes"] = sum(rows.nbytes for rows in routes)
            own["unrouted"] = sum(int((~has_routes(rows, experts)).all(dim=1).sum()) for rows in routes)
        return [float((since | own)[name]) for name in COUNTED]


def check_they_fit(prompts: PromptDataset, flag: str, max_new_tokens: int, length: int) -> None:
    """ValueError unless the longest prompt and a longest response are a row."""
    longest = max(len(prompt.input_ids) for prompt in prompts.prompts)
    needed = longest + max_new_tokens - 1
    if needed > length:
        raise ValueError(
            f"--seq-length {length} is too short for the longest prompt of {flag}, {longest} tokens, and "
            f"--rollout-max-new-tokens {max_new_tokens}; use --seq-length {needed} or more"
        )


def collection_metrics(counted: torch.Tensor, *, with_routes: bool = False) -> dict[str, Metric]:
    """What a replica's leader counted ([len(COUNTED)] float64), under its logged names."""
    values = dict(zip(COUNTED, counted, strict=True))

    def mean(total: str, count: str) -> Mean:
        return Mean(torch.stack([values[total], values[count]]))

    routes = {
        "router_replay/bytes_per_token": mean("route_bytes", "route_tokens"),
        "router_replay/tokens_without_routes": Sum(values["unrouted"][None]),
    }
    return (routes if with_routes else {}) | {
        "weight_lag_token_mean": mean("token_lags", "tokens"),
        "rollout/mixed_version_fraction": mean("mixed", "samples"),
        "rollout/length_fraction": mean("length", "samples"),
        "rollout/abort_fraction": mean("abort", "samples"),
        "rollout/groups_ready": Sum(values["ready"][None]),
        "rollout/groups_running": Sum(values["running"][None]),
        "rollout/groups_dropped": Sum(values["dropped"][None]),
        "rollout/retries": Sum(values["retries"][None]),
        "rollout/continuations": Sum(values["continuations"][None]),
        "rollout/servers_left_out": Sum(values["left_out"][None]),
    }

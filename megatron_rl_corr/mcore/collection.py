"""Samples of one step: the leader of each data-parallel replica asks the servers; the replica receives."""

from __future__ import annotations

import concurrent.futures
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.engines.routes import pack
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.mcore.batch import RolloutBatch, broadcast_to_replica
from megatron_rl_corr.mcore.collection_metrics import COUNTED, collection_metrics, count_samples
from megatron_rl_corr.mcore.support_transport import Part, cut_supports, scatter_supports
from megatron_rl_corr.moe.scatter import scatter_routes
from megatron_rl_corr.parallel.failure import (
    MEETING_INTERVAL_S,
    all_reduce_failure,
    all_reduce_results,
    communication_device,
)
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, GroupNumbers, SavedCursor
from megatron_rl_corr.rollout.episodes import Episodes
from megatron_rl_corr.rollout.failures import CAUSES, NAMED_AFTER, FailedFraction, FailedPrompts, Failures
from megatron_rl_corr.rollout.queue import GroupSampler, GroupStream, Taken

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import Replay

PROGRESS_EVERY_S = 10.0
"""So often a leader tells the user how far it has come."""


class Collector:
    """Collects a global batch of `samples` rows, group_size of each prompt, in steps [first, last)."""

    def __init__(
        self, options: RunConfig, layout: Layout, *, samples: int, length: int, steps: tuple[int, int],
        client: RolloutClient, loop: LoopThread, prompts: PromptDataset, rewards: Rewards,
        episodes: Episodes | None = None, saved: SavedCursor | None = None, replay: Replay | None = None,
        sequence_parallel: bool = False,
    ):
        share = samples // layout.dp_size
        if samples % layout.dp_size or share % options.group_size:
            raise ValueError(
                f"--global-batch-size {samples} must be a multiple of --rollout-group-size "
                f"{options.group_size} times the data-parallel size {layout.dp_size}: "
                "a prompt's samples stay on one replica"
            )
        check_they_fit(prompts, "--rollout-prompts", options.max_new_tokens, length)
        check_vocabulary(prompts, "--rollout-prompts", client.vocab_size)
        self._options, self._layout, self._length, self._rows = options, layout, length, share
        self._client, self._loop, self._rewards = client, loop, rewards
        self._groups = share // options.group_size
        self.sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p,
            top_k=options.top_k,
        )
        client.engine.check_sampling(self.sampling)
        self._failures = Failures(options.max_failed_fraction)
        self._failed_fraction = FailedFraction(options.max_failed_fraction)
        self._prompts = prompts
        # Without failures, a step's groups are those of one slice of the sequence.
        cursor = Cursor(steps[0] * samples // options.group_size) if saved is None else saved.cursor_of(prompts)
        self._failed_prompts = FailedPrompts(len(prompts)) if saved is None else saved.failed_of(prompts)
        self._sampler = sampler = GroupSampler(
            client, prompts, GroupNumbers(cursor, layout.dp_rank, layout.dp_size), self.sampling,
            group_size=options.group_size, rewards=rewards, failures=self._failures,
            failed_prompts=self._failed_prompts, on_failed=options.on_failed_reward, episodes=episodes,
        )
        self._stream = GroupStream(
            sampler.sample, sampler.draw, groups_per_step=self._groups, first=steps[0], last=steps[1],
            max_lag=options.max_lag, drop_stale=options.stale_samples == "drop",
        )
        self._counted = client.counts()
        self._failed = [0.0] * (len(CAUSES) + 2)
        """Since the step before: samples that ended, those that failed, by cause, and groups that were replaced."""
        self._replay, self._sequence_parallel = replay, sequence_parallel
        self.device = communication_device()
        self.trajectories: list[Trajectory] = []
        """The last step's samples of this replica, on its data leader."""
        self._supports: list[Part] | None = None
        """What those were drawn from, until it is sent."""
        self.metrics: dict[str, Metric] = {}
        """How the last step's samples came, this replica's share."""

    def collect(self, step: int) -> RolloutBatch:
        """This rank's share of a step, whose number is its weights' version; every rank calls it.

        Rows of its replica, whole or, under context parallelism, their columns.
        """
        batch, counted = self._all_reduce_taken(step)
        self._all_reduce_failed()
        counted = counted.to(self.device)
        broadcast_to_replica([counted], self._layout)
        # What a replica counts once is told by one of the ranks that share its rows.
        self.metrics = collection_metrics(
            counted if self._layout.cp_group.rank() == 0 else torch.zeros_like(counted),
            with_routes=self._replay is not None,
        )
        whole = batch.broadcast(self._layout, num_turns=self._options.max_turns)
        own = whole.context_slice(self._layout.cp_group.rank(), self._layout.cp_group.size())
        if self.sampling.truncated:
            parts, self._supports = self._supports, None
            own = replace(own, supports=scatter_supports(parts, self._rows, self._length, layout=self._layout))
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

    def all_gather_cursor(self) -> SavedCursor | None:
        """Where all replicas stand, between two steps, on rank 0; every rank calls it."""

        async def drawn() -> Drawn:
            return self._sampler.drawn(self._stream.untrained())

        own = (self._layout.dp_rank, self._loop.call(drawn())) if self._layout.is_data_leader else None
        group = self._layout.dp_cp_group
        everybodys: list[tuple[int, Drawn] | None] = [None] * group.size()
        dist.all_gather_object(everybodys, own, group=group)
        if dist.get_rank() != 0:
            return None
        replicas = [replica for _, replica in sorted(one for one in everybodys if one is not None)]
        return SavedCursor.of(Cursor.merged(replicas), self._prompts, self._failed_prompts)

    def close(self) -> None:
        """End what is being sampled ahead, and what scores it."""
        self._loop.call(self._stream.close())
        self._loop.call(self._rewards.close())

    def _all_reduce_failed(self) -> None:
        """All replicas' failures since the step before; ends the run, on all ranks, where they are too many."""
        sums = torch.tensor(self._failed, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        *judged, replaced = sums.tolist()
        exceeded = self._failed_fraction.exceeded(judged)
        if exceeded is not None:  # the first rank that has seen a failure tells
            all_reduce_failure(self._failures.too_many(*exceeded) if self._failures.texts else None)
        if replaced:
            self._all_gather_failed_prompts()

    def _all_gather_failed_prompts(self) -> None:
        """Leaders learn which prompts failed on other replicas: a prompt comes to another one in every epoch."""
        group = self._layout.dp_cp_group
        dropped: list[list[tuple[int, int]]] = [[]] * group.size()
        dist.all_gather_object(dropped, self._failures.take_dropped(), group=group)
        for row, number in sorted(pair for pairs in dropped for pair in pairs):
            if self._failed_prompts.add(row, number) and dist.get_rank() == 0:
                print(f"[rollout] row {row} of --rollout-prompts is left out for an epoch: its groups failed "
                      f"{NAMED_AFTER} times", file=sys.stderr, flush=True)  # fmt: skip

    def _all_reduce_taken(self, step: int) -> tuple[RolloutBatch, torch.Tensor]:
        """A leader's batch and what it counted, zeros on other ranks; back when every leader has its own.

        All ranks meet at least every MEETING_INTERVAL_S, however long the slowest leader waits for its samples.
        """
        taking = self._loop.submit(self._stream.take(step)) if self._layout.is_data_leader else None
        started = time.monotonic()

        def read(taken: Taken) -> tuple[RolloutBatch, torch.Tensor]:
            batch = self._batch(taken, step)
            if self.sampling.truncated:
                self._supports = cut_supports(self.trajectories, self._length, self._layout.cp_size)
            return batch, torch.tensor(self._count(taken, step), dtype=torch.float64)

        own = all_reduce_results(taking, read, lambda taking: self._has_arrived(taking, step, started))
        if own is None:
            return RolloutBatch.empty(self._rows, self._length), torch.zeros(len(COUNTED), dtype=torch.float64)
        return own

    def _has_arrived(self, taking: concurrent.futures.Future, step: int, started: float) -> bool:
        """Whether the samples arrive within MEETING_INTERVAL_S; progress is printed every PROGRESS_EVERY_S."""
        end = time.monotonic() + MEETING_INTERVAL_S
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
        rewards = torch.tensor([reward for group in taken.groups for reward in group.rewards], dtype=torch.float32)
        return RolloutBatch.from_trajectories(
            self.trajectories, rewards, length=self._length, version=version, num_turns=self._options.max_turns
        )

    def _count(self, taken: Taken, version: int) -> list[float]:
        """In the order of COUNTED."""
        counts = self._client.counts()
        since = {name: counts[name] - self._counted[name] for name in counts}
        self._counted = counts
        failed = self._failures.since_last()
        self._failed = [failed["ended"], *(failed[f"failed_{cause}"] for cause in CAUSES), failed["replaced"]]
        experts = None if self._replay is None else self._replay.shape.experts
        own = count_samples(taken, version, experts)
        return [float((since | own | failed)[name]) for name in COUNTED]


def check_vocabulary(prompts: PromptDataset, flag: str, vocab_size: int) -> None:
    """ValueError for an id that the model does not have, which would be refused when its turn comes, steps later."""
    for prompt in prompts.prompts:
        largest = max(prompt.input_ids)
        if largest >= vocab_size:
            raise ValueError(
                f"{flag}: row {prompt.index} has token id {largest}; ids must be in [0, {vocab_size}), the vocabulary "
                "of --rollout-hf-checkpoint: were the prompts tokenised for this model?"
            )


def check_they_fit(prompts: PromptDataset, flag: str, max_new_tokens: int, length: int) -> None:
    """ValueError unless the longest prompt and a longest response are a row."""
    longest = max(len(prompt.input_ids) for prompt in prompts.prompts)
    needed = longest + max_new_tokens - 1
    if needed > length:
        raise ValueError(
            f"--seq-length {length} is too short for the longest prompt of {flag}, {longest} tokens, and "
            f"--rollout-max-new-tokens {max_new_tokens}; use --seq-length {needed} or more"
        )

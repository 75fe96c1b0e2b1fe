"""Samples of one batch: the leader of each data-parallel replica asks the servers; the replica receives."""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.mcore.batch import BatchShape, RolloutBatch, broadcast_to_replica
from megatron_rl_corr.mcore.collect_metrics import COUNTED, collection_metrics, count_samples
from megatron_rl_corr.mcore.deal import Scored, all_gather_dealt
from megatron_rl_corr.mcore.packed_batch import PackedBatch, broadcast_lengths, sequence_multiple
from megatron_rl_corr.mcore.prompt_checks import check_they_fit, check_vocabulary
from megatron_rl_corr.mcore.sampling_masks import Part, cut_sampling_masks, scatter_sampling_masks
from megatron_rl_corr.moe.routes import Routes
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
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream, Taken

PROGRESS_EVERY_S = 10.0
"""Interval of a leader's messages about a slow collection."""


@dataclass(frozen=True)
class SampleSource:
    """Where samples come from."""

    client: RolloutClient
    loop: LoopThread
    """Runs the client's coroutines."""
    prompts: PromptDataset
    rewards: Rewards
    episodes: Episodes | None = None
    """With --rollout-environment."""
    tokenizer: Tokenizer | None = None
    """The model's; None where --rollout-hf-checkpoint has none."""


class Collector:
    """Collects the batches [first, last): on each replica's leader from the servers, on others from it."""

    def __init__(
        self, options: RunConfig, layout: Layout, shape: BatchShape, source: SampleSource, *,
        batches: tuple[int, int], saved: SavedCursor | None = None, routes: Routes | None = None,
    ):
        """batches: first and last. saved: the cursor of a checkpoint. routes: take the samples' routed experts.

        Raises ValueError for a batch that can't be dealt out, and for prompts that do not fit.
        """
        self._rows = shape.rows(layout.dp_size)
        client, prompts = source.client, source.prompts
        check_they_fit(prompts, "--rollout-prompts", options.max_new_tokens, shape.seq_length)
        check_vocabulary(prompts, "--rollout-prompts", client.vocab_size)
        self._options, self._layout, self._length = options, layout, shape.seq_length
        self._packing = shape.packing
        self._scored: list[Scored] | None = None
        """To be packed: on a data leader its samples of the batch and their rewards, until they are dealt out."""
        self._client, self._loop, self._rewards = client, source.loop, source.rewards
        self._groups = self._rows // shape.group_size
        self.sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p,
            top_k=options.top_k,
        )
        client.engine.check_sampling(self.sampling)
        self._failures = Failures(options.max_failed_fraction, warn)
        self._failed_fraction = FailedFraction(options.max_failed_fraction)
        self._prompts = prompts
        # Without failures, a batch's groups are those of one slice of the sequence.
        first = batches[0] * shape.collected // shape.group_size
        cursor = Cursor(first) if saved is None else saved.cursor_of(prompts)
        self._failed_prompts = FailedPrompts(len(prompts)) if saved is None else saved.failed_of(prompts)
        self._sampler = sampler = GroupSampler(
            client, prompts, GroupNumbers(cursor, layout.dp_rank, layout.dp_size), self.sampling,
            group_size=shape.group_size, rewards=source.rewards, failures=self._failures,
            failed_prompts=self._failed_prompts, on_failed=options.on_failed_reward, episodes=source.episodes,
        )
        self._stream = GroupStream(
            sampler.sample, sampler.draw, groups_per_step=self._groups, first=batches[0], last=batches[1],
            max_lag=options.max_lag, drop_stale=options.stale_samples == "drop",
        )
        self._counted = client.counts()
        self._failed = [0.0] * (len(CAUSES) + 2)
        """Since the previous batch: samples that ended, those that failed, by cause, and groups that were replaced."""
        self._routes = Routes() if routes is None else routes
        self.device = communication_device()
        self.trajectories: list[Trajectory] = []
        """The last batch's samples of this replica, on its data leader."""
        self._sampling_masks: list[Part] | None = None
        """The ids that their tokens were drawn from, until they are sent."""
        self.metrics: dict[str, Metric] = {}
        """Metrics of how the last batch was collected, this replica's share."""

    def collect(self, number: int) -> RolloutBatch | PackedBatch:
        """This rank's share of a batch; every rank calls it. number: also the version of the trainer's weights."""
        batch, counted = self._all_reduce_taken(number)
        self._all_reduce_failed()
        if self._packing is not None:
            batch, counted[COUNTED.index("moved_bytes")] = self._all_reduce_dealt(number)
        counted = counted.to(self.device)
        broadcast_to_replica([counted], self._layout)
        # Of the ranks that share a replica's rows, one contributes what is counted once.
        self.metrics = collection_metrics(
            counted if self._layout.cp_group.rank() == 0 else torch.zeros_like(counted),
            with_routes=self._routes.server_shape is not None, packed=self._packing is not None,
        )
        whole = self._broadcast(batch)
        own = whole.context_slice(self._layout.cp_group.rank(), self._layout.cp_group.size())
        if self.sampling.truncated:
            parts, self._sampling_masks = self._sampling_masks, None
            masks = scatter_sampling_masks(parts, own.tokens.numel(), layout=self._layout)
            own = replace(own, sampling_masks=masks)
        experts = [sample.routed_experts for sample in self.trajectories] if self._layout.is_data_leader else None
        self._routes.scatter(experts, whole.cu_seqlens.tolist())
        return own

    def all_gather_cursor(self, batches: int, *, with_last: bool) -> SavedCursor | None:
        """The place of all replicas in the prompts, on rank 0; every rank calls it, while no batch is collected.

        Args:
            batches: that the run has trained.
            with_last: no update was made with the last one, so its prompts are to be drawn again.
        """

        async def drawn() -> Drawn:
            return self._sampler.drawn(self._stream.untrained(with_taken=with_last))

        own = (self._layout.dp_rank, self._loop.call(drawn())) if self._layout.is_data_leader else None
        group = self._layout.dp_cp_group
        gathered: list[tuple[int, Drawn] | None] = [None] * group.size()
        dist.all_gather_object(gathered, own, group=group)
        if dist.get_rank() != 0:
            return None
        replicas = [replica for _, replica in sorted(one for one in gathered if one is not None)]
        return SavedCursor.of(Cursor.merged(replicas), self._prompts, self._failed_prompts, batches)

    def close(self) -> None:
        """Stop sampling ahead, and the processes that compute rewards."""
        self._loop.call(self._stream.close())
        self._loop.call(self._rewards.close())

    def _all_reduce_failed(self) -> None:
        """Sum all replicas' failures since the previous batch; too many end the run on all ranks."""
        sums = torch.tensor(self._failed, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        *judged, replaced = sums.tolist()
        exceeded = self._failed_fraction.exceeded(judged)
        if exceeded is not None:  # the first rank that has seen a failure raises
            all_reduce_failure(self._failures.too_many(*exceeded) if self._failures.texts else None)
        if replaced:
            self._all_gather_failed_prompts()

    def _all_gather_failed_prompts(self) -> None:
        """Leaders learn which prompts failed on other replicas: each epoch deals a prompt to another replica."""
        group = self._layout.dp_cp_group
        dropped: list[list[tuple[int, int]]] = [[]] * group.size()
        dist.all_gather_object(dropped, self._failures.take_dropped(), group=group)
        for row, number in sorted(pair for pairs in dropped for pair in pairs):
            if self._failed_prompts.add(row, number) and dist.get_rank() == 0:
                warn(f"row {row} of --rollout-prompts is left out for an epoch: its groups failed {NAMED_AFTER} times")

    def _broadcast(self, batch: RolloutBatch | PackedBatch | None) -> RolloutBatch | PackedBatch:
        """The leader's batch (None on others) on every rank of its replica."""
        if self._packing is not None:
            multiple = sequence_multiple(self._layout.cp_size)
            batch = broadcast_lengths(batch, self._rows, self._layout, multiple=multiple)
        elif batch is None:
            batch = RolloutBatch.empty(self._rows, self._length)
        whole = batch.broadcast(self._layout, num_turns=self._options.max_turns)
        if self._packing is None or self._layout.dp_size == 1:
            return whole
        return replace(whole, parted_groups=self._groups * self._layout.dp_size)

    def _all_reduce_dealt(self, version: int) -> tuple[PackedBatch | None, int]:
        """The batch of the samples that this replica trains, and the bytes that its leader sent; (None, 0) on others.

        Samples are dealt out over replicas by what they cost. Every rank calls it.

        Raises:
            ValueError: as `PackedBatch.from_trajectories` and `cut_sampling_masks`, on one rank.
            PeerFailure: then, on the other ranks.
        """
        layout, batch, error = self._layout, None, None
        (scored, self._scored), sent = (self._scored, None), 0
        if layout.pp_rank == 0 and layout.tp_group.rank() == 0:
            scored, sent = all_gather_dealt(scored, self._rows, self._packing, layout)
        if scored is not None:
            self.trajectories = [sample for sample, _ in scored]
            try:
                batch = PackedBatch.from_trajectories(
                    self.trajectories, torch.tensor([reward for _, reward in scored], dtype=torch.float32),
                    length=self._length, version=version, multiple=sequence_multiple(layout.cp_size),
                    num_turns=self._options.max_turns,
                )
                if self.sampling.truncated:
                    self._sampling_masks = cut_sampling_masks(self.trajectories, batch.cu_seqlens, layout.cp_size)
            except ValueError as failure:
                error = failure
        all_reduce_failure(error)
        return batch, sent

    def _all_reduce_taken(self, step: int) -> tuple[RolloutBatch | None, torch.Tensor]:
        """A leader's batch and its counts, None and zeros on other ranks; returns when every leader has its own.

        All ranks meet at least every MEETING_INTERVAL_S, however long the slowest leader waits for its samples.
        """
        taking = self._loop.submit(self._stream.take(step)) if self._layout.is_data_leader else None
        since = time.monotonic(), self._client.counts()["tokens"]

        def read(taken: Taken) -> tuple[RolloutBatch | None, torch.Tensor]:
            batch = None if self._packing else self._batch(taken, step)
            if self._packing is not None:
                self._scored = self._numbered(taken, self._layout.dp_rank * self._groups)
            elif self.sampling.truncated:
                self._sampling_masks = cut_sampling_masks(self.trajectories, batch.cu_seqlens, self._layout.cp_size)
            return batch, torch.tensor(self._count(taken, step), dtype=torch.float64)

        own = all_reduce_results(taking, read, lambda taking: self._has_arrived(taking, step, since))
        return (None, torch.zeros(len(COUNTED), dtype=torch.float64)) if own is None else own

    def _has_arrived(self, taking: concurrent.futures.Future, batch: int, since: tuple[float, float]) -> bool:
        """Whether the samples arrive within MEETING_INTERVAL_S; progress is printed every PROGRESS_EVERY_S.

        since: when the wait began, and the tokens that had been sampled by then.
        """
        end = time.monotonic() + MEETING_INTERVAL_S
        while time.monotonic() < end:
            if concurrent.futures.wait([taking], PROGRESS_EVERY_S).done:
                return True
            speed = (self._client.counts()["tokens"] - since[1]) / (time.monotonic() - since[0])
            print(f"[rollout] batch {batch + 1}: {self._stream.ready} of {self._groups} groups are done, "
                  f"{self._stream.running} are running, {speed:.0f} tokens/s", flush=True)  # fmt: skip
        return False

    def _batch(self, taken: Taken, version: int) -> RolloutBatch:
        scored = self._numbered(taken)
        self.trajectories = [trajectory for trajectory, _ in scored]
        rewards = torch.tensor([reward for _, reward in scored], dtype=torch.float32)
        return RolloutBatch.from_trajectories(
            self.trajectories, rewards, length=self._length, version=version, num_turns=self._options.max_turns
        )

    @staticmethod
    def _numbered(taken: Taken, first: int = 0) -> list[Scored]:
        """The samples and their rewards; prompts are numbered from `first`."""
        return [
            (replace(trajectory, prompt_index=place), reward)
            for place, group in enumerate(taken.groups, first)
            for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
        ]

    def _count(self, taken: Taken, version: int) -> list[float]:
        """Values in the order of COUNTED."""
        counts = self._client.counts()
        since = {name: counts[name] - self._counted[name] for name in counts}
        self._counted = counts
        failed = self._failures.since_last()
        self._failed = [failed["ended"], *(failed[f"failed_{cause}"] for cause in CAUSES), failed["replaced"]]
        shape = self._routes.server_shape
        experts = None if shape is None else shape.experts
        own = count_samples(taken, version, experts)
        return [float((since | own | failed)[name]) for name in COUNTED]

"""A batch made of the groups that a replica's leader takes: dealt out, packed or padded,
sent to its replica.
"""

from __future__ import annotations

import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, collection_metrics
from megatron_rl_corr.mcore.batch.deal import Rewarded, deal_out
from megatron_rl_corr.mcore.batch.packing import check_packed_branches
from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.batch.reward_parts import RewardParts
from megatron_rl_corr.mcore.batch.rollout_batch import AgentBranches, BatchShape, RolloutBatch
from megatron_rl_corr.mcore.batch.sampling_masks import Part, cut_sampling_masks, scatter_sampling_masks
from megatron_rl_corr.mcore.batch.slices import share_batch
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    MeetingTurns,
    all_reduce_failure,
    all_reduce_results,
    communication_device,
)
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric
from megatron_rl_corr.rollout.cursor import SavedCursor
from megatron_rl_corr.rollout.queue import Group, Taken
from megatron_rl_corr.rollout.sample_file import Origin
from megatron_rl_corr.rollout.trace import GroupTrace, clock


class BatchCollector(ABC):
    """Makes each step's batch of the groups that the replicas' leaders take, wherever these come from.

    Args:
        layout: this rank's process groups.
        shape: sizes of a batch.
        sampling: parameters that all samples were drawn with.
        num_turns: the largest number of turns of a sample; None without an environment.
        truncated_samples: train, mask or drop, what becomes of samples that were cut: drop is done already.
        routes: take the samples' routed experts.
        by_lag: samples may be of older weights, and metrics are parted by how old.
        agent_branches: what means in the loss take as one, where a sample may have several sequences; None:
            each sample is one sequence.

    Raises:
        ValueError: a batch that can't be dealt out over the replicas, or samples of several sequences in
            padded rows.
    """

    def __init__(
        self,
        layout: Layout,
        shape: BatchShape,
        sampling: SamplingParams,
        *,
        num_turns: int | None,
        truncated_samples: str,
        routes: Routes | None,
        by_lag: bool = False,
        agent_branches: AgentBranches | None = None,
    ):
        self._num_samples = shape.rows(layout.dp_size)
        if agent_branches is not None:
            check_packed_branches(shape.packing)
        self._layout, self._shape, self.agent_branches = layout, shape, agent_branches
        self._groups = self._num_samples // shape.group_size
        self._num_turns = num_turns
        self.by_lag = by_lag
        self._truncated_samples, self._mask_truncated = truncated_samples, truncated_samples == "mask"
        self._scored: list[Rewarded] | None = None
        """On a data leader the batch's sequences and their rewards, until they are dealt out."""
        self._routes = Routes() if routes is None else routes
        self.sampling = replace(sampling, keys=self._routes.key_shape)
        self.device = communication_device()
        self.trajectories: list[Trajectory] = []
        """The last batch's sequences of this replica, on its data leader."""
        self._aside: list[Trajectory] = []
        """On a data leader samples that are measured and not trained, until they are taken."""
        self.traces: list[GroupTrace] = []
        """The times of the last batch's groups, on its data leader; empty where nobody asks."""
        self.taken_at: float | None = None
        """When they were taken."""
        self._parts = RewardParts()
        self._new_parts = 0
        """Names of parts in the last batch of this leader that not all ranks know."""
        self.reward_parts: list[dict[str, float] | None] = []
        """The named rewards of each of these; None where its reward has no parts."""
        self.origins: list[Origin | None] = []
        """Where each of these comes from; None where nobody asks."""
        self._sampling_masks: list[Part] | None = None
        """The ids that their tokens were drawn from, until they are sent."""
        self.turns: MeetingTurns | None = None
        """What all ranks do while they wait for groups, where something asks for it."""
        self.metrics: dict[str, Metric] = {}
        """Metrics of how the last batch was collected, this replica's share."""
        self.filtered = self.oversampled = False
        """Groups are filtered; more are sampled than steps take. Either has metrics of its own."""

    @property
    def _multiple(self) -> int:
        """Each sequence is padded to one."""
        return self._shape.sequence_multiple(self._layout.cp_size)

    @property
    def engines(self) -> tuple[str, ...]:
        """What `Trajectory.engine` may be, the same on all ranks, where servers run several
        engines; else ().
        """
        return ()

    def waiting(self) -> dict[str, int]:
        """Groups that no step has taken yet, by what they wait for; from any thread. {} where
        none are sampled.
        """
        return {}

    @abstractmethod
    def _submit_take(self, number: int) -> concurrent.futures.Future[Taken]:
        """Begin to take this leader's groups of a batch."""

    @abstractmethod
    def _has_arrived(self, taking: concurrent.futures.Future, batch: int, since: float) -> bool:
        """True if the groups arrive within `meeting_interval_s`. since: when the wait began."""

    @abstractmethod
    def _count(self, taken: Taken, version: int) -> list[float]:
        """Values in the order of COUNTED."""

    @abstractmethod
    def _origin(self, group: Group) -> Origin | None:
        """Where the samples of a group come from; None where nobody asks."""

    @abstractmethod
    @collective
    def cursor_of_all_replicas(self, batches: int, *, with_last: bool) -> SavedCursor | None:
        """What a checkpoint keeps of the place in the prompts, on rank 0; every rank calls it."""

    @abstractmethod
    def close(self) -> None:
        """Stop what gives samples."""

    @abstractmethod
    @collective
    def _share_failures(self) -> None:
        """Look at what failed since the previous batch, and at names of rewards that are new;
        every rank calls it.
        """

    @collective
    def collect(self, number: int) -> RolloutBatch:
        """This rank's share of a batch; every rank calls it. number: also the version of the
        trainer's weights.
        """
        counted = self._take_groups(number)
        self._share_failures()
        batch, counted[COUNTED.index("moved_bytes")] = self._deal_and_lay_out(number)
        sequences = self._num_samples
        sizes = [] if self.agent_branches is None else [0 if batch is None else batch.num_sequences]
        counted = torch.cat([counted, self._parts.counts(), counted.new_tensor(sizes)]).to(self.device)
        broadcast_to_replica([counted], self._layout)
        if sizes:
            counted, sequences = counted[:-1], int(counted[-1])
        # Of the ranks that share a replica's rows, one contributes what is counted once.
        counted = counted if self._layout.cp_group.rank() == 0 else torch.zeros_like(counted)
        values, parts = counted.split([len(COUNTED), len(counted) - len(COUNTED)])
        self.metrics = self._parts.metrics(parts) | collection_metrics(
            values,
            with_routes=self._routes.server_shape is not None,
            packed=self._shape.packing is not None,
            filtered=self.filtered,
            oversampled=self.oversampled,
            truncated_samples=self._truncated_samples,
        )
        own = self._share(batch, sequences, self.agent_branches, self.sampling.top_logprobs)
        del batch  # the leader's, whole
        if self._shape.packing is not None and self._layout.dp_size > 1:
            own = replace(own, parted_groups=self._groups * self._layout.dp_size)
        if not self.by_lag:
            own = replace(own, token_lags=None)
        if self.engines:
            own = replace(own, engine_ids=self._share_engine_ids(sequences), engines=self.engines)
        parts, self._sampling_masks = self._sampling_masks, None
        own = self._with_masks(own, parts)
        experts = (
            [sample.routed_experts for sample in self.trajectories] if self._layout.is_data_leader else None
        )
        self._routes.scatter(experts, own.cu_seqlens.tolist())
        keys = [sample.indexer_keys for sample in self.trajectories] if self._layout.is_data_leader else None
        self._routes.scatter_keys(keys, own.cu_seqlens.tolist())
        return own

    def take_aside(self) -> list[Trajectory]:
        """On a data leader the samples that are measured and not trained, once; [] on others."""
        aside, self._aside = self._aside, []
        return aside

    @collective
    def lay_out_others(
        self, samples: Sequence[Trajectory], count: int, version: int
    ) -> tuple[RolloutBatch, list[int]]:
        """This rank's share of other samples, and where each begins in the whole; every rank calls it.

        Args:
            samples: of this replica, on its data leader; not used on others.
            count: so many on each replica.
            version: of the trainer's weights.

        Raises:
            ValueError: as `RolloutBatch.from_trajectories` and `cut_sampling_masks`, on one rank.
            PeerFailure: then, on the other ranks.
        """
        layout, batch, masks, error = self._layout, None, None, None
        if layout.is_data_leader:
            given = {"length": self._shape.seq_length, "version": version, "num_turns": self._num_turns}
            try:
                batch = RolloutBatch.from_trajectories(
                    samples, torch.zeros(count), multiple=self._multiple, **given
                )
                if self.sampling.truncated:
                    masks = cut_sampling_masks(samples, batch.cu_seqlens, layout.cp_size)
            except ValueError as failure:
                error = failure
        all_reduce_failure(error)
        own = self._share(batch, count)
        return self._with_masks(own, masks), own.cu_seqlens.tolist()

    @collective
    def _with_masks(self, own: RolloutBatch, parts: list | None) -> RolloutBatch:
        """This rank's share of a batch with its part of the sampling masks, which the leader has cut."""
        if not self.sampling.truncated:
            return own
        masks = scatter_sampling_masks(parts, own.num_tokens, layout=self._layout)
        return replace(own, sampling_masks=masks)

    @collective
    def _share_engine_ids(self, sequences: int) -> torch.Tensor:
        """Which of `engines` each of the batch's sequences came from, [S] int64 on every
        rank of its replica.
        """
        ids = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        if self._layout.is_data_leader:
            ids = torch.tensor(
                [self.engines.index(one.engine) for one in self.trajectories], device=self.device
            )
        broadcast_to_replica([ids], self._layout)
        return ids

    @collective
    def _share(
        self,
        batch: RolloutBatch | None,
        sequences: int,
        means_of: AgentBranches | None = None,
        top_logprobs: int = 0,
    ) -> RolloutBatch:
        """This rank's share of the leader's batch (None on others) of so many sequences."""
        how = {"multiple": self._multiple, "num_turns": self._num_turns, "means_of": means_of}
        return share_batch(batch, sequences, self._layout, **how, top_logprobs=top_logprobs)

    @collective
    def _deal_and_lay_out(self, version: int) -> tuple[RolloutBatch | None, int]:
        """The batch of the samples that this replica trains, and the bytes that its leader sent;
        (None, 0) on others.

        To be packed, samples are dealt out over replicas by what they cost; rows cost the same. Every rank
        calls it.

        Raises:
            ValueError: as `RolloutBatch.from_trajectories` and `cut_sampling_masks`, on one rank.
            PeerFailure: then, on the other ranks.
        """
        layout, batch, error = self._layout, None, None
        (scored, self._scored), sent = (self._scored, None), 0
        if self._shape.packing is not None and layout.pp_rank == 0 and layout.tp_group.rank() == 0:
            several = self.agent_branches is not None
            scored, sent = deal_out(
                scored, self._num_samples, self._shape.packing, layout, with_episodes=several
            )
        if scored is not None:
            try:
                batch = RolloutBatch.from_trajectories(
                    *self._kept(scored),
                    length=self._shape.seq_length,
                    version=version,
                    multiple=self._multiple,
                    num_turns=self._num_turns,
                    mask_truncated=self._mask_truncated,
                    with_episodes=self.agent_branches is not None,
                    top_logprobs=self.sampling.top_logprobs,
                )
                if self.sampling.truncated:
                    self._sampling_masks = cut_sampling_masks(
                        self.trajectories, batch.cu_seqlens, layout.cp_size
                    )
            except Exception as failure:  # noqa: BLE001  raised on all ranks, whatever it is
                error = failure
        all_reduce_failure(error)
        return batch, sent

    @collective
    def _take_groups(self, number: int) -> torch.Tensor:
        """What a leader counts of the groups that it took, zeros on other ranks; returns when every
        leader has its own.

        All ranks meet at least every `meeting_interval_s`, however long the slowest leader waits
        for its samples.
        """
        taking = self._submit_take(number) if self._layout.is_data_leader else None
        since = time.monotonic()

        def read(taken: Taken) -> torch.Tensor:
            self.traces = [group.trace for group in taken.groups if group.trace is not None]
            self.taken_at, self._aside = clock(), taken.aside
            # Numbers of prompts are those of the step where a prompt's samples may go to several replicas.
            first = 0 if self._shape.packing is None else self._layout.dp_rank * self._groups
            self._scored = self._numbered(taken, first)
            self._new_parts = self._parts.count(
                parts or {} for group in taken.groups for parts in group.episode_parts
            )
            return torch.tensor(self._count(taken, number), dtype=torch.float64)

        counted = all_reduce_results(
            taking, read, lambda taking: self._has_arrived(taking, number, since), self.turns
        )
        return torch.zeros(len(COUNTED), dtype=torch.float64) if counted is None else counted

    def _kept(self, scored: list[Rewarded]) -> tuple[list[Trajectory], torch.Tensor]:
        """The batch's trajectories, which are remembered with what is known of them, and
        rewards [S] float32.
        """
        self.trajectories = [one.trajectory for one in scored]
        self.reward_parts, self.origins = [one.parts for one in scored], [one.origin for one in scored]
        return self.trajectories, torch.tensor([one.reward for one in scored], dtype=torch.float32)

    def _numbered(self, taken: Taken, first: int) -> list[Rewarded]:
        """The samples and their rewards; prompts are numbered from `first`."""
        return [
            Rewarded(replace(trajectory, prompt_index=place), reward, parts, origin)
            for place, group in enumerate(taken.groups, first)
            for origin in [self._origin(group)]
            for trajectory, reward, parts in zip(
                group.trajectories,
                group.rewards,
                group.reward_parts or [None] * len(group.rewards),
                strict=True,
            )
        ]

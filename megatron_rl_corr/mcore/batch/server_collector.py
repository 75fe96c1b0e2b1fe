"""Samples of one batch: the leader of each data-parallel replica asks the servers; the replica receives."""

from __future__ import annotations

import concurrent.futures
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, count_samples
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.rollout_batch import AgentBranches, BatchShape
from megatron_rl_corr.mcore.checkpoint_groups import SavedGroups
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_failure, meeting_interval_s
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, GroupNumbers, SavedCursor
from megatron_rl_corr.rollout.episodes import SampleMaker
from megatron_rl_corr.rollout.failures import CAUSES, NAMED_AFTER, FailedFraction, FailedPrompts, Failures
from megatron_rl_corr.rollout.group_filter import GroupFilter, chosen_sample
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.groups import StreamState
from megatron_rl_corr.rollout.queue import Group, GroupStream, Selection, Taken
from megatron_rl_corr.rollout.sample_file import Origin
from megatron_rl_corr.rollout.sampling import training_sampling
from megatron_rl_corr.rollout.waiting_groups import OpenGroups

PROGRESS_EVERY_S = 10.0
"""Interval of a leader's messages about a slow collection."""


@dataclass(frozen=True)
class SampleSource:
    """Where samples come from."""

    client: RolloutClient
    loop: LoopThread
    """Runs the client's coroutines."""
    prompts: PromptDataset | None
    """None on ranks that draw none."""
    rewards: Rewards
    episodes: SampleMaker | None = None
    """What makes samples of prompts; None: each is one response."""
    tokenizer: Tokenizer | None = None
    """The model's; None where --rollout-hf-checkpoint has none."""

    @property
    def agent_branches(self) -> AgentBranches | None:
        """What means in the loss take as one, where its episodes may give several sequences; None: each gives
        one.
        """
        return None if self.episodes is None else self.episodes.agent_branches


class Collector(BatchCollector):
    """Collects the batches [first, last): on each replica's leader from the servers, on others from it."""

    def __init__(
        self,
        options: RunConfig,
        layout: Layout,
        shape: BatchShape,
        source: SampleSource,
        *,
        batches: tuple[int, int],
        saved: SavedCursor | None = None,
        restored: SavedGroups | None = None,
        routes: Routes | None = None,
        traces: bool = False,
        origins: bool = False,
        aside: int = 0,
    ):
        """batches: first and last. saved: the cursor of a checkpoint. restored: the groups
            that it holds. routes: take the
        samples' routed experts. traces: note when each sample was made. origins:
        know which row each is of. aside: samples that a leader keeps a step of groups that do not pass.

        Raises ValueError for a batch that can't be dealt out.
        """
        super().__init__(
            layout,
            shape,
            training_sampling(options),
            num_turns=options.most_turns,
            truncated_samples=options.truncated_samples,
            routes=routes,
            by_lag=options.max_lag > 0,
            agent_branches=source.agent_branches,
        )
        client, prompts, self._with_origins = source.client, source.prompts, origins
        self._first, self._max_lag = batches[0], options.max_lag
        source.rewards.check_labels(prompts, "--rollout-prompts")
        self._client, self._loop, self._rewards = client, source.loop, source.rewards
        client.check_sampling(self.sampling)
        self._failures = Failures(options.max_failed_fraction, warn)
        self._failed_fraction = FailedFraction(options.max_failed_fraction)
        if saved is not None:  # on every rank, as all judge it
            self._failed_fraction.restore(saved.failed_batches)
        self._prompts, own = prompts, None
        # Without failures, a batch's groups are those of one slice of the sequence.
        first = batches[0] * shape.collected // shape.group_size
        cursor, self._failed_prompts = Cursor(first), FailedPrompts(1 if prompts is None else len(prompts))
        if saved is not None and prompts is not None:
            cursor, self._failed_prompts = saved.cursor_of(prompts), saved.failed_of(prompts)
            own = saved.own_of(prompts, layout.dp_rank, layout.dp_size)
            if own is None and restored is not None:
                own = saved.dealt_of(prompts, layout.dp_rank, layout.dp_size)
            if layout.dp_rank == 0 and (difference := saved.difference(prompts)):
                warn(
                    f"--rollout-prompts are not those of the checkpoint: {difference}; they go on at place "
                    f"{saved.next}, and {len(saved.again)} drawn and not trained are not drawn again"
                )
                EVENTS.tell("groups_forgotten", difference, groups=list(saved.again))
        ready, begun = self._read(restored, own, batches[0], options.max_lag)
        there = {group.number for group in ready}
        drawn = own and replace(own, waiting=tuple(n for n in own.waiting if n not in there))
        self._sampler = sampler = GroupSampler(
            client,
            prompts,
            GroupNumbers(cursor, layout.dp_rank, layout.dp_size, drawn),
            self.sampling,
            group_size=shape.group_size,
            rewards=source.rewards,
            failures=self._failures,
            failed_prompts=self._failed_prompts,
            on_failed=options.on_failed_reward,
            episodes=source.episodes,
            drop_truncated=options.truncated_samples == "drop",
            traces=traces,
            begun=begun,
        )
        self._filter, self.oversampled = None, options.oversampling > 1
        if options.group_filter is not None:
            self.filtered = True
            self._filter = GroupFilter(options.group_filter, prompts, self._failures)
        self._stream = GroupStream(
            sampler.sample,
            sampler.draw,
            groups_per_step=self._groups,
            first=batches[0],
            last=batches[1],
            max_lag=options.max_lag,
            drop_stale=options.stale_samples == "drop",
            selection=self._selection(options, aside),
            resumed=None if own is None else StreamState.resumed(own.waiting, own.counts),
            ready=ready,
        )
        self._saves_waiting, self._open = options.save_waiting_gib > 0, OpenGroups()
        if own is not None:
            self._failures.restore(own.counts.get("failures", {}))
            if self._filter is not None:
                self._filter.failed_in_a_row = own.counts.get("unjudged_in_a_row", 0)
        self._counted = client.counts()
        self._failed = [0.0] * (len(CAUSES) + 2)
        """Since the previous batch: samples that ended, those that failed, by cause, and groups
        that were replaced.
        """

    @collective
    def cursor_of_all_replicas(self, batches: int, *, with_last: bool) -> SavedCursor | None:
        """The place of all replicas in the prompts, on rank 0; every rank calls it, while no
        batch is collected.

        Args:
            batches: that the run has trained.
            with_last: no update was made with the last one, so its prompts are to be drawn again.
        """

        async def drawn() -> Drawn:
            state = self._stream.state(with_taken=with_last)
            counts = state.counts() | {"failures": self._failures.state()}
            if self._filter is not None:
                counts["unjudged_in_a_row"] = self._filter.failed_in_a_row
            place = self._sampler.drawn(state.running, waiting=state.waiting, again=state.again)
            if self._saves_waiting:  # taken with the place, on the loop that alone changes them
                # a run that loads them does not know that they were to begin late
                self._forget_older(batches)
                begun = self._sampler.begun({*place.running, *place.again})
                waiting = self._stream.waiting(with_taken=with_last)
                self._open = OpenGroups(waiting, begun, self._groups)
            return replace(place, counts=counts)

        own = (self._layout.dp_rank, self._loop.call(drawn())) if self._layout.is_data_leader else None
        group = self._layout.dp_cp_group
        gathered: list[tuple[int, Drawn] | None] = [None] * group.size()
        dist.all_gather_object(gathered, own, group=group)
        if dist.get_rank() != 0:
            return None
        replicas = [replica for _, replica in sorted(one for one in gathered if one is not None)]
        return SavedCursor.of(
            replicas, self._prompts, self._failed_prompts, batches, self._failed_fraction.state()
        )

    def take_open(self) -> OpenGroups:
        """On a data leader what was sampled and not trained when the last cursor was asked for, once."""
        open_, self._open = self._open, OpenGroups()
        return open_

    def close(self) -> None:
        """Stop sampling ahead, and the processes that compute rewards."""
        self._loop.call(self._stream.close())
        self._loop.call(self._rewards.close())
        if self._filter is not None:
            self._loop.call(self._filter.close())

    def _read(
        self, restored: SavedGroups | None, own: Drawn | None, version: int, max_lag: int
    ) -> tuple[list[Group], dict[int, BegunGroup]]:
        """The groups of a checkpoint that this leader's steps take first, and what it has of others."""
        if restored is None or own is None or not self._layout.is_data_leader:
            return [], {}
        longest = self._shape.seq_length + 1  # the last token is a label only
        usable = {"version": version, "max_lag": max_lag, "longest": longest}
        begun = restored.read_begun((*own.running, *own.again), **usable)
        return restored.read(own.waiting, **usable, per_step=self._groups), begun

    def _selection(self, options: RunConfig, aside: int) -> Selection:
        """Which groups the stream's steps take."""
        if self._filter is None:
            return Selection(oversampling=options.oversampling)
        refills = options.group_filter_exhausted == "take"
        longest = self._shape.seq_length + 1  # the last token is a label only

        def choose(group: Group) -> Trajectory | None:
            return chosen_sample(group.trajectories, group.number, longest)

        return Selection(
            self._filter.passes, options.group_filter_limit, refills, options.oversampling, aside, choose
        )

    @collective
    def _share_failures(self) -> None:
        """Sum all replicas' failures since the previous batch; too many end the run on all ranks.

        So all ranks also learn whether a leader has new names of rewards.
        """
        knows = bool(self._failures.texts)
        sums = torch.tensor([*self._failed, knows, self._new_parts], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        *judged, replaced, knowing, new_parts = sums.tolist()
        exceeded = self._failed_fraction.exceeded(judged)
        # the first rank that has seen a failure raises; none has, if all are a checkpoint's
        if exceeded is not None:
            raises = knows or (not knowing and dist.get_rank() == 0)
            all_reduce_failure(self._failures.too_many(*exceeded) if raises else None)
        if replaced:
            self._share_failed_prompts()
        if new_parts:
            self._parts.share_names()

    @collective
    def _share_failed_prompts(self) -> None:
        """Leaders learn which prompts failed on other replicas: each epoch deals a prompt to
        another replica.
        """
        group = self._layout.dp_cp_group
        dropped: list[list[tuple[int, int]]] = [[]] * group.size()
        dist.all_gather_object(dropped, self._failures.take_dropped(), group=group)
        for row, number in sorted(pair for pairs in dropped for pair in pairs):
            if self._failed_prompts.add(row, number) and dist.get_rank() == 0:
                why = f"its groups failed {NAMED_AFTER} times"
                warn(f"row {row} of --rollout-prompts is left out for an epoch: {why}")
                EVENTS.tell("prompt_left_out", why, row=row, last_epoch=self._failed_prompts.left_out[row])

    def waiting(self) -> dict[str, int]:
        return {"running": self._stream.running, "ready": self._stream.ready}

    @property
    def engines(self) -> tuple[str, ...]:
        names = sorted(self._client.fleet.engines)
        return (*names, "+".join(names)) if len(names) > 1 else ()

    def _submit_take(self, number: int) -> concurrent.futures.Future[Taken]:
        self._tokens_before, self._told_at = self._client.counts()["tokens"], time.monotonic()
        return self._loop.submit(self._take(number))

    async def _take(self, number: int) -> Taken:
        self._forget_older(number)
        return await self._stream.take(number)

    def _forget_older(self, version: int) -> None:
        """Leave out what can't begin any more at this version; what the first step begins was judged when it
        was read.
        """
        if version > self._first:
            self._sampler.forget_older(version - self._max_lag)

    def _has_arrived(self, taking: concurrent.futures.Future, batch: int, since: float) -> bool:
        """Progress is printed every PROGRESS_EVERY_S."""
        end = time.monotonic() + meeting_interval_s(self.turns)
        while (left := end - time.monotonic()) > 0:
            if concurrent.futures.wait([taking], min(left, PROGRESS_EVERY_S)).done:
                return True
            if time.monotonic() - self._told_at < PROGRESS_EVERY_S:
                continue
            self._told_at = time.monotonic()
            speed = (self._client.counts()["tokens"] - self._tokens_before) / (time.monotonic() - since)
            filtered = f", {self._stream.filtered} did not pass" if self._filter is not None else ""
            print(
                f"[rollout] batch {batch + 1}: {self._stream.ready} of {self._groups} groups are "
                f"done{filtered}, {self._stream.running} are running, {speed:.0f} tokens/s",
                flush=True,
            )
        return False

    def _count(self, taken: Taken, version: int) -> list[float]:
        """Values in the order of COUNTED."""
        counts = self._client.counts()
        since = {name: counts[name] - self._counted[name] for name in counts}
        self._counted = counts
        failed = self._failures.since_last() | self._prompts.skipped.since_last()
        self._failed = [failed["ended"], *(failed[f"failed_{cause}"] for cause in CAUSES), failed["replaced"]]
        shape = self._routes.server_shape
        experts = None if shape is None else shape.experts
        own = count_samples(taken, version, experts)
        return [float((since | own | failed)[name]) for name in COUNTED]

    def _origin(self, group: Group) -> Origin | None:
        if not self._with_origins:
            return None
        prompt = self._prompts.at(group.number)
        return Origin(group.number, prompt.index, prompt.label)

"""Collects a run's batches from the sample files of an earlier one: --rollout-replay."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, count_samples
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.first_step import HALF_KL, FirstStep
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import meeting_interval_s
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.groups import Group, Taken
from megatron_rl_corr.rollout.sample_file import Origin, Sample, SavedBatch, read_sampling, read_trajectories
from megatron_rl_corr.rollout.sample_folder import folder_files, whole_batch
from megatron_rl_corr.rollout.sampling import training_sampling


class ReplayCollector(BatchCollector):
    """Collects the batches [first, last): every replica's leader reads all files of a batch, and
    keeps its groups.

    The groups are in the places that they had, so that the same replicas train the same samples in the same
    order; another number of replicas shares them out in that order.

    Args:
        options: of the run.
        layout: this rank's process groups.
        shape: sizes of a batch.
        batches: first and last.
        iteration: Megatron's, before the first.
        vocab_size: ids must be below it.
        routes: take the samples' routed experts.

    Raises:
        ValueError: files are missing, or were made with other flags, or the first batch's samples
            can't be trained.
        FileNotFoundError: there is no such folder.
    """

    def __init__(
        self,
        options: RunConfig,
        layout: Layout,
        shape: BatchShape,
        *,
        batches: tuple[int, int],
        iteration: int,
        vocab_size: int,
        routes: Routes,
    ):
        self._folder, self._updates = Path(options.replay), options.updates_of_batch
        self._vocab_size, self._files = vocab_size, folder_files(self._folder)
        self._begin = batches[0], iteration
        steps = [self._step(number) for number in range(*batches)]
        missing = [step for step in steps if step not in self._files]
        if missing:
            raise ValueError(
                f"`replay` {self._folder} has no samples of {len(missing)} of this run's {len(steps)} "
                f"batches; the first is step_{missing[0]:06d}_replica0.parquet. It has the steps "
                f"{min(self._files)} to {max(self._files)}; use --train-iters {max(missing[0] - 1, 1)} "
                "or --exit-interval, --load a checkpoint of another step, or another folder"
            )
        batch = whole_batch(self._files[steps[0]]) if steps else None
        super().__init__(
            layout,
            shape,
            training_sampling(options),
            num_turns=batch and batch.num_turns,
            truncated_samples=options.truncated_samples,
            routes=routes,
            agent_branches=batch and batch.agent_branches,
            by_lag=batch is not None and batch.by_lag,
        )
        self._origins: dict[int, Origin | None] = {}
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "replay")
        self._first: tuple[int, list[Group], int] | None = None
        """The first batch's number and groups, and how far the newest of its samples'
        weights are behind it.
        """
        if layout.is_data_leader:
            for step in steps:
                self._check(step)
            if batch is not None:
                self._first = (batches[0], *self._read(batches[0]))

    @collective
    def bound_first_step(self, given: float | None) -> FirstStep | None:
        """The bound of the KL in the first step; every rank calls it.

        None where no sample of that step is of its own weights, as in the middle of a run that sampled ahead.

        Args:
            given: --rollout-max-first-step-kl; None: that of 16 bits, as there is no server to ask; inf: not
                even a KL that is not a number ends the replay, which may be there to see it again.
        """
        if given == math.inf:
            return None
        iteration = self._begin[1]
        on_policy = [self._first is not None and self._first[2] <= 0]
        dist.broadcast_object_list(on_policy, src=0)
        if not on_policy[0]:
            if dist.get_rank() == 0:
                print(
                    f"[rollout] the train-infer KL of step {iteration + 1} has no bound: none of its samples "
                    "is of the weights that it starts from",
                    flush=True,
                )
            return None
        return FirstStep(iteration, HALF_KL if given is None else given)

    @collective
    def cursor_of_all_replicas(self, batches: int, *, with_last: bool) -> None:
        """Nothing: a replay draws no prompts."""

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown(cancel_futures=True)

    @collective
    def _share_failures(self) -> None:
        """No sample fails; but every rank must know the names of the rewards."""
        new = torch.tensor(float(self._new_parts), dtype=torch.float64, device=self.device)
        dist.all_reduce(new)
        if new.item():
            self._parts.share_names()

    def _submit_take(self, number: int) -> concurrent.futures.Future[Taken]:
        return self._reader.submit(self._taken, number)

    def _has_arrived(self, taking: concurrent.futures.Future, batch: int, since: float) -> bool:
        return bool(concurrent.futures.wait([taking], meeting_interval_s()).done)

    def _count(self, taken: Taken, version: int) -> list[float]:
        """Values in the order of COUNTED: 0 for what only servers do, and no sample has failed."""
        shape = self._routes.server_shape
        own = count_samples(taken, version, None if shape is None else shape.experts)
        own["ended"] = own["samples"]
        return [float(own.get(name, 0)) for name in COUNTED]

    def _origin(self, group: Group) -> Origin | None:
        return self._origins[group.number]

    def _taken(self, number: int) -> Taken:
        (first, self._first) = (self._first, None)
        groups = first[1] if first is not None and first[0] == number else self._read(number)[0]
        return Taken(groups, ready=0, running=0, dropped=0)

    def _step(self, number: int) -> int:
        """The first step of a batch, from 1."""
        batch, iteration = self._begin
        return iteration + (number - batch) * self._updates + 1

    def _check(self, step: int) -> None:
        """ValueError unless the step's files are a whole batch of this run's sizes and sampling."""
        files = self._files[step]
        batch = whole_batch(files)
        where = f"`replay` {files[0]}"
        flags = {
            "group_size": ("--rollout-group-size", self._shape.group_size),
            "updates": ("--rollout-updates-per-batch x --rollout-epochs-per-batch", self._updates),
        }
        for name, (flag, value) in flags.items():
            if vars(batch)[name] != value:
                raise ValueError(
                    f"{where} was made with {flag} {vars(batch)[name]}, got {value}; give what it was"
                )
        if batch.masks_truncated != self._mask_truncated:
            was = "mask" if batch.masks_truncated else "train"
            raise ValueError(f"{where} was made with --rollout-truncated-samples {was}; give what it was")
        if batch.replicas != self._layout.dp_size and self._shape.updates_per_batch > 1:
            raise ValueError(
                f"{where} was written by {batch.replicas} data-parallel replicas, and this run has "
                f"{self._layout.dp_size}: with --rollout-updates-per-batch {self._shape.updates_per_batch} "
                "which samples an update takes depends on it; use as many"
            )
        if batch.num_turns != self._num_turns:
            raise ValueError(
                f"{where} was made with `max_turns` {batch.num_turns}, the first step's files with "
                f"{self._num_turns}; they are of two runs"
            )
        if batch.agent_branches != self.agent_branches:
            raise ValueError(
                f"{where} was made with `agent_branches` {batch.agent_branches}, the first step's files with "
                f"{self.agent_branches}; they are of two runs"
            )
        samples = sum(_samples_in(path, batch) for path in files)
        if samples != self._shape.collected:
            parts = self._shape.updates_per_batch
            raise ValueError(
                f"{where} and the other files of its step have {samples} samples, and a batch of this run "
                f"{self._shape.collected} (--global-batch-size {self._shape.global_batch_size} x "
                f"--rollout-updates-per-batch {parts}); use --global-batch-size {samples // parts}"
            )
        saved = read_sampling(files[0])
        for name, value in vars(self.sampling).items():
            if name == "top_logprobs":  # a sample may have more of them than this run needs
                continue
            if saved is not None and getattr(saved, name) != value:
                raise ValueError(
                    f"{where} was sampled with `{name}` {_words(getattr(saved, name))}, got "
                    f"{_words(value)}; give what it was"
                )

    def _read(self, number: int) -> tuple[list[Group], int]:
        """(this replica's groups of a batch in their places, versions that its newest
        sample is behind it).
        """
        step = self._step(number)
        own = range(self._layout.dp_rank * self._groups, (self._layout.dp_rank + 1) * self._groups)
        groups: dict[int, list[Sample]] = {place: [] for place in own}
        self._origins, lag = {}, number
        for path, place, sample in self._samples(step):
            lag = min(lag, number - versions.number(sample.trajectory.oldest_version))
            if place in groups:
                self._check_sample(path, sample)
                groups[place].append(sample)
        made = []
        for place, samples in groups.items():
            samples.sort(key=lambda sample: (sample.trajectory.sample_index, sample.trajectory.branch))
            trajectories = [sample.trajectory for sample in samples]
            indexes = [one.sample_index for one in trajectories if one.branch == 0]
            goes_on = all(
                one.branch == 0 or (one.sample_index, one.branch - 1) == (before.sample_index, before.branch)
                for before, one in pairwise(trajectories)
            )
            if indexes != list(range(self._shape.group_size)) or not goes_on:
                raise ValueError(
                    f"`replay` {self._folder}: prompt {place} of step {step} has the samples {indexes}, "
                    f"where each of {self._shape.group_size} must be once, with all its branches; the files "
                    "are not as a run wrote them"
                )
            made.append(self._group(place, samples))
        return made, lag

    def _group(self, place: int, samples: list[Sample]) -> Group:
        origin = samples[0].origin
        number = place if origin is None else origin.group
        self._origins[number] = origin
        parts = [sample.reward_parts for sample in samples]
        return Group(
            number,
            [sample.trajectory for sample in samples],
            [sample.reward for sample in samples],
            [] if None in parts else parts,
        )

    def _samples(self, step: int) -> Iterator[tuple[Path, int, Sample]]:
        """(file, place of its prompt among those of all replicas, sample) of every sample of a batch."""
        batch = whole_batch(self._files[step])
        for replica, path in enumerate(self._files[step]):
            first = 0 if batch.packed else replica * _groups_of(path, batch)
            for sample in read_trajectories(path):
                yield path, first + sample.trajectory.prompt_index, sample

    def _check_sample(self, path: Path, sample: Sample) -> None:
        """ValueError for a sample that this run can't train on."""
        row = sample.trajectory
        who = f"`replay` {path}: sample {row.sample_index} of prompt {row.prompt_index}"
        if sample.reward is None:
            raise ValueError(
                f"{who} has no reward; only files of --rollout-save-trajectories can be replayed"
            )
        highest = max(int(ids.max()) if ids.numel() else 0 for ids in (row.prompt_ids, row.output_ids))
        if highest >= self._vocab_size:
            raise ValueError(
                f"{who} has the id {highest}, and the vocabulary of --rollout-hf-checkpoint "
                f"{self._vocab_size}; give the model that it was sampled from"
            )
        if row.prompt_ids.numel() + row.output_ids.numel() - 1 > self._shape.seq_length:
            raise ValueError(
                f"{who} has {row.prompt_ids.numel() + row.output_ids.numel()} tokens; use --seq-length "
                f"{row.prompt_ids.numel() + row.output_ids.numel() - 1} or more"
            )
        if self._routes.server_shape is not None and row.routed_experts is None:
            raise ValueError(
                f"{who} has no routed experts; --router-replay R3 needs files of a run with R3 and "
                "--rollout-save-routed-experts"
            )
        if self.sampling.truncated and row.support is None:
            raise ValueError(f"{who} has no support_ids, which `top_p` and `top_k` need")


def _groups_of(path: Path, batch: SavedBatch) -> int:
    return pq.read_metadata(path).num_rows // batch.group_size


def _samples_in(path: Path, batch: SavedBatch) -> int:
    if batch.agent_branches is None:
        return pq.read_metadata(path).num_rows
    return sum(branch == 0 for branch in pq.read_table(path, columns=["branch"])["branch"].to_pylist())


def _words(value: object) -> str:
    return " ".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)

"""Each step's samples, with what the step computed of them, in a Parquet file per replica."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.mcore.feature import CorrectedBatch, Feature, RunParts
from megatron_rl_corr.reduce.failure import all_reduce_results
from megatron_rl_corr.rollout.sample_columns import CHOICES
from megatron_rl_corr.rollout.sample_file import (
    Sample,
    SavedBatch,
    samples_of_rows,
    write_trajectories,
)

CLOSE_S = 5.0
"""Seconds that a run which ends waits for a file: a disk that hangs must not hold it up."""


class SavedSamplesFeature(Feature):
    """Writes FOLDER/step_000001_replica0.parquet and so on, from each replica's data leader, while the
    batch trains.
    """

    waits_as = "save"
    needs_scoring = ("--rollout-save-trajectories",)
    needs_origins = True

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._writer = ThreadPoolExecutor(1, "saved-samples")
        self._writing = False
        """Some leader's file may not be whole yet."""
        self._file: Future | None = None
        """The writing of this rank's."""

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.save_trajectories is not None

    def open(self, run: RunParts) -> None:
        options, layout = self.options, run.settings.layout
        self._folder, self._layout, self._samples = Path(options.save_trajectories), layout, run.collector
        self._batch = SavedBatch(
            step=1,
            updates=options.updates_of_batch,
            replica=layout.dp_rank,
            replicas=layout.dp_size,
            group_size=run.shape.group_size,
            packed=run.shape.packing is not None,
            num_turns=options.most_turns,
            hf_checkpoint=str(Path(options.hf_checkpoint).resolve()),
            masks_truncated=options.truncated_samples == "mask",
            agent_branches=run.collector.agent_branches,
            by_lag=run.collector.by_lag,
        )
        if layout.is_data_leader:
            self._folder.mkdir(parents=True, exist_ok=True)

    def save_batch(self, scored: CorrectedBatch) -> bool:
        """Begin to write a batch's samples.

        The last stage knows pi_old's log-probs, the advantages and the mask, the leader writes: one exchange
        over the pipeline, and one over cp.
        """
        batch, inputs, samples = scored.batch, scored.inputs, self._samples
        with_train = scored.has_old_logprobs
        names = ("train_logprobs", "loss_mask", "advantages") if with_train else ("advantages",)
        values = batch.rewards.new_empty(len(names), len(batch.seq_ids))
        if inputs is not None:
            known = {
                "train_logprobs": inputs.old_logprobs,
                "advantages": inputs.advantages,
                "loss_mask": inputs.correction.mask,
            }
            values = torch.stack([known[name].float() for name in names])
        if self._layout.pp_size > 1:
            dist.broadcast(values, self._layout.last_stage_rank, group=self._layout.pp_group)
        rows = dict(zip(names, batch.whole_rows(values, self._layout.cp_group).unbind(), strict=True))
        if with_train:
            rows["loss_mask"] = rows["loss_mask"] > 0
        self._writing = True
        if self._layout.is_data_leader:
            known = replace(self._batch, step=scored.iteration + 1)
            left_out = ("indexer_keys",) if self.options.save_routed_experts else CHOICES
            trajectories = [_without(one, left_out) for one in samples.trajectories]
            written = samples_of_rows(
                trajectories, batch.rewards, samples.reward_parts, samples.origins, **rows
            )
            self._file = self._writer.submit(self._write, written, known)
        return True

    def _write(self, written: list[Sample], batch: SavedBatch) -> None:
        path, sampling = self._folder / batch.file_name, self._samples.sampling
        try:
            write_trajectories(path, written, sampling=sampling, batch=batch)
        except OSError as failure:
            raise OSError(f"--rollout-save-trajectories {self._folder}: {failure}") from failure

    def settle(self) -> bool:
        """Wait until the batch's files are whole, however long a disk takes; the ranks meet meanwhile.

        Raises:
            OSError: on one rank, where a leader could not write.
            PeerFailure: then, on the others.
        """
        if not self._writing:
            return False
        self._writing = False
        all_reduce_results(self._file, lambda _: None)
        return True

    def close(self) -> None:
        if self._file is not None:
            wait([self._file], CLOSE_S)
        self._writer.shutdown(wait=False, cancel_futures=True)


def _without(trajectory: Trajectory, fields: Sequence[str]) -> Trajectory:
    """The same without what it has in these fields."""
    held = {name: None for name in fields if getattr(trajectory, name) is not None}
    return replace(trajectory, **held) if held else trajectory


FEATURE = SavedSamplesFeature

"""Each step's samples, with what the step computed of them, in a Parquet file per replica."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore.batch import BatchShape, RolloutBatch
from megatron_rl_corr.mcore.batch_collector import BatchCollector
from megatron_rl_corr.mcore.microbatch import LossInputs
from megatron_rl_corr.reduce.failure import all_reduce_failure
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.sample_file import (
    SavedBatch,
    samples_of_rows,
    write_trajectories,
)


class SampleLog:
    """Writes FOLDER/step_000001_replica0.parquet and so on, from each replica's data leader."""

    def __init__(self, options: RunConfig, layout: Layout, shape: BatchShape, sampling: SamplingParams):
        self._folder, self._layout, self._sampling = Path(options.save_trajectories), layout, sampling
        self._batch = SavedBatch(
            step=1,
            updates=options.updates_of_batch,
            replica=layout.dp_rank,
            replicas=layout.dp_size,
            group_size=shape.group_size,
            packed=shape.packing is not None,
            num_turns=options.max_turns,
            hf_checkpoint=str(Path(options.hf_checkpoint).resolve()),
            masks_truncated=options.truncated_samples == "mask",
        )
        if layout.is_data_leader:
            self._folder.mkdir(parents=True, exist_ok=True)

    def all_reduce_write(
        self,
        iteration: int,
        batch: RolloutBatch,
        samples: BatchCollector,
        inputs: LossInputs | None,
        *,
        with_train: bool,
    ) -> None:
        """Write the step after `iteration` others; every rank calls it.

        The last stage knows pi_old's log-probs, the advantages and the mask, the leader writes: one exchange
        over the pipeline, one over cp, and one of whether all could write.

        Args:
            iteration: steps before this one.
            batch: this rank's tokens.
            samples: has the batch's, on the data leader, and where they come from.
            inputs: on the last stage.
            with_train: there was a pass for old log-probs, so pi_old's log-probs and the
                final mask are known.

        Raises:
            OSError: where a leader could not write.
        """
        names = ("train_logprobs", "loss_mask", "advantages") if with_train else ("advantages",)
        values = batch.rollout_logprobs.new_empty(len(names), len(batch.seq_ids))
        if inputs is not None:
            known = {
                "train_logprobs": inputs.old_logprobs,
                "advantages": inputs.advantages,
                "loss_mask": inputs.correction.mask,
            }
            values = torch.stack([known[name].float() for name in names])
        if self._layout.pp_size > 1:
            dist.broadcast(values, self._layout.last_stage_rank, group=self._layout.pp_group)
        rows = dict(zip(names, batch.all_gather_rows(values, self._layout.cp_group).unbind(), strict=True))
        if with_train:
            rows["loss_mask"] = rows["loss_mask"] > 0
        error = None
        if self._layout.is_data_leader:
            known = replace(self._batch, step=iteration + 1)
            try:
                written = samples_of_rows(
                    samples.trajectories, batch.rewards, samples.reward_parts, samples.origins, **rows
                )
                write_trajectories(
                    self._folder / known.file_name, written, sampling=self._sampling, batch=known
                )
            except OSError as failure:
                error = OSError(f"--rollout-save-trajectories {self._folder}: {failure}")
        all_reduce_failure(error)

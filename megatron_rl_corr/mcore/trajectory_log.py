"""Each step's samples, with what the step made of them, in a Parquet file per replica.

N samples of this replica, L = --seq-length, t of it on this context-parallel rank, K values a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.mcore.batch import RolloutBatch, TrainingTargets
from megatron_rl_corr.parallel.context import zigzag_positions
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.parallel.gather import all_gather_stacked
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout.sample_file import samples_of_rows, write_trajectories


class TrajectoryLog:
    """Writes FOLDER/step_000001_replica0.parquet and so on, from each replica's data leader."""

    def __init__(self, folder: Path, layout: Layout, sampling: SamplingParams):
        self._folder, self._layout, self._sampling = folder, layout, sampling
        if layout.is_data_leader:
            folder.mkdir(parents=True, exist_ok=True)

    def all_reduce_write(
        self, iteration: int, batch: RolloutBatch, trajectories: Sequence[Trajectory], targets: TrainingTargets | None,
        *, with_train: bool,
    ) -> None:
        """Every rank calls it: the last stage knows pi_old's log-probs, the advantages and the mask, the leader writes.

        with_train: pi_old is a model's, not pi_rollout standing in for it, and the rules have spoken already. Two small
        exchanges, one over the pipeline and one over cp, and one of whether all could write; OSError where one could
        not.
        """
        names = ("train_logprobs", "loss_mask", "advantages") if with_train else ("advantages",)
        values = batch.rollout_logprobs.new_empty(len(names), *batch.tokens.shape)
        if targets is not None:
            known = {"train_logprobs": targets.old_logprobs, "advantages": targets.advantages,
                     "loss_mask": targets.correction.mask}  # fmt: skip
            values = torch.stack([known[name].view_as(batch.tokens).float() for name in names])
        if self._layout.pp_size > 1:
            last = dist.get_process_group_ranks(self._layout.pp_group)[-1]
            dist.broadcast(values, last, group=self._layout.pp_group)
        rows = dict(zip(names, self._all_gather_rows(values).unbind(), strict=True))
        if with_train:
            rows["loss_mask"] = rows["loss_mask"] > 0
        error = None
        if self._layout.is_data_leader:
            path = self._folder / f"step_{iteration + 1:06d}_replica{self._layout.dp_rank}.parquet"
            try:
                samples = samples_of_rows(trajectories, batch.rewards, **rows)
                write_trajectories(path, samples, sampling=self._sampling)
            except OSError as failure:
                error = OSError(f"--rollout-save-trajectories {self._folder}: {failure}")
        all_reduce_failure(error)

    def _all_gather_rows(self, values: Tensor) -> Tensor:
        """[K, N, t] of each context-parallel rank -> [K, N, L]."""
        size = self._layout.cp_group.size()
        if size == 1:
            return values
        whole = values.new_empty(*values.shape[:2], size * values.shape[2])
        for rank, part in enumerate(all_gather_stacked(values, self._layout.cp_group)):
            whole[:, :, zigzag_positions(rank, size, (0, whole.shape[2]), values.device)] = part
        return whole

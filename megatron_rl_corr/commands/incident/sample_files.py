"""The sample files of a run's batches: which there are, what they lack for a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl_corr.commands.incident.recorded_run import Launch, RecordedRun
from megatron_rl_corr.rollout.sample_folder import folder_files, step_of
from megatron_rl_corr.rollout.saved_batch import BATCH, SavedBatch, from_metadata

SAVE = "--rollout-save-trajectories"
NEAR = 1e-4
"""A mean of rewards in float32 against one in float64, relative to 1 or to the mean."""


@dataclass(frozen=True)
class BatchFiles:
    """The files of one batch, one a replica."""

    paths: tuple[Path, ...]
    batch: SavedBatch

    @property
    def first(self) -> int:
        """Its first step."""
        return self.batch.step

    @property
    def last(self) -> int:
        """Its last one."""
        return self.batch.step + self.batch.updates - 1

    def lacks(self, column: str) -> bool:
        """True if a sample has no value there."""
        return any(pq.read_table(path, columns=[column]).column(column).null_count for path in self.paths)

    def check_rewards(self, row: Mapping[str, Any] | None) -> None:
        """ValueError where the row of the batch's first step has another mean reward than the files.

        Not of episodes with branches, whose rows are no samples.
        """
        if row is None or "reward/mean" not in row or self.batch.agent_branches is not None:
            return
        rewards = [
            value
            for path in self.paths
            for value in pq.read_table(path, columns=["reward"])["reward"].to_pylist()
        ]
        found, wanted = math.fsum(rewards) / len(rewards), row["reward/mean"]
        if abs(found - wanted) > NEAR * max(1.0, abs(wanted)):
            raise ValueError(
                f"{self.paths[0]}: its samples have a mean reward of {found:.6g}, and step {self.first} of "
                f"the run {wanted:.6g}: the files are of another run; put those of this one there"
            )


class SampleFolder:
    """The folder of --rollout-save-trajectories.

    Args:
        run: that saved them.
        launch: that has made the step.

    Raises:
        ValueError: the run saved none, or they are not there.
    """

    def __init__(self, run: RecordedRun, launch: Launch):
        named = launch.value(SAVE)
        if named is None:
            raise ValueError(
                f"the run saved no samples, and a step can't be done again without them; train with {SAVE} "
                "DIR"
            )
        folder = run.located(named, launch)
        if folder is None:
            raise ValueError(f"{SAVE} {named}: the folder is not there any more; put it beside {run.folder}")
        self.folder, self._files = folder, folder_files(folder)

    @property
    def newest(self) -> int:
        """First step of the last batch that has files."""
        return max(self._files)

    def holding(self, step: int) -> BatchFiles:
        """The batch that a step is of.

        Raises:
            ValueError: there are no files of it, or not all of them.
        """
        before = [first for first in self._files if first <= step]
        if before:
            found = self.beginning(max(before))
            if step <= found.last:
                return found
        raise ValueError(
            f"{self.folder} has no samples of step {step}; there are files of {len(self._files)} batches, "
            f"the first of step {min(self._files)}, the last of step {max(self._files)}"
        )

    def beginning(self, step: int) -> BatchFiles:
        """The batch whose first step this is.

        Raises:
            ValueError: as `holding`.
        """
        if step not in self._files:
            raise ValueError(f"{self.folder} has no samples of step {step}, which must be done before")
        paths = tuple(self._files[step])
        batches = [_read_batch(path) for path in paths]
        known = [
            (step_of(path), one.step, one.replica, one.replicas)
            for path, one in zip(paths, batches, strict=True)
        ]
        wanted = [((step, replica), step, replica, len(paths)) for replica in range(batches[0].replicas)]
        if known != wanted:
            raise ValueError(
                f"{self.folder} has {len(paths)} files of step {step}, which are not one of each of the "
                f"batch's {batches[0].replicas} replicas; add what is missing"
            )
        return BatchFiles(paths, batches[0])


def _read_batch(path: Path) -> SavedBatch:
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole sample file: {error}") from None
    batch = from_metadata(metadata, BATCH, SavedBatch, path)
    if batch is None:
        raise ValueError(f"{path} does not say which batch it is of: it was written by an earlier version")
    return batch

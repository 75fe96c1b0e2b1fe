"""Which sample files a folder has, by step and replica, and whether those of a step are all
there and of one run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl_corr.config.replay import SAMPLE_FILES

if TYPE_CHECKING:
    from megatron_rl_corr.rollout.sample_file import SavedBatch

NAME = re.compile(SAMPLE_FILES)
"""What `SavedBatch.file_name` makes."""


def step_of(path: str | os.PathLike) -> tuple[int, int] | None:
    """(step, replica) that the file's name says; None for another name."""
    found = NAME.fullmatch(Path(path).name)
    return None if found is None else (int(found[1]), int(found[2]))


def files_by_step(paths: Iterable[str | os.PathLike]) -> dict[int, list[Path]]:
    """The files of each step, ordered by step and replica; files of another name are left out."""
    known = sorted((where, Path(path)) for path in paths if (where := step_of(path)) is not None)
    found: dict[int, list[Path]] = {}
    for (step, _), path in known:
        found.setdefault(step, []).append(path)
    return found


def folder_files(folder: str | os.PathLike) -> dict[int, list[Path]]:
    """The sample files in a folder, by step.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it has no sample file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no such folder: {folder}; give the one that --rollout-save-trajectories named"
        )
    found = files_by_step(folder.iterdir())
    if not found:
        raise ValueError(
            f"{folder} has no sample file (step_000001_replica0.parquet); give the folder that "
            "--rollout-save-trajectories named"
        )
    return found


def whole_batch(paths: Sequence[Path]) -> SavedBatch:
    """What the files of one step say of their batch: that of replica 0.

    Args:
        paths: of `files_by_step`, in the order of replicas.

    Raises:
        ValueError: a file has no record of its batch, is of another step than its name says, or of another
            run than the first one, or one of the batch's replicas is missing or not of it.
    """
    from megatron_rl_corr.rollout.sample_file import SavedBatch, read_batch  # torch: names are known without

    first: SavedBatch | None = None
    for place, path in enumerate(paths):
        batch = read_batch(path)
        if batch is None:
            raise ValueError(
                f"{path} was written by an earlier version, which did not record which batch it is of"
            )
        first = batch if first is None else first
        expected = SavedBatch(**{**vars(first), "replica": place})
        if batch != expected or batch.step != step_of(path)[0]:
            wrong = next(name for name, value in vars(expected).items() if vars(batch)[name] != value)
            raise ValueError(
                f"{path} is of {wrong} {vars(batch)[wrong]}, where {paths[0].name} and the file's name ask "
                f"for {vars(expected)[wrong]}: files of one step must be of one run, one a replica; remove "
                "those of others"
            )
    if len(paths) != first.replicas:
        raise ValueError(
            f"{paths[0].parent} has {len(paths)} files of step {first.step}, whose batch has "
            f"{first.replicas}, one a replica; add what is missing, or remove what is left of another run"
        )
    return first

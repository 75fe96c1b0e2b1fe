"""From where a step can be done again: the latest checkpoint at or before it, or the run's beginning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.incident.recorded_run import Launch, RecordedRun
from megatron_rl_corr.files import sha256_of

TRACKER = "latest_checkpointed_iteration.txt"
CURSOR = "rollout_cursor.json"
_ITERATION = re.compile(r"iter_(\d{7})")
_HASHED = 1 << 20
"""Bytes of the largest file of a checkpoint that is hashed where its weights stay where they are."""


@dataclass(frozen=True)
class StartPoint:
    """A checkpoint of an iteration, the number of steps before it; or the beginning of the run."""

    iteration: int
    folder: Path | None
    """Folder that --load names; None at iteration 0."""
    began_here: bool
    """The launch that made the step had loaded this very one: its --no-load-... flags acted on it."""

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the iteration."""
        return None if self.folder is None else self.folder / f"iter_{self.iteration:07d}"

    @property
    def auto_level(self) -> str | None:
        """The weights that --rollout-correction auto had chosen there; None: not known."""
        path = None if self.checkpoint is None else self.checkpoint / CURSOR
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text()).get("auto_level")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def listing(self) -> dict[str, Any]:
        """Name -> size of each file of the checkpoint, and SHA-256 of small ones."""
        if self.checkpoint is None:
            return {}
        return {
            str(path.relative_to(self.checkpoint)): _described(path)
            for path in sorted(self.checkpoint.rglob("*"))
            if path.is_file()
        }


def find_start(run: RecordedRun, first: int) -> StartPoint | None:
    """The latest start from which the batch that begins with step `first` can be made; None: there is none.

    Args:
        run: that has made it.
        first: its first step.
    """
    found = [one for one in _starts(run, run.launch_of(first)) if one.iteration < first]
    return max(found, key=lambda one: (one.iteration, one.began_here), default=None)


def _starts(run: RecordedRun, own: Launch) -> Iterator[StartPoint]:
    if run.launches[0].first_step == 1:
        yield StartPoint(0, None, own.first_step == 1)
    begun = own.first_step - 1
    loaded = None if own.value("--load") is None else run.located(own.value("--load"), own)
    if begun and loaded is not None and _is_whole(loaded, begun):
        yield StartPoint(begun, loaded, True)
    for launch in run.launches:
        named = launch.value("--save")
        folder = None if named is None or launch.first_step > own.first_step else run.located(named, launch)
        for iteration in () if folder is None else _iterations(folder):
            # one that is older than the launch which would have made it is of an attempt that was given up
            written = (folder / f"iter_{iteration:07d}").stat().st_mtime
            if iteration < own.first_step or written >= own.record.get("time", 0.0):
                yield StartPoint(iteration, folder, iteration == begun)


def _iterations(folder: Path) -> list[int]:
    """Iterations of whole checkpoints: Megatron names each in a file once it is whole."""
    try:
        latest = int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return []
    found = [int(name[1]) for path in folder.iterdir() if (name := _ITERATION.fullmatch(path.name))]
    return [iteration for iteration in found if iteration <= latest and _is_whole(folder, iteration)]


def _is_whole(folder: Path, iteration: int) -> bool:
    checkpoint = folder / f"iter_{iteration:07d}"
    return checkpoint.is_dir() and any(path.is_file() for path in checkpoint.rglob("*"))


def _described(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _HASHED:
        return {"bytes": size}
    return {"bytes": size, "sha256": sha256_of(path)}

"""Files of earlier attempts and runs, at a start: steps that are done anew are removed, other
runs' are kept aside.

So each step is once in metrics.jsonl and experts.jsonl, and no sample file is of weights that the
run has given up.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import CONFIG_NAME, METRICS_NAME
from megatron_rl_corr.moe.statistics import FILE_NAME as EXPERTS_NAME
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_failure
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.abandoned import drop_files, drop_rows, move_files

_LOG_NAMES = re.compile("|".join(map(re.escape, (METRICS_NAME, EXPERTS_NAME, CONFIG_NAME))))
_BEGUN: set[Path] = set()
"""Folders in which this process has begun: what is there at a later start is its own."""


@collective
def clear_abandoned_folders(options: RunConfig, layout: Layout, iteration: int) -> None:
    """Remove what an earlier attempt wrote of the steps after `iteration`; every rank calls it, as the
    last of a start.

    Each rank looks where it writes itself. In a run that begins at step 0, what is there is of another run,
    or of an attempt of this one in another process, which can't be told apart: it is moved into a new
    folder `earlier-TIME`.

    Raises:
        StartupError: on one rank, where a file can't be read, moved or replaced; on the
            others PeerFailure.
    """
    error, stamp = None, [f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"]
    dist.broadcast_object_list(stamp, src=0)  # of all leaders that share a folder
    own = frozenset(_BEGUN)  # as it is now: one folder may be named for rows, samples and traces
    try:
        for folder, names, are_rows in _written_here(options, layout):
            if iteration == 0 and folder not in own:
                _keep_aside(folder, names, folder / f"earlier-{stamp[0]}")
            elif are_rows:
                for name in (METRICS_NAME, EXPERTS_NAME):
                    _tell(folder / name, "rows", drop_rows(folder / name, iteration))
            else:
                _tell(folder, "files", len(drop_files(folder, names, iteration)))
            _BEGUN.add(folder)
    except OSError as failure:
        error = StartupError(
            f"what an earlier attempt wrote of steps after {iteration} can't be removed, nor another run's "
            f"files be moved: {failure}; make it writable, or name another folder"
        )
    all_reduce_failure(error)


def _written_here(options: RunConfig, layout: Layout) -> Iterator[tuple[Path, re.Pattern[str], bool]]:
    """Each folder that this rank writes, the names of its files there, and whether rows of
    steps are in them.
    """
    if layout.is_job_reporter and options.log_dir is not None:
        yield Path(options.log_dir), _LOG_NAMES, True
    if layout.is_data_leader:
        for one in (one for one in RunConfig.writes if one.step_files is not None):
            if (folder := getattr(options, one.option)) is not None:
                yield Path(folder), re.compile(one.step_files), False


def _keep_aside(folder: Path, names: re.Pattern[str], aside: Path) -> None:
    moved = move_files(folder, names, aside)
    if moved:
        print(
            f"[rollout] {folder}: {len(moved)} files of an earlier run were moved to {aside.name}", flush=True
        )
        EVENTS.tell(
            "files_moved", "files of an earlier run", path=str(folder), to=aside.name, files=len(moved)
        )


def _tell(path: Path, what: str, count: int) -> None:
    if count:
        print(f"[rollout] {path}: {count} {what} of steps that are done anew were removed", flush=True)
        EVENTS.tell("files_dropped", f"{what} of steps that are done anew", path=str(path), **{what: count})

"""The data cursor in Megatron's checkpoints: which prompts were drawn, and which of them are not trained yet.

A JSON file in the checkpoint's folder (iter_0000040/rollout_cursor.json). Megatron finishes a checkpoint by
naming it in latest_checkpointed_iteration.txt; the cursor is written just before that, even if shards are written in
the background.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.parallel.failure import StartupError, all_reduce_failure
from megatron_rl_corr.rollout.cursor import SavedCursor

FILE_NAME = "rollout_cursor.json"


def broadcast_saved(args: argparse.Namespace) -> SavedCursor | None:
    """The cursor of the checkpoint that Megatron has loaded, on every rank; None at iteration 0, or without one.

    Without one the run goes on with the prompts of its step, and rank 0 prints so. Every rank calls it.

    Raises StartupError on rank 0, and PeerFailure on others, for a file that can't be read.
    """
    if args.iteration == 0:
        return None
    found, error = [None], None
    if dist.get_rank() == 0:
        try:
            found[0] = _read(args)
        except (OSError, ValueError) as failure:
            error = StartupError(f"--load: {FILE_NAME} of iteration {args.iteration} cannot be read: {failure}")
    all_reduce_failure(error)
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _read(args: argparse.Namespace) -> SavedCursor | None:
    for path in (folder / FILE_NAME for folder in folders_to_load(args)):
        if path.is_file():
            saved = SavedCursor.parse(path.read_text())
            print(f"[rollout] prompts go on at place {saved.next} of their sequence, and {len(saved.again)} that were "
                  f"drawn before and not trained: {path}", flush=True)  # fmt: skip
            return saved
    print(f"[rollout] the checkpoint has no {FILE_NAME}: prompts go on with those of step {args.iteration + 1}; what "
          "was being sampled may be trained twice or not at all", file=sys.stderr, flush=True)  # fmt: skip
    return None


def folders_to_load(args: argparse.Namespace) -> list[Path]:
    """Where the checkpoint that Megatron has loaded may be."""
    parents = [args.load, args.non_persistent_global_ckpt_dir, args.save and os.path.join(args.save, "non_persistent")]
    return [folder_of(parent, args.iteration) for parent in parents if parent]


def folder_of(checkpoints: str, iteration: int) -> Path:
    """The folder of an iteration's checkpoint.

    Args:
        checkpoints: the folder of all of them.
        iteration: of this one.
    """
    from megatron.training import checkpointing  # wheels have it from 0.17 on; a run with the launcher has it always

    return Path(checkpointing.get_checkpoint_name(checkpoints, iteration, return_base_dir=True))


_saving: list[tuple[int, SavedCursor]] = []
"""The iteration that rank 0 is saving, and its cursor, until it is written."""


@contextlib.contextmanager
def saved_with(iteration: int, cursor: SavedCursor | None) -> Iterator[None]:
    """Within, Megatron saves this iteration, and rank 0 the cursor with it. cursor: None on ranks that do not write."""
    if cursor is not None:
        _saving.append((iteration, cursor))
    try:
        yield
        if _saving:
            print(f"[rollout] no {FILE_NAME} was written for iteration {iteration}, as its checkpoint has no folder "
                  "here; a run that loads it may train prompts twice or not at all", file=sys.stderr, flush=True)
    finally:
        _saving.clear()


def written_before(get_tracker_filename: Callable[[str], str]) -> Callable[[str], str]:
    """Wraps Megatron's function for the name of the file that finishes a checkpoint: the cursor is written first."""

    @functools.wraps(get_tracker_filename)
    def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
        if _saving:
            iteration, cursor = _saving[0]
            folder = folder_of(checkpoints_path, iteration)
            if folder.is_dir():
                write_atomically(folder / FILE_NAME, json.dumps(asdict(cursor)).encode())
                _saving.clear()
        return get_tracker_filename(checkpoints_path)

    return get_checkpoint_tracker_filename

"""A reference policy that is reset, in Megatron's checkpoints: a Hugging Face folder that any layout
of ranks can load.

The folder (iter_0000040/rollout_reference) is written beside the checkpoints before Megatron saves, and
then moved into the checkpoint by rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.files import refuse_link, write_atomically
from megatron_rl_corr.mcore.checkpoint_files import folder_of, folders_to_load, put_in
from megatron_rl_corr.mcore.reference.policy import Reference
from megatron_rl_corr.models.hf_folder import copy_model_files, write_index
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    StartupError,
    all_reduce_failure,
    all_reduce_first_rank,
    broadcast_made,
)
from megatron_rl_corr.weight_sync.export import write_stage

FOLDER = "rollout_reference"
STATE = "reference.json"


@collective
def broadcast_saved(args: argparse.Namespace, *, resets: bool) -> tuple[Path | None, int]:
    """(the reference's folder in the checkpoint that Megatron has loaded, the batch after
    which it was reset).

    (None, 0) where the reference is still the run's first one: at iteration 0, before the first reset, and
    for a checkpoint without a reference, of which rank 0 prints so. Every rank calls it.

    Args:
        args: Megatron's.
        resets: --rollout-reference-reset is given.

    Raises:
        StartupError: on rank 0, and PeerFailure on others, for a file that can't be read.
    """

    def read() -> tuple[Path | None, int]:
        try:
            return _read(args, resets=resets) if args.iteration > 0 else (None, 0)
        except (OSError, ValueError, KeyError) as failure:
            raise StartupError(
                f"--load: {FOLDER} of iteration {args.iteration} cannot be read: {failure!r}"
            ) from None

    return broadcast_made(read)


def _read(args: argparse.Namespace, *, resets: bool) -> tuple[Path | None, int]:
    for checkpoints in folders_to_load(args):
        folder = checkpoints / FOLDER
        if not (folder / STATE).is_file():
            continue
        after = int(json.loads((folder / STATE).read_text())["reset_after"])
        if after and not resets:
            print(
                f"[rollout] the checkpoint's reference policy, reset after batch {after}, is left out: "
                "without --rollout-reference-reset the reference is frozen",
                file=sys.stderr,
                flush=True,
            )
        return (folder, after) if after and resets else (None, 0)
    if resets:
        print(
            f"[rollout] the checkpoint has no {FOLDER}: the reference policy is the run's first one until "
            "its next reset",
            file=sys.stderr,
            flush=True,
        )
    return None, 0


@contextlib.contextmanager
@collective
def saved_with(iteration: int, reference: Reference, args: argparse.Namespace, source: str) -> Iterator[None]:
    """Within, Megatron saves this iteration; a reference that is reset is written first.
    Every rank enters it.

    Args:
        iteration: of the checkpoint.
        reference: of the run.
        args: Megatron's.
        source: the Hugging Face folder whose config and tokenizer files are copied.

    Raises:
        OSError: on a rank that can't write.
        PeerFailure: then, on the others.
    """
    if args.save is None:
        yield
        return
    if reference.exporter is None:
        if dist.get_rank() == 0:  # another run's, in a checkpoint of this iteration that is written over
            shutil.rmtree(folder_of(args.save, iteration) / FOLDER, ignore_errors=True)
        yield
        return
    folder = Path(args.save) / f".{FOLDER}-{iteration}"
    all_reduce_first_rank(lambda: _clear(Path(args.save), folder))
    if reference.reset_after:
        all_reduce_failure(write_stage(folder, reference.exporter))
    all_reduce_first_rank(lambda: _finish(folder, reference.reset_after, Path(source)))

    def put(checkpoint: Path) -> None:
        refuse_link(checkpoint / FOLDER)
        shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
        shutil.move(folder, checkpoint / FOLDER)  # a checkpoint may be on another file system

    writes = dist.get_rank() == 0
    try:
        with put_in(
            iteration,
            put if writes else None,
            name=FOLDER,
            without="begins with the run's first reference policy",
        ):
            yield
    finally:
        if writes:
            shutil.rmtree(folder, ignore_errors=True)


def _clear(checkpoints: Path, folder: Path) -> None:
    """Make the folder, and remove what a save left that was broken off."""
    for left in checkpoints.glob(f".{FOLDER}-*"):
        shutil.rmtree(left)
    folder.mkdir(parents=True)


def _finish(folder: Path, reset_after: int, source: Path) -> None:
    if reset_after:
        copy_model_files(source, folder)
        write_index(folder)
    write_atomically(folder / STATE, json.dumps({"reset_after": reset_after}).encode())

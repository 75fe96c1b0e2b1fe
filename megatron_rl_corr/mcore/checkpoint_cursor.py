"""The data cursor in Megatron's checkpoints: which prompts were drawn, which of them are not
trained, in which order.

A JSON file in the checkpoint's folder (iter_0000040/rollout_cursor.json).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import refuse_link, write_atomically
from megatron_rl_corr.mcore.checkpoint_files import folders_to_load, put_in
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, broadcast_made
from megatron_rl_corr.rollout.cursor import SavedCursor
from megatron_rl_corr.rollout.waiting_groups import FOLDER

FILE_NAME = "rollout_cursor.json"


@collective
def broadcast_saved(args: argparse.Namespace) -> SavedCursor | None:
    """The cursor of the checkpoint that Megatron has loaded, on every rank; None at iteration
    0, or without one.

    Without one the run goes on with the prompts of its step, and rank 0 prints so. Every rank calls it.

    Raises StartupError on rank 0, and PeerFailure on others, for a file that can't be read.
    """
    if args.iteration == 0:
        return None

    def read() -> SavedCursor | None:
        try:
            return _read(args)
        except (OSError, ValueError) as failure:
            raise StartupError(
                f"--load: {FILE_NAME} of iteration {args.iteration} cannot be read: {failure}"
            ) from None

    return broadcast_made(read)


def _read(args: argparse.Namespace) -> SavedCursor | None:
    for path in (folder / FILE_NAME for folder in folders_to_load(args)):
        if path.is_file():
            saved = SavedCursor.parse(path.read_text())
            print(
                f"[rollout] prompts go on at place {saved.next} of their sequence, and {len(saved.again)} "
                f"that were drawn before and not trained: {path}",
                flush=True,
            )
            EVENTS.tell(
                "run_resumed",
                f"the checkpoint of iteration {args.iteration} was loaded",
                step=args.iteration,
                next_group=saved.next,
                open_groups=list(saved.again),
            )
            return saved
    print(
        f"[rollout] the checkpoint has no {FILE_NAME}: prompts go on with those of step "
        f"{args.iteration + 1}; what was being sampled may be trained twice or not at all",
        file=sys.stderr,
        flush=True,
    )
    return None


@contextmanager
def saved_with(iteration: int, cursor: SavedCursor | None) -> Iterator[list[Path]]:
    """Within, Megatron saves this iteration, and rank 0 the cursor with it. Yields a list that has the
    checkpoint's folder then. cursor: None on ranks that do not write.

    Waiting groups of another attempt, in a checkpoint that is written over, are removed.
    """
    found: list[Path] = []

    def put(folder: Path) -> None:
        refuse_link(folder / FOLDER)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        write_atomically(folder / FILE_NAME, json.dumps(asdict(cursor)).encode())
        found.append(folder)

    with put_in(
        iteration,
        None if cursor is None else put,
        name=FILE_NAME,
        without="may train prompts twice or not at all",
    ):
        yield found

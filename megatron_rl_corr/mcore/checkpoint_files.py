"""Files of ours in Megatron's checkpoints: where they are, and when they are put in.

Megatron finishes a checkpoint by naming it in latest_checkpointed_iteration.txt; what is ours is put into
its folder just before that, even if shards are written in the background.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_waiting: dict[str, tuple[int, Callable[[Path], None]]] = {}
"""On rank 0, while Megatron saves: by its name, what is not in the checkpoint yet: (iteration, put)."""


def folders_to_load(args: argparse.Namespace) -> list[Path]:
    """Where the checkpoint that Megatron has loaded may be: what it looks for first comes first.

    Non-persistent ones beside the others are those of the folder that it loads from, not of that it saves to.
    """
    parents = [args.load]
    if vars(args).get("non_persistent_ckpt_type") == "global":
        beside = args.load and os.path.join(args.load, "non_persistent")
        parents.insert(0, args.non_persistent_global_ckpt_dir or beside)
    return [folder_of(parent, args.iteration) for parent in parents if parent]


def folder_of(checkpoints: str, iteration: int) -> Path:
    """The folder of an iteration's checkpoint.

    Args:
        checkpoints: the folder of all of them.
        iteration: of this one.
    """
    # wheels have it from 0.17 on; a run with the launcher has it always
    from megatron.training import checkpointing

    return Path(checkpointing.get_checkpoint_name(checkpoints, iteration, return_base_dir=True))


@contextlib.contextmanager
def put_in(iteration: int, put: Callable[[Path], None] | None, *, name: str, without: str) -> Iterator[None]:
    """Within, Megatron saves this iteration, and a file or folder of ours is put into the checkpoint.

    Args:
        iteration: of the checkpoint.
        put: put(folder of the checkpoint); None on ranks that put nothing.
        name: of the file or folder, for the message where the checkpoint got no folder here.
        without: what a run does that loads the checkpoint without it, for that message.
    """
    if put is None:
        yield
        return
    _waiting[name] = iteration, put
    try:
        yield
        if name in _waiting:
            print(
                f"[rollout] no {name} was written for iteration {iteration}, as its checkpoint has no folder "
                f"here; a run that loads it {without}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        _waiting.pop(name, None)


def with_ours_first(get_tracker_filename: Callable[[str], str]) -> Callable[[str], str]:
    """Wraps Megatron's function for the name of the file that finishes a checkpoint: ours
    are put in first.
    """

    @functools.wraps(get_tracker_filename)
    def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
        for name, (iteration, put) in list(_waiting.items()):
            folder = folder_of(checkpoints_path, iteration)
            if folder.is_dir():
                put(folder)
                del _waiting[name]
        return get_tracker_filename(checkpoints_path)

    return get_checkpoint_tracker_filename

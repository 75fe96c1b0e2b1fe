"""Which batch of a run a sample file is of, as its metadata say: read without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

BATCH = b"megatron_rl_corr.batch"
"""Key in the file's metadata: the SavedBatch, as JSON."""


@dataclass(frozen=True)
class SavedBatch:
    """Which samples a file holds: those that one replica trained in one batch of a run.

    Example: SavedBatch(step=9, updates=2, replica=0, replicas=4, group_size=8, packed=True, num_turns=None,
    hf_checkpoint="/models/qwen") is of the batch whose updates were the steps 9 and 10.
    """

    step: int
    """The first step of the batch, from 1."""
    updates: int
    """Steps that it made."""
    replica: int
    replicas: int
    """How many files the batch has: one for each data-parallel replica."""
    group_size: int
    """Samples of a prompt: episodes, of one row or several."""
    packed: bool
    """Samples were dealt out over replicas, and `prompt_index` counts the prompts of all; else
    those of the replica.
    """
    num_turns: int | None
    """The largest number of turns that a sample may have; None without an environment."""
    hf_checkpoint: str
    """The model's Hugging Face folder, which has the tokenizer."""
    masks_truncated: bool = False
    """Samples that were cut (finish reason length) are kept out of the loss."""
    agent_branches: str | None = None
    """--rollout-agent-branches, where samples are episodes of one row or several; None: each row is one."""
    by_lag: bool = False
    """The run sampled ahead of training, so that metrics are parted by the age of the weights."""

    @property
    def file_name(self) -> str:
        """Example: step_000009_replica0.parquet."""
        return f"step_{self.step:06d}_replica{self.replica}.parquet"


def from_metadata[Kept](
    metadata: Mapping[bytes, bytes], key: bytes, kind: type[Kept], path: str | os.PathLike
) -> Kept | None:
    """What a sample file's metadata hold under a key; None where they have none.

    Args:
        metadata: of the file's schema.
        key: of the record.
        kind: its dataclass.
        path: of the file, for the error.

    Raises:
        ValueError: it cannot be read.
    """
    kept = metadata.get(key)
    if kept is None:
        return None
    try:
        return kind(**json.loads(kept))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} has a {key.decode()} in its metadata that cannot be read: {error}"
        ) from error

"""Groups that wait to be trained, in the folder of a checkpoint: a Parquet file a group, and of each
replica a list of them.

The list (replica3.json) is written last: without it a replica's groups are not read. It has the size and the
SHA-256 of each file, and its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.files import sha256_of, sha256_of_json, write_atomically
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.sample_file import Origin, Sample, read_trajectories, write_trajectories

FOLDER = "rollout_waiting"
"""In the checkpoint's folder."""
COMPRESSION = "lz4"
"""Half the seconds of zstd, and routes, most of a file, take as much room."""


@dataclass(frozen=True)
class SavedGroup:
    """A group's file. Example: SavedGroup(812, 23_020_114, "9f86d0...")."""

    number: int
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Example: group_000812.parquet."""
        return f"group_{self.number:06d}.parquet"


@dataclass(frozen=True)
class WaitingList:
    """What a replica has saved of the groups that waited.

    Example: of the waiting groups 6, 4 and 10 the last one was beyond the bound: WaitingList((6, 4, 10),
    (SavedGroup(6, ...), SavedGroup(4, ...)), {"group_size": 8}, 1).
    """

    waiting: tuple[int, ...]
    """All that waited, in the order in which steps take them: as the cursor has them."""
    groups: tuple[SavedGroup, ...]
    """Those that were saved."""
    settings: Mapping[str, Any]
    """What they were sampled and scored with, as JSON has it."""
    max_lag: int
    """--rollout-max-lag of the run."""

    def to_json(self) -> str:
        """With a checksum of itself."""
        values = asdict(self)
        return json.dumps(values | {"sha256": sha256_of_json(values)})

    @classmethod
    def parse(cls, text: str) -> WaitingList:
        """The list of a file's text. Raises ValueError for any other, one that was changed too."""
        try:
            values = json.loads(text)
            checksum = values.pop("sha256")
            if sha256_of_json(values) != checksum:
                raise ValueError("its checksum is another")
            groups = tuple(SavedGroup(**one) for one in values.pop("groups"))
            return cls(tuple(values.pop("waiting")), groups, **values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no list of groups ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class Written:
    """What was saved of a replica's groups."""

    groups: tuple[int, ...]
    beyond: tuple[int, ...]
    """Those that the bound left out."""
    bytes: int
    """On the disk."""
    seconds: float


def write_waiting(
    folder: Path,
    replica: int,
    groups: Sequence[Group],
    *,
    max_bytes: float,
    settings: Mapping[str, Any],
    max_lag: int,
    sampling: SamplingParams,
    row_of: Callable[[int], int],
) -> Written:
    """Write a replica's waiting groups, then its list.

    Args:
        folder: `FOLDER` of a checkpoint, whose own folder must exist.
        replica: which one.
        groups: in the order in which steps take them.
        max_bytes: bound on their tensors in memory. The groups before the one that would exceed it are
            written; that one and all behind it are not.
        settings, max_lag: as in `WaitingList`.
        sampling: what they were sampled with.
        row_of: the data set's row of a group's number.

    Raises:
        OSError: and there is no list.
    """
    begun, room, saved = time.monotonic(), max_bytes, []
    folder.mkdir(exist_ok=True)
    for group in groups:
        room -= size_of(group)
        if room < 0:
            break
        path = folder / SavedGroup(group.number, 0, "").file_name
        write_trajectories(
            path, samples_of_group(group, row_of(group.number)), sampling=sampling, compression=COMPRESSION
        )
        saved.append(SavedGroup(group.number, os.path.getsize(path), sha256_of(path)))
    numbers = tuple(group.number for group in groups)
    listed = WaitingList(numbers, tuple(saved), settings, max_lag)
    write_atomically(list_path(folder, replica), listed.to_json().encode())
    return Written(
        numbers[: len(saved)],
        numbers[len(saved) :],
        sum(one.bytes for one in saved),
        time.monotonic() - begun,
    )


def list_path(folder: Path, replica: int) -> Path:
    """The file of a replica's list."""
    return folder / f"replica{replica}.json"


def size_of(group: Group) -> int:
    """Bytes of a group's tensors in memory."""
    return sum(
        tensor.numel() * tensor.element_size() for one in group.trajectories for tensor in _tensors(one)
    )


def _tensors(trajectory: Trajectory) -> list[torch.Tensor]:
    held = [*vars(trajectory).values()]
    for one in (trajectory.support, trajectory.top_logprobs):
        held += [] if one is None else vars(one).values()
    return [value for value in held if isinstance(value, torch.Tensor)]


def samples_of_group(group: Group, row: int) -> list[Sample]:
    """A group as rows of a sample file. Its trace is left out: another process has another clock."""
    parts = group.reward_parts or [None] * len(group.trajectories)
    return [
        Sample(trajectory, reward=reward, reward_parts=own, origin=Origin(group.number, row))
        for trajectory, reward, own in zip(group.trajectories, group.rewards, parts, strict=True)
    ]


def read_group(folder: Path, saved: SavedGroup) -> Group:
    """A group, after its file was compared with the list.

    Raises:
        OSError: there is no such file.
        ValueError: it has another size, checksum or content; the message names it.
    """
    path = folder / saved.file_name
    size = os.path.getsize(path)
    if size != saved.bytes:
        raise ValueError(f"{path} has {size} bytes, and had {saved.bytes} when it was written")
    if sha256_of(path) != saved.sha256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not that of the file that was written")
    samples = list(read_trajectories(path))
    if {None if one.origin is None else one.origin.group for one in samples} != {saved.number}:
        raise ValueError(f"{path} holds another group")
    rewards = [one.reward for one in samples]
    if None in rewards:
        raise ValueError(f"{path} has a sample without a reward")
    parts = [] if samples[0].reward_parts is None else [one.reward_parts or {} for one in samples]
    return Group(saved.number, [one.trajectory for one in samples], rewards, parts)

"""Groups that wait to be trained or are being sampled, in the folder of a checkpoint: a Parquet file a group,
and of each replica a list of them.

The list (replica3.json) is written last: without it a replica's groups are not read. It has the size and the
SHA-256 of each file, and its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.trajectory import FinishReason, SamplingParams, Trajectory
from megatron_rl_corr.files import sha256_of, sha256_of_json, write_atomically
from megatron_rl_corr.rollout.begun_groups import BegunGroup, EpisodeSoFar
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.sample_file import Origin, Sample, read_trajectories, write_trajectories
from megatron_rl_corr.rollout.turns import Turns

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
class SavedSample:
    """A finished sample of a group that is being sampled. Example: SavedSample(3)."""

    index: int
    """In its group."""
    latest: int = 0
    """As in `FinishedSample`."""
    failed: bool = False
    """Its reward has failed, and on_failed_reward took its place."""


@dataclass(frozen=True)
class SavedEpisode:
    """An episode under way. Example: 60 was said to its second turn: SavedEpisode(1, 2, "stop", [60])."""

    index: int
    """Its sample, in its group."""
    turns: int
    """That the policy has made."""
    finish_reason: FinishReason
    """How the last one ended."""
    reply: list[int] | None
    """As in `EpisodeSoFar`."""


@dataclass(frozen=True)
class SavedBegun:
    """What was saved of a group that was being sampled.

    Example: sample 0 is done, sample 1 has made two turns: SavedBegun(SavedGroup(812, ...),
    (SavedSample(0),), (SavedEpisode(1, 2, "stop", [60]),)).
    """

    file: SavedGroup
    samples: tuple[SavedSample, ...] = ()
    episodes: tuple[SavedEpisode, ...] = ()
    whole: bool = False
    """All samples are done and scored; a filter was judging it."""

    @classmethod
    def parse(cls, values: dict[str, Any]) -> SavedBegun:
        """From a list's JSON. Raises KeyError, TypeError or AttributeError for anything else."""
        samples = tuple(SavedSample(**one) for one in values["samples"])
        episodes = tuple(SavedEpisode(**one) for one in values["episodes"])
        return cls(SavedGroup(**values["file"]), samples, episodes, bool(values["whole"]))


@dataclass(frozen=True)
class OpenGroups:
    """What a replica has sampled of groups that are not trained."""

    waiting: Sequence[Group] = ()
    """In the order in which steps take them."""
    begun: Sequence[BegunGroup] = ()
    """In the order in which they were begun."""
    per_step: int | None = None
    """Groups that a step takes of the replica; None: there are none."""


@dataclass(frozen=True)
class WaitingList:
    """What a replica has saved of the groups that waited, and of those that were being sampled.

    Example: of the waiting groups 6, 4 and 10 the last one was beyond the bound: WaitingList((6, 4, 10),
    (SavedGroup(6, ...), SavedGroup(4, ...)), {"group_size": 8}, 1, per_step=2).
    """

    waiting: tuple[int, ...]
    """All that waited, in the order in which steps take them: as the cursor has them."""
    groups: tuple[SavedGroup, ...]
    """Those that were saved."""
    settings: Mapping[str, Any]
    """What they were sampled and scored with, as JSON has it."""
    max_lag: int
    """--rollout-max-lag of the run."""
    begun: tuple[SavedBegun, ...] = ()
    """Groups that were being sampled."""
    per_step: int | None = None
    """Groups that a step took of the replica; None: an older version saved the list."""

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
            begun = tuple(SavedBegun.parse(one) for one in values.pop("begun", ()))
            return cls(tuple(values.pop("waiting")), groups, **values, begun=begun)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no list of groups ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class Written:
    """What was saved of a replica's groups."""

    groups: tuple[int, ...]
    """Those that wait."""
    begun: tuple[SavedBegun, ...]
    beyond: tuple[int, ...]
    """Groups that wait and that the bound left out."""
    begun_beyond: tuple[int, ...]
    """The same, of those that are being sampled."""
    bytes: int
    """On the disk."""
    seconds: float


def write_waiting(
    folder: Path,
    replica: int,
    groups: OpenGroups,
    *,
    max_bytes: float,
    settings: Mapping[str, Any],
    max_lag: int,
    sampling: SamplingParams,
    row_of: Callable[[int], int],
) -> Written:
    """Write a replica's waiting groups, what was sampled of those that are being sampled, then its list.

    Args:
        folder: `FOLDER` of a checkpoint, whose own folder must exist.
        replica: which one.
        groups: those of the replica.
        max_bytes: bound on their tensors in memory. The groups before the one that would exceed it are
            written; that one and all behind it are not.
        settings, max_lag: as in `WaitingList`.
        sampling: what they were sampled with.
        row_of: the data set's row of a group's number.

    Raises:
        OSError: and there is no list.
    """
    since, room, saved = time.monotonic(), max_bytes, []
    folder.mkdir(exist_ok=True)
    whole = [(group.number, partial(samples_of_group, group)) for group in groups.waiting]
    parts = [(group.number, partial(samples_of_begun, group)) for group in groups.begun]
    for number, samples_of in [*whole, *parts]:
        samples = samples_of(row_of(number))
        room -= size_of(one.trajectory for one in samples)
        if room < 0:
            break
        path = folder / SavedGroup(number, 0, "").file_name
        write_trajectories(path, samples, sampling=sampling, compression=COMPRESSION)
        saved.append(SavedGroup(number, os.path.getsize(path), sha256_of(path)))
    waiting, begun = saved[: len(whole)], saved[len(whole) :]
    numbers = tuple(group.number for group in groups.waiting)
    listed_begun = tuple(_listed(*pair) for pair in zip(groups.begun, begun, strict=False))
    listed = WaitingList(numbers, tuple(waiting), settings, max_lag, listed_begun, groups.per_step)
    write_atomically(list_path(folder, replica), listed.to_json().encode())
    return Written(
        numbers[: len(waiting)],
        listed_begun,
        numbers[len(waiting) :],
        tuple(group.number for group in groups.begun[len(begun) :]),
        sum(one.bytes for one in saved),
        time.monotonic() - since,
    )


def _listed(group: BegunGroup, file: SavedGroup) -> SavedBegun:
    """The entry of a group whose file is written."""
    if group.whole is not None:
        indices = sorted({one.sample_index for one in group.whole.trajectories})
        return SavedBegun(file, tuple(SavedSample(index) for index in indices), whole=True)
    samples = [
        SavedSample(index, one.latest, index in group.scores and group.scores[index] is None)
        for index, one in sorted(group.samples.items())
    ]
    episodes = [
        SavedEpisode(index, one.turns.count, one.finish_reason, one.reply)
        for index, one in sorted(group.episodes.items())
    ]
    return SavedBegun(file, tuple(samples), tuple(episodes))


def counts_of(begun: Sequence[SavedBegun]) -> tuple[int, int]:
    """(finished samples, turns of episodes under way) of these groups."""
    samples = sum(len(one.samples) for one in begun)
    return samples, sum(episode.turns for one in begun for episode in one.episodes)


def list_path(folder: Path, replica: int) -> Path:
    """The file of a replica's list."""
    return folder / f"replica{replica}.json"


def size_of(trajectories: Iterable[Trajectory]) -> int:
    """Bytes of their tensors in memory."""
    return sum(tensor.numel() * tensor.element_size() for one in trajectories for tensor in _tensors(one))


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


def samples_of_begun(group: BegunGroup, row: int) -> list[Sample]:
    """What was sampled of a group, as rows of a sample file."""
    if group.whole is not None:
        return samples_of_group(group.whole, row)
    scores = {index: score for index, score in group.scores.items() if score is not None}
    return [
        Sample(
            one,
            reward=scores[one.sample_index].reward if one.sample_index in scores else None,
            reward_parts=scores[one.sample_index].parts if one.sample_index in scores else None,
            origin=Origin(group.number, row),
        )
        for one in group.trajectories
    ]


def read_group(folder: Path, saved: SavedGroup) -> Group:
    """A group, after its file was compared with the list.

    Raises:
        OSError: there is no such file.
        ValueError: it has another size, checksum or content; the message names it.
    """
    path, samples = _read(folder, saved)
    rewards = [one.reward for one in samples]
    if None in rewards:
        raise ValueError(f"{path} has a sample without a reward")
    parts = [] if samples[0].reward_parts is None else [one.reward_parts or {} for one in samples]
    return Group(saved.number, [one.trajectory for one in samples], rewards, parts)


def read_begun(folder: Path, saved: SavedBegun) -> BegunGroup:
    """What was sampled of a group, after its file was compared with the list.

    Raises:
        OSError, ValueError: as `read_group`.
    """
    if saved.whole:
        return BegunGroup(saved.file.number, whole=read_group(folder, saved.file))
    path, rows = _read(folder, saved.file)
    own: dict[int, list[Sample]] = {}
    for one in rows:
        own.setdefault(one.trajectory.sample_index, []).append(one)
    if sorted(own) != sorted(one.index for one in (*saved.samples, *saved.episodes)):
        raise ValueError(f"{path} holds other samples than the list")
    group = BegunGroup(saved.file.number)
    for sample in saved.samples:
        branches, reward = [one.trajectory for one in own[sample.index]], own[sample.index][0].reward
        group.finish(sample.index, branches, sample.latest)
        if sample.failed:
            group.scores[sample.index] = None
        elif reward is not None:
            group.scores[sample.index] = Score(reward, own[sample.index][0].reward_parts or {})
    for episode in saved.episodes:
        turns = Turns.resumed(own[episode.index][0].trajectory)
        if turns.count != episode.turns:
            raise ValueError(f"{path} has {turns.count} turns of sample {episode.index}, not {episode.turns}")
        group.episodes[episode.index] = EpisodeSoFar(turns, episode.finish_reason, episode.reply)
    return group


def _read(folder: Path, saved: SavedGroup) -> tuple[Path, list[Sample]]:
    """The file of a group, and its rows."""
    path = folder / saved.file_name
    size = os.path.getsize(path)
    if size != saved.bytes:
        raise ValueError(f"{path} has {size} bytes, and had {saved.bytes} when it was written")
    if sha256_of(path) != saved.sha256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not that of the file that was written")
    samples = list(read_trajectories(path))
    if {None if one.origin is None else one.origin.group for one in samples} != {saved.number}:
        raise ValueError(f"{path} holds another group")
    return path, samples

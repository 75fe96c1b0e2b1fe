"""The groups that wait to be trained, in Megatron's checkpoints, and the samples and turns of those that are
being sampled: a run that goes on does not ask for them again.

They are in a folder of the checkpoint (iter_0000040/rollout_waiting), which each replica's data leader
writes in a thread once Megatron's save has returned. What lacks there, or is damaged, is sampled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl_corr.config.flags import flags_by_field
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.tokenizer import FILES
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import sha256_of
from megatron_rl_corr.mcore.checkpoint_files import folders_to_load
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_results, all_reduce_startup, broadcast_made
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.cursor import Drawn, SavedCursor
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.waiting_groups import (
    FOLDER,
    OpenGroups,
    SavedBegun,
    SavedGroup,
    WaitingList,
    Written,
    counts_of,
    list_path,
    read_begun,
    read_group,
    write_waiting,
)

BEING_SAMPLED = "were being sampled"
NOT_SAVED = "it was above --rollout-save-waiting-gib when the checkpoint was saved"
CLOSE_S = 60.0
"""Seconds that a run which ends waits for its groups' files."""
SAMPLED_WITH = (
    *("group_size", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"),
    *("score_centering", "router_replay", "truncated_samples", "group_filter", "on_failed_reward"),
    *("reward_function", "reward_url", "reward_weights", "input_key", "label_key", "apply_chat_template"),
    *("system_prompt", "tools_key", "sampling_key", "chat_template_kwargs"),
    *("agent_tool_parser", "agent_reasoning", "gateway_strict", "indexer_replay"),
)
"""Options whose change makes other samples, rewards or groups."""
FUNCTIONS = ("reward_function", "group_filter")
"""Options that may name functions of the user, FILE.py:NAME."""


def settings_of(options: RunConfig) -> dict[str, Any]:
    """What groups are sampled and scored with, as JSON has it: options, the user's files and the tokenizer's,
    by checksum.

    Raises:
        OSError: a file can't be read.
    """
    maker = options.maker
    made_by = () if maker is None else (*maker.asked_by, maker.turns)
    named = (*SAMPLED_WITH, *made_by)
    settings = {name: value for name, value in vars(options).items() if name in named}  # features may lack
    functions = (*FUNCTIONS, *(() if maker is None else maker.functions))
    for path in sorted({path for name in functions for path in _files_of(getattr(options, name))}):
        settings[f"the file {path}"] = sha256_of(path)
    digest = hashlib.sha256()
    for path in (Path(options.hf_checkpoint) / name for name in (*FILES, "chat_template.jinja")):
        digest.update(sha256_of(path).encode() if path.is_file() else b"-")
    return json.loads(json.dumps(settings | {"tokenizer": digest.hexdigest()}))


def _files_of(specs: str | Sequence[str] | None) -> list[str]:
    """The files of FILE.py:NAME and NAME=FILE.py:NAME."""
    listed = [specs] if isinstance(specs, str) else specs or ()
    paths = [one.rpartition(":")[0] for one in listed]
    paths = [path if Path(path).is_file() else path.partition("=")[2] for path in paths]
    return [path for path in paths if path.endswith(".py") and Path(path).is_file()]


@dataclass(frozen=True)
class SavedGroups:
    """The groups that a checkpoint holds, which a run with these settings can train.

    Example: SavedGroups(Path("checkpoints/iter_0000040/rollout_waiting"), (SavedGroup(6, ...), ...)).
    """

    folder: Path
    groups: tuple[SavedGroup, ...] = ()
    max_lag: int = 0
    """--rollout-max-lag of the run that saved them."""
    lacking: Mapping[int, str] = field(default_factory=dict)
    """Why groups that waited, or were being sampled, are not among them, by their numbers."""
    begun: tuple[SavedBegun, ...] = ()
    """What it holds of groups that were being sampled."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """How many steps behind the checkpoint the run that saved a waiting group would have trained it, by its
    number; a list of an older version does not say it.
    """

    @property
    def has_any(self) -> bool:
        """It holds samples of either kind."""
        return bool(self.groups or self.begun)

    def read(
        self, waiting: Sequence[int], *, version: int, max_lag: int, longest: int, per_step: int
    ) -> list[Group]:
        """Those of the groups that can be trained, in this order. Events name the others, which are sampled
        again.

        Args:
            waiting: numbers of groups.
            version: of the weights that the run begins with.
            max_lag: of this run. Where it is smaller than that of the run that saved them, or a group's step
                comes later than in that run, as steps take fewer, groups that are older when their step takes
                them can't be trained; else they are as old as they were.
            longest: tokens of a sequence, at most.
            per_step: groups that a step takes of them.
        """
        listed = {one.number: one for one in self.groups}

        def made(place: int, number: int) -> Group:
            if number not in listed:
                raise ValueError(self.lacking.get(number, NOT_SAVED))
            group = read_group(self.folder, listed[number])
            steps = place // per_step  # also those that are sampled again keep their place
            later = steps > self.steps.get(number, steps)
            oldest = self._oldest(version + steps, max_lag, later=later)
            _check_usable(group, oldest, longest)
            return group

        found, problems = _each(waiting, made)
        if found:
            EVENTS.tell(
                "groups_restored",
                "they waited at the checkpoint, and are trained without being sampled again",
                groups=list(found),
            )
        for why, numbers in problems.items():
            _tell_sampled_again(why, numbers)
        return list(found.values())

    def read_begun(
        self, numbers: Sequence[int], *, version: int, max_lag: int, longest: int
    ) -> dict[int, BegunGroup]:
        """What was sampled of those of these groups that were being sampled, and can be trained when they are
        complete. Events name the others, which are begun anew. The arguments are as in `read`.
        """
        listed = {one.file.number: one for one in self.begun}

        def made(place: int, number: int) -> BegunGroup:
            if number in self.lacking:
                raise ValueError(self.lacking[number])
            group = read_begun(self.folder, listed[number])
            _check_usable(group, self._oldest(version, max_lag), longest)
            return group

        # what is in neither had no sample yet
        found, problems = _each([one for one in numbers if one in listed or one in self.lacking], made)
        if found:
            samples, turns = counts_of([listed[number] for number in found])
            EVENTS.tell(
                "samples_restored",
                f"{samples} samples and {turns} turns of episodes under way are not sampled again",
                groups=list(found),
                samples=samples,
                turns=turns,
            )
        for why, others in problems.items():
            _tell_sampled_again(why, others, BEING_SAMPLED)
        return found

    def _oldest(self, version: int, max_lag: int, *, later: bool = False) -> int:
        """The oldest version that can be trained at this one. later: the run that saved it would have trained
        it before.
        """
        return version - max_lag if later or max_lag < self.max_lag else 0


def _each[Read](
    numbers: Sequence[int], made: Callable[[int, int], Read]
) -> tuple[dict[int, Read], dict[str, list[int]]]:
    """({number: made(place, number)}; {why it can't be: numbers})."""
    found, problems = {}, {}
    for place, number in enumerate(numbers):
        try:
            found[number] = made(place, number)
        except (OSError, ValueError) as error:
            problems.setdefault(str(error), []).append(number)
    return found, problems


def _check_usable(group: Group | BegunGroup, oldest: int, longest: int) -> None:
    if group.oldest_version < oldest:
        raise ValueError(
            f"stale: it has samples of version {group.oldest_version}, and {oldest} is the oldest that its "
            "step trains now, as --rollout-max-lag or a batch is smaller than it was"
        )
    most = max(len(one.prompt_ids) + len(one.output_ids) for one in group.trajectories)
    if most > longest:
        raise ValueError(f"too long: it has {most} tokens, and --seq-length takes {longest}")


def _tell_sampled_again(why: str, numbers: Sequence[int], which: str = "waited") -> None:
    print(
        f"[rollout] {len(numbers)} groups that {which} at the checkpoint are sampled again: {why}",
        file=sys.stderr,
        flush=True,
    )
    EVENTS.tell("groups_sampled_again", why, groups=list(numbers))


@collective
def load(
    options: RunConfig, args: argparse.Namespace, layout: Layout, saved: SavedCursor | None
) -> tuple[dict[str, Any], SavedGroups | None]:
    """(on data leaders `settings_of` the run, what `broadcast_saved` finds); ({}, None) in a replay. Every
    rank calls it.

    Raises:
        StartupError: on one rank, for a file that can't be read.
        PeerFailure: then, on the others.
    """
    if options.replay is not None:
        return {}, None
    settings = all_reduce_startup(lambda: settings_of(options) if layout.is_data_leader else {})
    return settings, broadcast_saved(args, saved, settings)


@collective
def broadcast_saved(
    args: argparse.Namespace, saved: SavedCursor | None, settings: dict[str, Any]
) -> SavedGroups | None:
    """The groups of the checkpoint that Megatron has loaded, on every rank; None where it has no folder of
    them, of which rank 0 tells. Every rank calls it.

    Args:
        args: Megatron's.
        saved: the cursor of the checkpoint.
        settings: `settings_of` this run.
    """
    if saved is None or not any(replica.open for replica in saved.replicas):
        return None
    return broadcast_made(lambda: _read(args, saved, settings))


def _read(args: argparse.Namespace, saved: SavedCursor, settings: dict[str, Any]) -> SavedGroups | None:
    folders = [folder / FOLDER for folder in folders_to_load(args)]
    folder = next((one for one in folders if one.is_dir()), None)
    if folder is None:
        waiting = [number for replica in saved.replicas for number in replica.waiting]
        if waiting:
            why = f"the checkpoint has no {FOLDER}; an older version saved it, or the run ended in between"
            _tell_sampled_again(why, waiting)
        return None
    groups, begun, max_lag, lacking, steps = [], [], 0, {}, {}
    for rank, replica in enumerate(saved.replicas):
        path = list_path(folder, rank)
        if not replica.waiting and not path.exists():
            continue  # nothing was sampled of those under way, or it was not written
        try:
            listed = WaitingList.parse(path.read_text())
            _check_list(listed, replica, settings)
        except (OSError, ValueError) as error:
            own = (*replica.waiting, *replica.running)
            lacking |= dict.fromkeys(own, f"{path} is not used: {error}")
            continue
        groups += listed.groups
        begun += listed.begun
        max_lag = listed.max_lag
        if listed.per_step is not None:
            steps |= {number: place // listed.per_step for place, number in enumerate(listed.waiting)}
    samples, turns = counts_of(begun)
    print(
        f"[rollout] {len(groups)} groups that wait to be trained are in {folder}, with {samples} samples and "
        f"{turns} turns of {len(begun)} groups that were being sampled",
        flush=True,
    )
    return SavedGroups(folder, tuple(groups), max_lag, lacking, tuple(begun), steps)


def _check_list(listed: WaitingList, replica: Drawn, settings: dict[str, Any]) -> None:
    """ValueError where the list is another checkpoint's, or of other settings."""
    others = {one.file.number for one in listed.begun}.difference(replica.running, replica.again)
    if listed.waiting != replica.waiting or others:
        raise ValueError("it is of another save, as the cursor has other groups")
    for name in sorted({*settings, *listed.settings}):
        one, other = listed.settings.get(name), settings.get(name)
        # a list of an older version lacks options that came later, which are off where nobody gives them; a 0
        # that was given is something else, as of --rollout-on-failed-reward
        lacked = not (name in listed.settings and name in settings)
        if one != other and not (lacked and not one and not other):
            known = flags_by_field().get(name, name)
            raise ValueError(f"its samples are of other settings: {known} {one!r} there, {other!r} here")


class WaitingWriter:
    """Writes what this rank's replica has sampled and not trained into checkpoints, in a thread.

    Args:
        layout: this rank's process groups.
        options: of the run.
        settings: `settings_of` it.
        sampling: what samples are drawn with.
        row_of: the data set's row of a group's number.
    """

    def __init__(
        self,
        layout: Layout,
        options: RunConfig,
        settings: dict[str, Any],
        sampling: SamplingParams,
        row_of: Callable[[int], int],
    ):
        self._layout, self._row_of = layout, row_of
        self._max_bytes = options.save_waiting_gib * 2**30
        self._how = {"settings": settings, "max_lag": options.max_lag, "sampling": sampling}
        self._thread = ThreadPoolExecutor(1, "waiting-groups")
        self._writing = False
        """Some leader's files may not be whole yet."""
        self._files: Future | None = None
        """The writing of this rank's."""

    @collective
    def begin(self, folder: Path | None, groups: OpenGroups) -> None:
        """Begin to write the groups of a checkpoint; every rank calls it.

        Args:
            folder: of the checkpoint, on rank 0; None where it has none.
            groups: of this replica, on its data leader.
        """
        folder = broadcast_made(lambda: folder)
        self._writing, self._files = folder is not None, None
        if folder is not None and self._layout.is_data_leader and (groups.waiting or groups.begun):
            self._files = self._thread.submit(self._write, folder / FOLDER, groups)

    def _write(self, folder: Path, groups: OpenGroups) -> None:
        replica = self._layout.dp_rank
        try:
            written = write_waiting(
                folder, replica, groups, max_bytes=self._max_bytes, row_of=self._row_of, **self._how
            )
        except (OSError, ValueError) as error:  # pyarrow's too: a sample of more ids than a column may have
            for own, which in ((groups.waiting, "wait"), (groups.begun, "are being sampled")):
                if own:
                    numbers = [group.number for group in own]
                    self._tell_not_saved(f"{folder} can't be written: {error}", numbers, which)
            return
        self._tell(written)

    def _tell(self, written: Written) -> None:
        EVENTS.tell(
            "groups_saved",
            f"{len(written.groups)} groups wait; with what was sampled of others {written.bytes} bytes in "
            f"{written.seconds:.3f} s",
            groups=list(written.groups),
            bytes=written.bytes,
            seconds=round(written.seconds, 3),
        )
        if written.begun:
            samples, turns = counts_of(written.begun)
            EVENTS.tell(
                "samples_saved",
                f"{samples} samples and {turns} turns of episodes under way, of {len(written.begun)} groups",
                groups=[one.file.number for one in written.begun],
                samples=samples,
                turns=turns,
            )
        why = f"--rollout-save-waiting-gib {self._max_bytes / 2**30:g} holds no more"
        if written.beyond:
            self._tell_not_saved(why, written.beyond)
        if written.begun_beyond:
            self._tell_not_saved(why, written.begun_beyond, "are being sampled")

    def _tell_not_saved(self, why: str, numbers: Sequence[int], which: str = "wait") -> None:
        print(
            f"[rollout] {len(numbers)} groups that {which} are not in the checkpoint: {why}; a run that "
            "loads it samples them again",
            file=sys.stderr,
            flush=True,
        )
        EVENTS.tell("groups_not_saved", why, groups=list(numbers))

    @collective
    def settle(self) -> None:
        """Wait until the files of the last checkpoint are whole, however long a disk takes; the ranks meet
        meanwhile.
        """
        if self._writing:
            self._writing = False
            all_reduce_results(self._files, lambda _: None)

    def close(self) -> None:
        """Wait for the files of a run that has ended, for a time."""
        if self._files is not None and not wait([self._files], CLOSE_S).done:
            print(
                f"[rollout] waiting groups are not written after {CLOSE_S:g} s", file=sys.stderr, flush=True
            )
        self._thread.shutdown(wait=False)

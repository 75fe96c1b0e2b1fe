"""The samples of a run that people look at: where its files are, those of a step, and what is
known beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.samples.rejected import Rejections, find_rejections, read_correction
from megatron_rl_corr.commands.samples.sample_view import group_of, is_dropped
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import episode_numbers
from megatron_rl_corr.files import CONFIG_NAME
from megatron_rl_corr.rollout.groups import mean_reward
from megatron_rl_corr.rollout.sample_file import Sample, read_batch, read_trajectories
from megatron_rl_corr.rollout.sample_folder import files_by_step, folder_files


@dataclass(frozen=True)
class SavedRun:
    """Sample files by step, and the correction that the run trained with, where its run.json is known."""

    files: dict[int, list[Path]]
    """Step 0: files whose name tells no step."""
    correction: RolloutCorrectionConfig | None
    tool_format: str | None = None
    """How the run read tool calls, a name or auto; None: not known."""

    @classmethod
    def find(cls, paths: Sequence[str]) -> SavedRun:
        """The files that the paths name.

        Args:
            paths: files; or one folder, that of --rollout-log-dir or of --rollout-save-trajectories.

        Raises:
            FileNotFoundError, ValueError: there is no such file or folder, or it has no samples.
        """
        folders = [Path(path) for path in paths if Path(path).is_dir()]
        if not folders:
            for path in paths:
                if not Path(path).is_file():
                    raise FileNotFoundError(f"no such file or folder: {path}")
            named = files_by_step(paths)
            known = {path for files in named.values() for path in files}
            others = [Path(path) for path in paths if Path(path) not in known]
            return cls(named | ({0: others} if others else {}), None)
        if len(paths) > 1:
            raise ValueError(f"give one folder, or files, got {' '.join(paths)}")
        [folder] = folders
        if not (folder / CONFIG_NAME).is_file():
            return cls(folder_files(folder), None)
        files, correction = folder_files(samples_folder(folder)), read_correction(folder)
        return cls(files, correction, path_setting(folder, "agent_tool_parser"))

    def samples(self, step: int) -> list[Sample]:
        """All samples of a step, in the order of its files, without what only training needs.

        Raises:
            ValueError: there is no such step, or a file cannot be read.
        """
        if step not in self.files:
            known = sorted(self.files)
            raise ValueError(
                f"no samples of step {step}: there are files of {len(known)} steps, {known[0]} to "
                f"{known[-1]}; a batch of several updates has the file of its first step"
            )
        return [sample for path in self.files[step] for sample in read_trajectories(path, for_people=True)]

    def rejections(self, samples: Sequence[Sample]) -> list[Rejections | None]:
        """What rejected the tokens of each sample of a whole step; None where it can't be known."""
        known = all(sample.train_logprobs is not None for sample in samples)
        if self.correction is None or not known or not samples:
            return [None] * len(samples)
        return list(find_rejections(samples, self.correction))

    def tokenizer(self, step: int, folder: str | None = None) -> Tokenizer | None:
        """The tokenizer of `folder`, or of the model that the step's files name; None: the model has none.

        Raises:
            ValueError: the folder is not there any more, or its tokenizer can't be loaded.
        """
        batch = read_batch(self.files[step][0]) if folder is None else None
        folder = batch.hf_checkpoint if batch is not None else folder
        if folder is None:
            return None
        if not Path(folder).is_dir():
            raise ValueError(
                f"the model's folder {folder} is not there, and text is made with its tokenizer; give "
                "--tokenizer DIR, or --ids to see ids"
            )
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer is None and batch is None:
            raise ValueError(
                f"--tokenizer {folder}: there is no file of a tokenizer in it; give the model's folder"
            )
        return tokenizer


def run_setting(run_dir: Path, name: str, section: str = "rollout") -> Any:
    """What run.json has under this name of a section; None where it, or run.json, has none.

    Raises:
        ValueError: run.json is not JSON.
    """
    path = run_dir / CONFIG_NAME
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    part = settings.get(section) if isinstance(settings, dict) else None
    return part.get(name) if isinstance(part, dict) else None


def path_setting(run_dir: Path, name: str) -> str | None:
    """The text that run.json has under this name of `rollout`, as `run_setting`."""
    named = run_setting(run_dir, name)
    return named if isinstance(named, str) and named else None


def samples_folder(run_dir: Path) -> Path:
    """Where the run's run.json says that it saved its samples.

    Raises:
        ValueError: it saved none, or they are not where it says.
    """
    try:
        named = path_setting(run_dir, "save_trajectories")
    except ValueError as error:
        raise ValueError(
            f"{run_dir / CONFIG_NAME} is not JSON: {error}; give the sample files themselves"
        ) from error
    if named is None:
        raise ValueError(
            f"{run_dir / CONFIG_NAME}: the run saved no samples; --rollout-save-trajectories DIR does"
        )
    for folder in (Path(named), run_dir / named, run_dir / Path(named).name):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"{run_dir / CONFIG_NAME} says that samples are in {named}, which is not there; give the folder"
    )


def chosen(
    samples: Sequence[Sample], *, group: int | None = None, order: str | None = None, limit: int | None = None
) -> list[range]:
    """The places of the samples that are shown, in order; an episode is one, with all of its branches.

    Args:
        samples: of a step.
        group: only of this group.
        order: worst or best (by reward; those without one last), or dropped (only samples of which nothing
            enters the loss); None: as they are in the file.
        limit: how many, at most.

    Raises:
        ValueError: no sample is of this group.
    """
    episodes = episodes_of(samples)
    if group is not None:
        episodes = [own for own in episodes if group_of(samples[own[0]]) == group]
        if not episodes:
            known = sorted({group_of(sample) for sample in samples})
            raise ValueError(f"no sample of group {group}; the step has {', '.join(map(str, known))}")
    if order == "dropped":
        episodes = [own for own in episodes if all(is_dropped(samples[place]) for place in own)]
    elif order is not None:
        sign = -1 if order == "best" else 1

        def by_reward(own: range) -> float:
            rewards = [samples[place].reward for place in own]
            if None in rewards or any(map(math.isnan, rewards)):
                return math.inf
            return sign * mean_reward(rewards)

        episodes.sort(key=by_reward)
    return episodes[:limit]


def episodes_of(samples: Sequence[Sample]) -> list[range]:
    """The places of each episode's branches, most often one."""
    numbers = episode_numbers([one.trajectory for one in samples])
    starts = [at for at, number in enumerate(numbers) if at == 0 or number != numbers[at - 1]]
    return [range(*pair) for pair in pairwise([*starts, len(numbers)])]

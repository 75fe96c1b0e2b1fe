"""What a run names by its flags, looked at before torch or Megatron is imported: folders, files,
data, functions.

Every check is small, so that a user reads all that is wrong after a second. What is too much for
that, such as all rows of the data, is checked later, as is what hosts other than the first one
have at these paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.fields import WrittenFolder, flag_of, options_of
from megatron_rl_corr.config.groups import SPREAD
from megatron_rl_corr.config.losses import is_own
from megatron_rl_corr.config.problems import Problems, check_each
from megatron_rl_corr.config.reward_specs import parse_rewards
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.sources import first_row
from megatron_rl_corr.data.unloaded import check_unloaded, check_unloaded_reward
from megatron_rl_corr.files import check_writable
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config
from megatron_rl_corr.rollout.sample_folder import folder_files


@dataclass(frozen=True)
class EarlyChecks:
    """The checks of one run; a check that needs a refused flag is left out."""

    config: RolloutCorrectionConfig
    options: RunConfig
    script_folder: str | None = None
    """Folder of the script that will run; None: sys.path has it already."""
    only_checked: bool = False
    """The run is only checked, and its checkpoints may have no weights yet."""

    def collect(self, problems: Problems) -> None:
        """Run all of them, the cheapest first."""
        checks: tuple[Callable[[], object], ...] = (
            self._check_config,
            self._check_quantized,
            self._check_replay,
            self._check_rewards,
            self._check_functions,
            partial(self._check_prompts, "prompts", lambda: self.options.prompts),
            *self._check_further_prompts(),
            *(partial(self._check_written, one) for one in RunConfig.writes),
            partial(self._check_weights, "reference_checkpoint"),
            partial(self._check_weights, "hf_checkpoint"),
        )
        for check in checks:
            with problems.catch():
                check()

    def _check_config(self) -> None:
        with naming_checkpoint(self.options.hf_checkpoint):
            read_config(self.options.hf_checkpoint)

    def _check_weights(self, name: str) -> None:
        folder = getattr(self.options, name)
        if folder is None or (self.only_checked and not any(Path(folder).glob("*.safetensors*"))):
            return
        with naming_checkpoint(folder, flag_of(name)):
            HFCheckpoint(folder).check_files()

    def _check_quantized(self) -> None:
        folder = self.options.quantized_checkpoint
        if folder is not None:
            with naming_checkpoint(folder, "--rollout-quantized-checkpoint"):
                read_config(folder)

    def _check_replay(self) -> None:
        if self.options.replay is None:
            return
        try:
            folder_files(self.options.replay)
        except (ValueError, OSError) as error:
            raise ValueError(f"`replay`: {error}") from None

    def _check_further_prompts(self) -> Iterator[Callable[[], None]]:
        """Check the files of options NAME that have a method NAME_files, as `eval_prompts` has
        `eval_prompt_files`.
        """
        for name in options_of(RunConfig):
            paths = getattr(self.options, f"{name.removesuffix('s')}_files", None)
            if paths is not None:
                yield partial(self._check_prompts, name, paths)

    def _check_prompts(self, name: str, named: Callable[[], Iterable[str]]) -> None:
        options, paths = self.options, named()
        form = PromptFormat(input_key=options.input_key, label_key=options.label_key)

        def check(path: str) -> None:
            try:
                row, where, columns = first_row(path)
                form.check_keys(row, where, columns=columns)
            except (ValueError, OSError) as error:
                raise ValueError(f"{flag_of(name)}: {error}") from None

        check_each(check, paths)

    def _check_rewards(self) -> None:
        """By the names alone: what is wrong with weights, addresses or lengths is no reason to
        pass over a file.
        """
        functions = self.options.reward_function if self.options.replay is None else ()
        problems = Problems()
        for function in functions:
            # One that no reward can be made of is refused with the flags.
            [reward] = problems.check("", lambda function=function: parse_rewards([function], [], [])) or [
                None
            ]
            if reward is not None and reward.kind == "function":
                with problems.catch():
                    check_unloaded_reward(reward.source, reward.flag, self.script_folder)
        problems.raise_all()

    def _check_functions(self) -> None:
        problems = Problems()
        named: Mapping[str, Callable[[], str | None]] = {
            **{
                name: partial(getattr, self.options, name)
                for one in RunConfig.makers
                for name in one.functions
            },
            "group_filter": lambda: (
                None if self.options.group_filter == SPREAD else self.options.group_filter
            ),
            "loss": lambda: self.config.loss if is_own(self.config.loss) else None,
            "advantage": lambda: self.config.advantage_kind if is_own(self.config.advantage_kind) else None,
        }
        for name, given in named.items():
            with problems.catch():
                spec = given()
                if spec is not None:
                    check_unloaded(spec, f"`{name}`", self.script_folder)
        problems.raise_all()

    def _check_written(self, one: WrittenFolder) -> None:
        folder = getattr(self.options, one.option)
        if folder is not None:
            check_writable(folder, one.flag)
            refuse_links(one.flag, Path(folder), one.no_links)


def refuse_links(flag: str, folder: Path, patterns: Iterable[str]) -> None:
    """ValueError for a link in the place of a folder that will be written: it may lead anywhere."""
    for link in (path for pattern in patterns for path in folder.glob(pattern) if path.is_symlink()):
        raise ValueError(
            f"{flag} {folder}: {link.name} in it is a link to {os.readlink(link)}, and nothing is written "
            "through one; remove it, or name another folder"
        )


@contextmanager
def naming_checkpoint(path: str, flag: str | None = None) -> Iterator[None]:
    """Put the flag and the folder before a ValueError about a checkpoint, which names its file
    or tensor alone.

    Args:
        path: of the folder.
        flag: that names it; None: --rollout-hf-checkpoint.
    """
    try:
        yield
    except ValueError as error:
        folder = "" if str(path) in str(error).split() else f" {path}"
        raise ValueError(f"{flag or '--rollout-hf-checkpoint'}{folder}: {error}") from error

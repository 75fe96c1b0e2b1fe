"""Flags made from the dataclasses of options, and the configuration that a command line sets.

A field's flag is --rollout-NAME, its help the docstring under it, its choices the Literal. The standard library and
yaml alone, so that a wrong flag is reported before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import check_given_clips, check_together
from megatron_rl_corr.config.fields import Option, docs_of, options_of
from megatron_rl_corr.config.notation import CorrectionSource
from megatron_rl_corr.config.run import TOPICS, RunConfig

PREFIX = "--rollout-"
CORRECTION = (CorrectionSource, RolloutCorrectionConfig)
"""Their flags make one group, and one configuration."""
RENAMED: dict[str, str] = {}
"""Flags of earlier releases -> what they are called now; the old one is an error that names the new one."""

_NOT_GIVEN = object()


class HelpFormatter(argparse.HelpFormatter):
    """Help whose lines never end within a flag's name."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our groups of flags to Megatron's parser, or to our own."""
    add_group(parser, CORRECTION)
    for topic in TOPICS:
        add_group(parser, (topic,))
    return parser


def add_group(parser: argparse.ArgumentParser, owners: Sequence[type], only: Iterable[str] | None = None) -> None:
    """Add a group with the flags of these dataclasses, named as the last one's docstring begins.

    Args:
        only: names of the options wanted; all where it is left out.
    """
    group = parser.add_argument_group(*title_of(owners[-1]))
    for owner in owners:
        for name, one in options_of(owner).items():
            if one.flag is not None and (only is None or name in only):
                group.add_argument(one.flag, **arguments_of(one, docs_of(owner)[name], overrides=owners == CORRECTION))


def title_of(owner: type) -> tuple[str, str]:
    """(title, what it is about): the two halves of the first line of the dataclass's docstring."""
    title, _, about = owner.__doc__.split("\n")[0].partition(": ")
    return title, about


def arguments_of(one: Option, doc: str, *, overrides: bool) -> dict[str, Any]:
    """What argparse is given; overrides: the flag is laid over a preset or a file, so that False can be said too."""
    default = None if one.required or overrides else one.default
    arguments: dict[str, Any] = {"default": default, "help": help_of(one, doc).replace("%", "%%")}
    if one.kind is bool:
        action = argparse.BooleanOptionalAction if overrides else "store_true"
        return arguments | {"action": action}
    if one.kind is tuple:
        arguments |= {"nargs": "+", "type": one.items}
    elif one.kind in (int, float):
        arguments["type"] = one.kind if one.none is None else _number_or_word
    return arguments | {"metavar": metavar_of(one)}


def metavar_of(one: Option) -> str | None:
    """What stands for the value of a flag in help: its choices, or the word that the field gives."""
    if one.choices:
        return "{" + ",".join(one.choices + ((one.none,) if one.none else ())) + "}"
    return one.metavar


def help_of(one: Option, doc: str, *, whole: bool = True) -> str:
    """A field's docstring in the words of the command line, with its default and what it needs.

    Args:
        whole: with the table of the package that belongs to it.
    """
    needs = [] if one.needs is None else [need.partition("=")[::2] for need in one.needs.split(" or ")]
    parts = [f"with {' or '.join(f'`{name}` {value}'.rstrip() for name, value in needs)}"] if needs else []
    default = one.usual if one.default is None else one.default
    if default not in (None, False, ()) and not one.required:
        parts.append(f"default: {default:g}" if isinstance(default, float) else f"default: {default}")
    text = doc + (f" ({'; '.join(parts)})" if parts else "") + (f" {one.more}" if whole and one.more else "")
    return name_flags(text)


def _number_or_word(text: str) -> float | str:
    """A number; a word as it is, for the dataclass to judge."""
    try:
        return float(text)
    except ValueError:
        return text


@functools.cache
def flags_by_field() -> dict[str, str]:
    """Every option's flag, by the option's name."""
    return {
        name: one.flag for owner in (*CORRECTION, RunConfig) for name, one in options_of(owner).items()
        if one.flag is not None
    }  # fmt: skip


def name_flags(text: object) -> str:
    """A message of the library with each `field` in backticks replaced by its flag, for the user of the launcher."""
    return re.sub(r"`(\w+)`", lambda match: flags_by_field().get(match[1], match[0]), str(text))


def warn(text: object) -> None:
    """Print a warning of a run on stderr, with flags in place of the library's fields."""
    print(f"[rollout] {name_flags(text)}", file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> tuple[RolloutCorrectionConfig, RunConfig]:
    """The correction and the run's options that a command line gives, checked one by one and together.

    Args:
        arguments: the whole command line of a Megatron script; flags that are not ours are left to Megatron.

    Raises:
        ValueError: names the flag, the value and the remedy.
        OSError: the file of --rollout-correction-config can't be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    given, others = given_flags(add_flags(parser), arguments)
    refuse_unknown(parser, others)
    try:
        config = correction_config(given)
        run = _run_config(given)
        check_given_clips(config, given, run.updates_of_batch)
        check_together(config, run)
    except ValueError as error:
        raise ValueError(name_flags(error)) from error
    return config, run


def given_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the options that the command line sets, by their fields' names; the arguments that are not the parser's).

    Raises:
        ValueError: a flag without its value, or one of RENAMED, with the new name.
    """
    fields = {flag: name for name, flag in flags_by_field().items()}
    names = {action.dest: fields[action.option_strings[0]] for action in parser._actions}
    for action in parser._actions:
        flag = action.option_strings[0]
        first = os.environ.get("RANK", "0") == "0"  # one line is enough for all ranks
        if first and action.nargs == "+" and sum(one.split("=")[0] == flag for one in arguments) > 1:
            warn(f"{flag} is given twice: the last one counts; for several values, put all behind one")
    unset = argparse.Namespace(**dict.fromkeys(names, _NOT_GIVEN))
    try:
        values, others = parser.parse_known_args(list(arguments), unset)
    except argparse.ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from None
    for other in others:
        if (name := other.split("=")[0]) in RENAMED:
            raise ValueError(f"{name} is called {RENAMED[name]} now")
    return {names[dest]: value for dest, value in vars(values).items() if value is not _NOT_GIVEN}, others


def refuse_unknown(parser: argparse.ArgumentParser, others: Sequence[str]) -> None:
    """ValueError for an argument that looks like one of our flags and is none.

    Args:
        parser: has our flags.
        others: what it did not take; Megatron's flags are among them.
    """
    known = [flag for action in parser._actions for flag in action.option_strings]
    for other in others:
        name = other.split("=")[0]
        if name.startswith(PREFIX):
            near = [flag for flag in known if flag.startswith(name)] or difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help"
            raise ValueError(f"unknown flag {name}; {hint}")


def _run_config(given: Mapping[str, Any]) -> RunConfig:
    values = {name: given[name] for name in options_of(RunConfig) if name in given}
    for name, one in options_of(RunConfig).items():
        if one.required and not values.get(name):
            raise ValueError(f"{one.flag} is required; see --help")
        if one.kind is tuple and name in values:
            values[name] = tuple(values[name])
    return RunConfig(**values)


def correction_config(given: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """The correction that options make: a preset or a YAML file, and flags over it.

    Args:
        given: option -> value, as `given_flags` returns them; options of the run are left alone.

    Raises:
        ValueError: an unknown preset, a wrong file, or settings that the correction refuses.
    """
    settings = {name: given[name] for owner in CORRECTION for name in options_of(owner) if name in given}
    preset, path = settings.pop("rollout_correction_preset", None), settings.pop("rollout_correction_config", None)
    if preset and path:
        raise ValueError(
            "`rollout_correction_preset` and `rollout_correction_config` both start a configuration; give one (a YAML "
            "file may name a preset under the key `preset`)"
        )
    if preset:
        config = RolloutCorrectionConfig.from_preset(preset, settings)
    elif path:
        # A level given as a flag makes the file's threshold count, where its own level says null.
        level = {} if settings.get("rollout_is") in (None, "none") else {"rollout_is": settings["rollout_is"]}
        config = RolloutCorrectionConfig.from_yaml(path, **level).with_settings(settings)
    else:
        config = RolloutCorrectionConfig().with_settings(settings)
    if config.rollout_is is None and settings.get("rollout_is_threshold") is not None:
        raise ValueError(
            f"`rollout_is_threshold` {settings['rollout_is_threshold']} has no effect without weights; add "
            "`rollout_is` token, or drop it"
        )
    return config

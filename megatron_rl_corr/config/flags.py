"""Flags made from the dataclasses of options, and the configuration that a command line sets.

A field's flag is --rollout-NAME, its help the docstring under it, its choices the Literal. The standard
library and yaml alone, so that a wrong flag is reported before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import check_given_clips, check_together
from megatron_rl_corr.config.dialects import in_our_words
from megatron_rl_corr.config.fields import Option, check_values, docs_of, make, options_of
from megatron_rl_corr.config.notation import CorrectionSource
from megatron_rl_corr.config.problems import Nothing, Problems, Refusal, Unknown
from megatron_rl_corr.config.run import TOPICS, RunConfig
from megatron_rl_corr.tables import one_message

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


def add_group(
    parser: argparse.ArgumentParser, owners: Sequence[type], only: Iterable[str] | None = None
) -> None:
    """Add a group with the flags of these dataclasses, named as the last one's docstring begins.

    Args:
        only: names of the options wanted; all where it is left out.
    """
    group = parser.add_argument_group(*title_of(owners[-1]))
    for owner in owners:
        for name, one in options_of(owner).items():
            if one.flag is not None and (only is None or name in only):
                group.add_argument(
                    one.flag, **arguments_of(one, docs_of(owner)[name], overrides=owners == CORRECTION)
                )


def title_of(owner: type) -> tuple[str, str]:
    """(title, what it is about): the two halves of the first paragraph of the dataclass's docstring."""
    title, _, about = " ".join(owner.__doc__.split("\n\n")[0].split()).partition(": ")
    return title, about


def arguments_of(one: Option, doc: str, *, overrides: bool) -> dict[str, Any]:
    """What argparse is given; overrides: the flag is laid over a preset or a file, so that False
    can be said too.
    """
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
        name: one.flag
        for owner in (*CORRECTION, RunConfig)
        for name, one in options_of(owner).items()
        if one.flag is not None
    }


def name_flags(text: object) -> str:
    """A message of the library with each `field` in backticks replaced by its flag, for the user
    of the launcher.
    """
    return re.sub(r"`(\w+)`", lambda match: flags_by_field().get(match[1], match[0]), str(text))


def warn(text: object) -> None:
    """Print a warning of a run on stderr, with flags in place of the library's fields."""
    print(one_message(f"[rollout] {name_flags(text)}"), file=sys.stderr, flush=True)


class Given(NamedTuple):
    """What a command line gives."""

    values: dict[str, Any]
    """By the options' names."""
    others: list[str]
    """Words that are not ours: Megatron's flags among them."""
    unknown: set[str]
    """Options that were given wrongly, or under a wrong name: what they would be is not known."""


def parse(arguments: Sequence[str]) -> tuple[RolloutCorrectionConfig, RunConfig]:
    """The correction and the run's options that a command line gives, checked one by one and together.

    Args:
        arguments: the whole command line of a Megatron script; flags that are not ours are left to Megatron.

    Raises:
        ValueError: names each flag that is wrong, its value and the remedy.
    """
    problems = Problems()
    config, run = read(arguments, problems)
    if problems:
        raise Refusal(problems.found).each(name_flags)
    return config, run


def read(arguments: Sequence[str], problems: Problems) -> tuple[RolloutCorrectionConfig, RunConfig]:
    """As `parse`, for who collects problems: of what is refused nothing can be read in the options
    that are returned.

    Args:
        arguments: the whole command line.
        problems: gets what is refused.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    given = given_flags(add_flags(parser), arguments, problems)
    fields = {flag: name for name, flag in flags_by_field().items()}
    given.unknown.update(fields[flag] for flag in meant_by_unknown(parser, given.others, problems))
    config = read_correction(given, problems)
    run = _run_config(given, problems)
    with problems.catch():
        check_given_clips(config, given.values, run.updates_of_batch)
    with problems.catch():
        check_together(config, run)
    return config, run


def given_flags(parser: argparse.ArgumentParser, arguments: Sequence[str], problems: Problems) -> Given:
    """The options that a command line sets.

    Args:
        parser: has our flags.
        arguments: the whole command line.
        problems: gets flags without their value, or with one of another type, and those of RENAMED,
            with the new name.
    """
    fields = {flag: name for name, flag in flags_by_field().items()}
    names = {action.dest: fields[action.option_strings[0]] for action in parser._actions}
    for action in parser._actions:
        flag = action.option_strings[0]
        first = os.environ.get("RANK", "0") == "0"  # one line is enough for all ranks
        if first and action.nargs == "+" and sum(one.split("=")[0] == flag for one in arguments) > 1:
            warn(f"{flag} is given twice: the last one counts; for several values, put all behind one")
    words, unknown = list(arguments), set()
    while True:
        unset = argparse.Namespace(**dict.fromkeys(names, _NOT_GIVEN))
        try:
            values, others = parser.parse_known_args(words, unset)
            break
        except argparse.ArgumentError as error:
            problems.add(str(error).removeprefix("argument "))
            [wrong] = [one for one in parser._actions if "/".join(one.option_strings) == error.argument_name]
            unknown.add(names[wrong.dest])
            words = _without_flag(words, wrong.option_strings)
    renamed = [flag for other in others if (flag := other.split("=")[0]) in RENAMED]
    for flag in renamed:
        problems.add(f"{flag} is called {RENAMED[flag]} now")
        unknown.add(fields[RENAMED[flag]])
    return Given(
        {names[dest]: value for dest, value in vars(values).items() if value is not _NOT_GIVEN},
        [other for other in others if other.split("=")[0] not in renamed],
        unknown,
    )


def _without_flag(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command line without a flag and its values. names: of the flag."""
    left, drops = [], False
    for word in words:
        if word.startswith("--"):
            drops = word.split("=")[0] in names
        if not drops:
            left.append(word)
    return left


def meant_by_unknown(
    parser: argparse.ArgumentParser, others: Sequence[str], problems: Problems
) -> Iterator[str]:
    """The flags that are meant by arguments which look like ours and are none; problems gets those.

    Args:
        parser: has our flags.
        others: what it did not take; Megatron's flags are among them.
        problems: see above.
    """
    known = {flag: action.option_strings[0] for action in parser._actions for flag in action.option_strings}
    for other in others:
        name = other.split("=")[0]
        if name.startswith(PREFIX):
            near = [flag for flag in known if flag.startswith(name)] or difflib.get_close_matches(
                name, known, n=1
            )
            hint = f"did you mean {near[0]}?" if near else "see --help"
            problems.add(f"unknown flag {name}; {hint}")
            yield from map(known.get, near[:1])


def _run_config(given: Given, problems: Problems) -> RunConfig:
    values = {name: given.values[name] for name in options_of(RunConfig) if name in given.values}
    unknown = given.unknown & options_of(RunConfig).keys()
    for name, one in options_of(RunConfig).items():
        if one.required and not values.get(name) and name not in unknown:
            problems.add(f"{one.flag} is required; see --help")
            unknown.add(name)
        if one.kind is tuple and name in values:
            values[name] = tuple(values[name])
    return make(RunConfig, values, problems, unknown)


def read_correction(given: Given, problems: Problems) -> RolloutCorrectionConfig:
    """As `correction_config`, for who collects problems; of what is refused nothing can be read in
    what is returned.
    """
    try:
        return correction_config(given.values, given.unknown)
    except Refusal as error:
        problems.add(error)
        return Nothing() if error.partial is None else error.partial
    except Unknown:
        return Nothing()


def correction_config(given: Mapping[str, Any], unknown: Collection[str] = ()) -> RolloutCorrectionConfig:
    """The correction that options make: a preset or a YAML file, and flags over it.

    Args:
        given: option -> value, as `given_flags` returns them; options of the run are left alone.
        unknown: options that were given wrongly.

    Raises:
        ValueError: an unknown preset, a file that is wrong or can't be read, or settings that the
            correction refuses.
    """
    settings = {name: given[name] for owner in CORRECTION for name in options_of(owner) if name in given}
    preset, path = (
        settings.pop("rollout_correction_preset", None),
        settings.pop("rollout_correction_config", None),
    )
    try:
        config = _begun(preset, path, settings, unknown)
    except Refusal as error:
        if error.partial is not None:
            raise
        # Of what the settings would be laid over nothing is known: each can be judged alone.
        problems = Problems()
        problems.add(error)
        check_values(RolloutCorrectionConfig, in_our_words(settings), problems)
        raise Refusal(problems.found) from error
    if config.rollout_is is None and settings.get("rollout_is_threshold") is not None:
        why = "without weights; add `rollout_is` token, or drop it"
        if given.get("correction") is not None:
            why = "with `correction` auto, which bounds them itself; drop it"
        threshold = settings["rollout_is_threshold"]
        raise Refusal([f"`rollout_is_threshold` {threshold} has no effect {why}"], config)
    if given.get("correction") is None:
        return config
    return _begun_auto(config, "batch_mean" if given.get("group_size") == 1 else "group_mean")


def _begun_auto(config: RolloutCorrectionConfig, with_baseline: str) -> RolloutCorrectionConfig:
    """The correction with the weights that a run which chooses them begins with.

    with_baseline: the advantage in the place of raw, of which bounded weights leave a part.
    """
    refused = {
        f"drop `rollout_is` {config.rollout_is}, and a preset that has it": config.rollout_is is not None,
        "in bypass mode weights are of each microbatch's policy, for which the rule was not measured; drop "
        "`bypass_mode`": config.bypass_mode,
        "`diagnostics_only` promises that the correction changes nothing; drop one of them": (
            config.diagnostics_only
        ),
    }
    given = [text for text, is_given in refused.items() if is_given]
    if given:
        raise Refusal([f"`correction` auto chooses the weights: {text}" for text in given], config)
    if config.advantage_kind == "raw":
        config = dataclasses.replace(config, advantage=with_baseline)
    # the bound that it trains with follows from the size of its batch
    return dataclasses.replace(config, rollout_is="token", rollout_is_upper=2.0)


def _begun(
    preset: str | None, path: str | None, settings: Mapping[str, Any], unknown: Collection[str]
) -> RolloutCorrectionConfig:
    """The correction that a preset or a file begins, with settings over it."""
    if preset and path:
        raise Refusal(
            [
                "`rollout_correction_preset` and `rollout_correction_config` both start a configuration; "
                "give one (a YAML file may name a preset under the key `preset`)"
            ]
        )
    if preset:
        return RolloutCorrectionConfig.from_preset(preset, settings, unknown)
    if path:
        # A level given as a flag makes the file's threshold count, where its own level says null.
        level = {} if settings.get("rollout_is") in (None, "none") else {"rollout_is": settings["rollout_is"]}
        try:
            begun = RolloutCorrectionConfig.from_yaml(path, **level)
        except OSError as error:
            raise Refusal(
                [f"`rollout_correction_config` {error.filename} cannot be read: {error.strerror}"]
            ) from error
        except Refusal as error:
            raise Refusal(error.problems) from error
        return begun.with_settings(settings, unknown)
    if not {"rollout_correction_preset", "rollout_correction_config"}.isdisjoint(unknown):
        raise Unknown("rollout_correction_preset")
    return RolloutCorrectionConfig().with_settings(settings, unknown)

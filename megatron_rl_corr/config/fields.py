"""What one option is: a field of a frozen dataclass, whose annotation, docstring and metadata say
everything about it.

The flag, its help, its check and its row in the reference pages are made from the field; none is
written elsewhere.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from megatron_rl_corr.config.checks import check_bool, is_number, one_of, plain
from megatron_rl_corr.config.problems import Problems, Unknown


@dataclass(frozen=True)
class Positive:
    """In Annotated[float, Positive()]: the number is above 0."""

    remedy: str = ""
    """What an error adds, such as "0.04 is usual"."""
    finite: bool = False

    def check(self, what: str, value: float) -> None:
        """ValueError, which begins with `what`, unless 0 < value (and value < inf, with `finite`)."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        if not value > 0:
            raise ValueError(f"{what} must be positive, got {plain(value)}{remedy}")
        if self.finite and value == math.inf:
            raise ValueError(f"{what} must be finite, got inf{remedy}")


@dataclass(frozen=True)
class Between:
    """In Annotated[float, Between(0, 1)]: the number is in the closed interval; without
    `high`, at least `low`.
    """

    low: float
    high: float | None = None
    remedy: str = ""
    finite: bool = False

    def check(self, what: str, value: float) -> None:
        """ValueError, which begins with `what`, unless low <= value <= high (and value <
        inf, with `finite`).
        """
        remedy = f"; {self.remedy}" if self.remedy else ""
        if not self.low <= value or (self.high is not None and value > self.high):
            interval = (
                f"at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"
            )
            raise ValueError(f"{what} must be {interval}, got {plain(value)}{remedy}")
        if self.finite and value == math.inf:
            raise ValueError(f"{what} must be finite, got inf{remedy}")


def option(
    default: Any = dataclasses.MISSING,
    *,
    flag: str | None = "",
    metavar: str | None = None,
    none: str | None = None,
    choices: Sequence[str] | None = None,
    needs: str | None = None,
    usual: Any = None,
    more: str = "",
    required_unless: str | None = None,
) -> Any:
    """A field of `Options`, with what its annotation can't say.

    Args:
        default: its value where none is given; without one the option is required.
        flag: its flag where that is not made from its name; None: it has no flag.
        metavar: what stands for its value in help.
        none: the word that stands for None (in a list: for none) in YAML and in flags.
        choices: the values allowed, where they are a table's keys and no Literal.
        needs: the option without which it has no effect, as "environment" or "router_replay=R3"; or one of
            several, as "reward_function or reward_url".
        usual: its value where it is not given and what it needs is there.
        more: follows the docstring in help and in tables, as it is made from a table of the package.
        required_unless: it must be given, except where this other option is, or one of several, as "replay or
            servers_file".
    """
    metadata = {
        "flag": flag,
        "metavar": metavar,
        "none": none,
        "choices": choices,
        "needs": needs,
        "usual": usual,
        "more": more,
        "required_unless": required_unless,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One field, read for its flag, its checks and its row of a table."""

    name: str
    kind: type
    """bool, int, float, str, tuple (of `items`) or object (checked by the dataclass itself)."""
    items: type
    """str or float, for a tuple."""
    optional: bool
    """It may be None."""
    choices: tuple[str, ...]
    bounds: tuple[Positive | Between, ...]
    default: Any
    flag: str | None
    metavar: str | None
    none: str | None
    needs: str | None
    usual: Any
    more: str
    required_unless: str | None

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING

    def check(self, value: Any) -> None:
        """ValueError unless the value is of the option's type, one of its choices and within its bounds."""
        what = f"`{self.name}`"
        if value is None and self.optional:
            return
        if self.choices:
            one_of(what, value, self.choices, also=self.none)
        elif self.kind is bool:
            check_bool(what, value)
        elif self.kind in (int, float):
            number = "a whole number" if self.kind is int else "a number"
            if not is_number(value) or (self.kind is int and not isinstance(value, int)):
                raise ValueError(
                    f"{what} must be {number}{f' or {self.none}' if self.none else ''}, got {value!r}"
                )
        elif self.kind is str and not isinstance(value, str):
            raise ValueError(f"{what} must be text, got {value!r}")
        elif self.kind is tuple and (isinstance(value, str) or not all(map(self._is_item, value))):
            raise ValueError(
                f"{what} must be a list of {'texts' if self.items is str else 'numbers'}, got {value!r}"
            )
        for bound in self.bounds:
            bound.check(what, value)

    def _is_item(self, value: Any) -> bool:
        return isinstance(value, str) if self.items is str else is_number(value)


def flag_of(name: str) -> str:
    """The flag that is made from an option's name: --rollout-group-size of group_size."""
    return "--rollout-" + name.removeprefix("rollout_").replace("_", "-")


@dataclass(frozen=True)
class WrittenFolder:
    r"""A folder that an option names and a run writes.

    Example: WrittenFolder("trace", by="leaders", step_files=r"step_(\d+)_replica(\d+)\.json").
    """

    option: str
    by: Literal["leaders", "senders"]
    """The ranks that ask for samples, or those that send weights and rank 0."""
    no_links: tuple[str, ...] = ()
    """Patterns of names in it that must not be links, which may lead anywhere."""
    step_files: str | None = None
    """Its files, their first step as the first group: those of steps that are done anew are removed."""

    @property
    def flag(self) -> str:
        """Its option's."""
        return flag_of(self.option)


@dataclass(frozen=True)
class EpisodeMaker:
    """What makes a run's samples where options of a topic ask for it, in the place of one response a prompt.

    Example: EpisodeMaker(("environment",), "max_turns", "megatron_rl_corr.rollout.episodes:episodes_of").
    """

    asked_by: tuple[str, ...]
    """Options any of which asks for it."""
    turns: str
    """The option that bounds the turns of an episode."""
    make: str
    """module:function(options, tokenizer, seq_length=..., replica=...) -> a rollout.episodes.SampleMaker."""
    functions: tuple[str, ...] = ()
    """Options that name the user's functions, FILE.py:NAME."""
    bounds_turns: bool = False
    """`max_new_tokens` bounds each turn alone, and --seq-length all of them."""
    needs_packs: bool = False
    """A sample may have any number of sequences, which padded rows do not go with."""


class Options:
    """Base of a frozen dataclass that checks itself when it is made, and refuses everything that
    is wrong at once.

    First every field by its annotation and `option(...)`, then all together by the methods `check` and
    `check_...`, which each class of the inheritance may define for its own fields: one method for each
    thing that may be wrong. A method that reads a field whose value was refused is left out.
    """

    acts_in_replay: ClassVar[bool] = True
    """Whether its options have an effect where saved samples are trained on."""
    writes: ClassVar[tuple[WrittenFolder, ...]] = ()
    """Folders that its options name; those of RunConfig are of all its topics."""
    makes_samples: ClassVar[EpisodeMaker | None] = None
    """Its topic may say what makes samples."""

    def __post_init__(self) -> None:
        problems = Problems()
        problems.raise_all(self.collect(problems))

    def collect(self, problems: Problems, unknown: Iterable[str] = ()) -> Self:
        """Check all fields.

        Args:
            problems: gets what is refused.
            unknown: fields whose values were refused before this was made.

        Returns:
            This object, or one in its place of which no refused field can be read.
        """
        known, words, refused = options_of(type(self)), [], set(unknown)
        for name in known.keys() - refused:
            one = known[name]
            if one.none is not None and getattr(self, name) in (one.none, (one.none,)):
                object.__setattr__(self, name, () if one.kind is tuple else None)
                words.append(name)
        refused |= {
            name
            for name, one in known.items()
            if name not in refused
            and not problems.accepts(lambda one=one: one.check(getattr(self, one.name)))
        }
        seen = _without(self, refused)
        useless = {
            name
            for name, one in known.items()
            if not problems.accepts(lambda one=one: seen._check_given(one, given_as_word=one.name in words))
        }
        seen = _without(seen, refused | useless)
        for check in checks_of(type(self)):
            with problems.catch():
                check(seen)
        return seen

    def _check_given(self, one: Option, *, given_as_word: bool) -> None:
        """ValueError for an option that has no effect, or that is required and not given."""
        self._check_need(one, given_as_word=given_as_word)
        if one.required_unless and not getattr(self, one.name):
            others = one.required_unless.split(" or ")
            if not any(hasattr(self, other) and getattr(self, other) for other in others):
                raise ValueError(f"`{one.name}` is required; see --help")

    def _check_need(self, one: Option, *, given_as_word: bool) -> None:
        """ValueError for an option without what it needs; its usual value where it is not given and has it.

        given_as_word: None was given by its word, such as drop, and is no option left out.
        """
        if one.needs is None:
            return
        wants = [need.partition("=")[::2] for need in one.needs.split(" or ")]
        value = getattr(self, one.name)
        if any(getattr(self, other) == wanted if wanted else getattr(self, other) for other, wanted in wants):
            if value is None and one.usual is not None:
                object.__setattr__(self, one.name, one.usual)
        elif value != one.default or given_as_word:
            value = one.none if given_as_word else value
            values = value if isinstance(value, tuple) else (value,)
            given = "".join(
                f" {one:g}" if isinstance(one, float) else f" {one}" for one in values if one is not True
            )
            needed = " or ".join(f"`{other}`{f' {wanted}' if wanted else ''}" for other, wanted in wants)
            raise ValueError(f"`{one.name}`{given} has no effect without {needed}; drop it, or add {needed}")

    def check(self) -> None:
        """ValueError for fields that do not go together."""


@functools.cache
def checks_of(owner: type) -> tuple[Callable[[Any], None], ...]:
    """The methods `check` and `check_...` of a dataclass and of those it inherits from, the
    last one's first.
    """
    return tuple(
        method
        for base in reversed(owner.__mro__)
        for name, method in vars(base).items()
        if inspect.isfunction(method) and (name == "check" or name.startswith("check_"))
    )


def _without[Given: Options](options: Given, names: Iterable[str]) -> Given:
    """The options, or where some have no usable value a copy, of which these raise Unknown
    when they are read.
    """
    refused = frozenset(names)
    if not refused:
        return options
    seen = object.__new__(_partial_class(type(options), refused))
    vars(seen).update({name: value for name, value in vars(options).items() if name not in refused})
    return seen


@functools.cache
def _partial_class(owner: type, refused: frozenset[str]) -> type:
    def unknown(name: str) -> property:
        def read(self: Any) -> Any:
            raise Unknown(name)

        return property(read)

    return type(owner.__name__, (owner,), {name: unknown(name) for name in refused})


def make[Made: Options](
    owner: type[Made], values: Mapping[str, Any], problems: Problems, unknown: Iterable[str] = ()
) -> Made:
    """Options of a dataclass, as far as they can be made.

    Args:
        owner: the dataclass.
        values: of its fields; the others have their defaults.
        problems: gets what is refused.
        unknown: fields whose values were refused before, or that lack; they need no value.

    Returns:
        The options; of a refused field, or one of `unknown`, nothing can be read.
    """
    made = object.__new__(owner)
    vars(made).update(
        {field.name: values.get(field.name, field.default) for field in dataclasses.fields(owner)}
    )
    return made.collect(problems, unknown)


def check_values(owner: type, values: Mapping[str, Any], problems: Problems) -> None:
    """Judge values each by itself, where it is not known what they will stand beside.

    Args:
        owner: the dataclass.
        values: of its fields; other keys are passed over.
        problems: gets what is refused.
    """
    for name, one in options_of(owner).items():
        if name in values and values[name] != one.none:
            problems.accepts(lambda one=one: one.check(values[one.name]))


@functools.cache
def options_of(owner: type) -> dict[str, Option]:
    """The options of a dataclass by name, in their order.

    Args:
        owner: a subclass of Options.
    """
    hints = typing.get_type_hints(owner, include_extras=True)
    return {field.name: _option(field, hints[field.name]) for field in dataclasses.fields(owner)}


def _option(field: dataclasses.Field, hint: Any) -> Option:
    given = field.metadata or option().metadata
    bounds: tuple = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *extras = typing.get_args(hint)
        bounds = tuple(extras)
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    choices = tuple(given["choices"] or ())
    if typing.get_origin(hint) is Literal:
        choices, hint = typing.get_args(hint), str
    kind = typing.get_origin(hint) or hint
    items = typing.get_args(hint)[0] if kind is tuple else object
    if kind is tuple and items not in (str, float):
        kind = object
    return Option(
        field.name,
        kind,
        items,
        optional,
        choices,
        bounds,
        field.default,
        flag_of(field.name) if given["flag"] == "" else given["flag"],
        given["metavar"],
        given["none"],
        given["needs"],
        given["usual"],
        given["more"],
        given["required_unless"],
    )


@functools.cache
def docs_of(owner: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and of those it inherits from, on one line each."""
    found = {}
    for base in reversed(owner.__mro__[:-1]):
        found |= _docs_of_module(base.__module__).get(base.__name__, {})
    return found


@functools.cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: {
            field.target.id: " ".join(text.value.value.split())
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign)
            and not ast.unparse(field.annotation).startswith("ClassVar")
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }

"""What one option is: a field of a frozen dataclass, whose annotation, docstring and metadata say everything about it.

The flag, its help, its check and its row in the reference pages are made from the field; none is written elsewhere.
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rl_corr.config.checks import check_bool, is_number, one_of, plain


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
    """In Annotated[float, Between(0, 1)]: the number is in the closed interval; without `high`, at least `low`."""

    low: float
    high: float | None = None
    remedy: str = ""
    finite: bool = False

    def check(self, what: str, value: float) -> None:
        """ValueError, which begins with `what`, unless low <= value <= high (and value < inf, with `finite`)."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        if not self.low <= value or (self.high is not None and value > self.high):
            interval = f"at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"
            raise ValueError(f"{what} must be {interval}, got {plain(value)}{remedy}")
        if self.finite and value == math.inf:
            raise ValueError(f"{what} must be finite, got inf{remedy}")


def option(
    default: Any = dataclasses.MISSING, *, flag: str | None = "", metavar: str | None = None, none: str | None = None,
    choices: Sequence[str] | None = None, needs: str | None = None, usual: Any = None,
    more: str = "", required_unless: str | None = None,
) -> Any:  # fmt: skip
    """A field of `Options`, with what its annotation can't say.

    Args:
        default: its value where none is given; without one the option is required.
        flag: its flag where that is not made from its name; None: it has no flag.
        metavar: what stands for its value in help.
        none: the word that stands for None (in a list: for none) in YAML and in flags.
        choices: the values allowed, where they are a table's keys and no Literal.
        needs: the option without which it has no effect, as "environment" or "router_replay=R3"; or one of several, as
            "reward_function or reward_url".
        usual: its value where it is not given and what it needs is there.
        more: follows the docstring in help and in tables, as it is made from a table of the package.
        required_unless: it must be given, except where this other option is.
    """
    metadata = {"flag": flag, "metavar": metavar, "none": none, "choices": choices, "needs": needs, "usual": usual,
                "more": more, "required_unless": required_unless}
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
        """Whether it has no default."""
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
                raise ValueError(f"{what} must be {number}{f' or {self.none}' if self.none else ''}, got {value!r}")
        elif self.kind is str and not isinstance(value, str):
            raise ValueError(f"{what} must be text, got {value!r}")
        elif self.kind is tuple and (isinstance(value, str) or not all(map(self._is_item, value))):
            raise ValueError(f"{what} must be a list of {'texts' if self.items is str else 'numbers'}, got {value!r}")
        for bound in self.bounds:
            bound.check(what, value)

    def _is_item(self, value: Any) -> bool:
        return isinstance(value, str) if self.items is str else is_number(value)


class Options:
    """Base of a frozen dataclass that checks itself when it is made.

    First every field by its annotation and `option(...)`, then all together by `check`, which each class of the
    inheritance may define for its own fields.
    """

    def __post_init__(self) -> None:
        known, words = options_of(type(self)), []
        for name, one in known.items():
            if one.none is not None and getattr(self, name) in (one.none, (one.none,)):
                object.__setattr__(self, name, () if one.kind is tuple else None)
                words.append(name)
            one.check(getattr(self, name))
        for name, one in known.items():
            self._check_need(one, given_as_word=name in words)
            if one.required_unless and not getattr(self, name) and not vars(self).get(one.required_unless):
                raise ValueError(f"`{name}` is required; see --help")
        for owner in reversed(type(self).__mro__):
            if "check" in vars(owner):
                vars(owner)["check"](self)

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
            given = "".join(f" {one:g}" if isinstance(one, float) else f" {one}" for one in values if one is not True)
            needed = " or ".join(f"`{other}`{f' {wanted}' if wanted else ''}" for other, wanted in wants)
            raise ValueError(f"`{one.name}`{given} has no effect without {needed}; drop it, or add {needed}")

    def check(self) -> None:
        """ValueError for fields that do not go together."""


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
    derived = "--rollout-" + field.name.removeprefix("rollout_").replace("_", "-")
    return Option(
        field.name, kind, items, optional, choices, bounds, field.default,
        derived if given["flag"] == "" else given["flag"], given["metavar"], given["none"], given["needs"],
        given["usual"], given["more"], given["required_unless"],
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
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for node in tree.body if isinstance(node, ast.ClassDef)
    }  # fmt: skip

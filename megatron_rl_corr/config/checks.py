"""Checks of single values; an error names the field in backticks, the value and the remedy.

A library speaks of fields; where the value came from a flag, `flags.name_flags` puts the flag in
the field's place.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

NO_RULES = "`rollout_rs` none to disable rejection"
NO_WEIGHTS = "`rollout_is` none to disable the weights"


def check_bounds(what: str, lower: float | None, upper: float | None, remedy: str) -> None:
    """ValueError unless the bounds that are given are positive, finite and in order.

    Args:
        what: the setting, in backticks; begins the error.
        lower, upper: None where there is no such bound.
        remedy: follows "use" in an error about the upper bound.
    """
    small = "a small one, such as 1e-9, to keep everything below"
    for side, value, use in (("lower", lower, small), ("upper", upper, remedy)):
        if value is not None:
            check_positive(f"{what} {side} bound", value, f"use {use}")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(
            f"{what} lower bound {plain(lower)} is above the upper bound {plain(upper)}; swap them"
        )


def check_positive(what: str, value: Any, remedy: str) -> None:
    """ValueError unless the value is a positive, finite number."""
    if not is_number(value):
        raise ValueError(f"{what} must be a number, got {value!r}; {remedy}")
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {plain(value)}; {remedy}")
    if value == math.inf:
        raise ValueError(f"{what} must be finite, got inf; {remedy}")


def check_bool(what: str, value: Any) -> None:
    """ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {plain(value)}")


def is_number(value: Any) -> bool:
    """True if it is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(value: Any) -> str:
    """A value as an error shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def one_of(what: str, value: Any, choices: Iterable[str], also: str | None = None) -> None:
    """ValueError naming the choices, and the nearest, unless the value is one of them.

    Args:
        what: the setting, in backticks; begins the error.
        value: as it was given.
        choices: the values allowed.
        also: a word that is listed with them, and was replaced before.
    """
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(choices + ((also,) if also else ()))
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} must be one of {listed}; got {value!r}{hint}")


def close_to(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """The known name that was meant, where one is near; else none."""
    return difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or all."""
    known = list(known)
    near = close_to(name, known, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"

"""How a refused setting is told: the flag, the rule, the value and the remedy; stdlib only."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

NO_RULES = "--rollout-rs none to disable rejection"
NO_WEIGHTS = "--rollout-is none to disable the weights"


def check_bounds(flag: str, lower: float | None, upper: float | None, remedy: str) -> None:
    """ValueError unless the given bounds are positive, finite and in order; `remedy` follows "use"."""
    small = "a small one, such as 1e-9, to keep everything below"
    for side, value, use in (("lower", lower, small), ("upper", upper, remedy)):
        if value is not None:
            check_positive(f"{flag} {side} bound", value, f"use {use}")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{flag} lower bound {plain(lower)} is above the upper bound {plain(upper)}; swap them")


def check_positive(flag: str, value: Any, remedy: str) -> None:
    """ValueError unless the value is a positive, finite number."""
    if not is_number(value):
        raise ValueError(f"{flag} must be a number, got {value!r}; {remedy}")
    if not value > 0:
        raise ValueError(f"{flag} must be positive, got {plain(value)}; {remedy}")
    if value == math.inf:
        raise ValueError(f"{flag} must be finite, got inf; {remedy}")


def check_bool(flag: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{flag} must be true or false, got {plain(value)}")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(value: Any) -> str:
    """A value as an error shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def one_of(flag: str, value: Any, choices: Iterable[str], also: str | None = None) -> None:
    """ValueError naming the choices, and the nearest, unless the value is one of them."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(choices + ((also,) if also else ()))
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{flag} must be one of {listed}; got {value!r}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"

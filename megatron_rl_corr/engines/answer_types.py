"""What a field of a control answer may hold: a table of an engine says it, and one function checks it.

So whoever reads an answer later finds there what the table says, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl_corr.engines.errors import shown


@dataclass(frozen=True)
class Kind:
    """One kind of value."""

    words: str
    """What it is, for messages."""
    holds: Callable[[Any], bool]
    """Whether a value is of it."""
    required: bool = False
    """True if the field must be there."""

    def or_null(self) -> Kind:
        """The same, or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.holds(value))

    def always(self) -> Kind:
        """The same, and the field must be there: an answer without it is not one to this request."""
        return replace(self, required=True)


Fields = Mapping[str, "Kind | Fields"]
"""Name of a field -> what it holds: a kind, or the fields of an object, which may be null."""

DONE = Kind("true", lambda value: value is True).always()
"""Required `true` that confirms an action."""
COUNT = Kind("an integer of at least 1", lambda value: type(value) is int and value >= 1)
FLAG = Kind("true, false or null", lambda value: value is None or type(value) is bool)
TEXT = Kind("a text of at most 4096 characters", lambda value: type(value) is str and len(value) <= 4096)
SCALAR = Kind("a text, a number, true, false or null", lambda value: not isinstance(value, (list, dict)))
OK = Kind('"ok"', lambda value: value == "ok").always()
LIST = Kind("a list", lambda value: type(value) is list)
IDS = Kind("a list of integers", lambda value: type(value) is list and set(map(type, value)) <= {int})
OBJECT = Kind("an object", lambda value: type(value) is dict)
OBJECTS = Kind("a list of objects", lambda value: type(value) is list and set(map(type, value)) <= {dict})


def check_fields(answer: dict[str, Any], endpoint: str, tables: Mapping[str, Fields]) -> dict[str, Any]:
    """The answer, if its fields hold what they should. Raises ValueError that names the field.

    Args:
        answer: to a control request.
        endpoint: of the request, with its query.
        tables: of an engine: endpoint without a query -> its fields.
    """
    check_types(answer, tables.get(endpoint.partition("?")[0], {}))
    return answer


def check_types(answer: Mapping[str, Any], fields: Fields, where: str = "") -> None:
    """Raise ValueError, naming the field, for one of another kind than the table says, or one that
    lacks and must not.

    Args:
        answer: what a server answered; fields that the table does not have are not looked at.
        fields: the table.
        where: names the object for messages; "": the answer itself.
    """
    for name, kind in fields.items():
        path = f"{where}.{name}" if where else name
        if name not in answer:
            if isinstance(kind, Kind) and kind.required:
                raise ValueError(f"{path} must be {kind.words}, and is missing in {shown(answer)}")
            continue
        value = answer[name]
        if isinstance(kind, Kind):
            if not kind.holds(value):
                raise ValueError(f"{path} must be {kind.words}, got {shown(value)}")
        elif isinstance(value, dict):
            check_types(value, kind, path)
        elif value is not None:
            raise ValueError(f"{path} must be an object or null, got {shown(value)}")


def at_least_1(value: object) -> int:
    """The value, an integer of at least 1. Raises ValueError for another."""
    if not COUNT.holds(value):
        raise ValueError(f"it must be {COUNT.words}, got {shown(value)}")
    return value


def rank_number(value: object) -> int:
    """The value, an integer of at least 0. Raises ValueError for another."""
    if type(value) is not int or value < 0:
        raise ValueError(f"a rank must be an integer of at least 0, got {shown(value)}")
    return value


def checked_checksums(value: object) -> dict[str, str]:
    """{parameter: checksum}. Raises ValueError for something else."""
    if not isinstance(value, dict) or not set(map(type, value.values())) <= {str}:
        raise ValueError(f"checksums must be an object of texts, got {shown(value)}")
    return value

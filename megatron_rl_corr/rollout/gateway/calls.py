"""What readers of tool calls share: a call as it was sampled, and JSON as a policy writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]] | None
"""As in OpenAI's chat completions."""
SPACE = re.compile(r"\s*")


class MalformedCall(ValueError):
    """A call that is not as its format has it."""


@dataclass(frozen=True)
class SampledCall:
    """A call of an answer. Example: SampledCall("add", '{"a": 1}')."""

    name: str
    arguments: str
    """JSON text."""
    id: str | None = None
    """As sampled, where the format has ids."""


def loads(text: str) -> Any:
    """The JSON value that a text is; raises MalformedCall."""
    made, end = first_json(text.lstrip(), 0)
    if text.lstrip()[end:].strip():
        raise MalformedCall("text behind JSON")
    return made


def first_json(text: str, at: int) -> tuple[Any, int]:
    """(the value that begins there, where it ends); NaN is no JSON."""
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError as error:  # also where a number has too many digits
        raise MalformedCall(str(error)) from None


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_json)


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def is_nested(value: Any, most: int) -> bool:
    """True if arrays and objects stand within each other more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [
            one
            for parent in level
            if isinstance(parent, (dict, list))
            for one in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(one, (dict, list))
        ]
        if not level:
            return False
    return True


def finite_json(text: str) -> Any:
    """Raises ValueError where it is no JSON, or has numbers that JSON lacks."""
    value = json.loads(text, parse_constant=_no_json)
    json.dumps(value, allow_nan=False)
    return value

"""JSON that loses no digit: whole numbers of any size are read and written as they are."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import orjson

_ALIKE = bytes.maketrans(b"123456789\t\n\r", b"000000000   ")
"""Makes all digits zeros and all white space spaces, so that one search finds them."""
_LONG = b"0" * 19
"""The shortest whole number that 64 bits may not hold, with all its digits as zeros."""
_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?)\b", re.IGNORECASE)


def loads(text: bytes | str, *, unique_keys: bool = True) -> Any:
    """The value of a JSON text. A whole number is an int of any size, another number a float of 64 bits.

    Args:
        text: the JSON.
        unique_keys: a key that comes twice in an object is an error; otherwise the last one's value is taken.

    Raises:
        ValueError: it is not JSON; the message says where, and the remedy for NaN and infinity. Or a
            key comes twice.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    value = None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not str(error).startswith("number is infinity"):  # perhaps a whole number of hundreds of digits
            raise ValueError(f"{error}{_remedy(error)}") from None
    alike = data.translate(_ALIKE)
    has_long = _LONG in alike or value is None
    if not has_long and (not unique_keys or _has_each_key_once(value, alike)):
        return value
    hook = _object_of if unique_keys else None
    read = json.loads(
        data, parse_int=_whole, parse_float=_finite, parse_constant=_refuse, object_pairs_hook=hook
    )
    return read if has_long else value


def dumps(value: Any) -> bytes:
    """The JSON text of a value.

    Raises:
        orjson.JSONEncodeError: JSON has no form for a part of it.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        if "64-bit range" not in str(error):
            raise
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise orjson.JSONEncodeError(str(error)) from None


def _has_each_key_once(value: Any, alike: bytes) -> bool:
    """True if it is certain, at a glance: the text has no more places that may end a key than
    the value has keys.

    False as well where such a place is within a text, or a colon stands behind white space.
    """
    if b" :" in alike:
        return False
    keys, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            keys += len(one)
            waiting += one.values()
        elif isinstance(one, list) and one and isinstance(one[0], (dict, list)):
            waiting += one
    return alike.count(b'":') == keys


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f'the key "{twice}" comes twice in an object, whose readers take different ones; keep one'
        )
    return made


def _whole(digits: str) -> int:
    most = sys.get_int_max_str_digits()
    if 0 < most < len(digits.lstrip("-")):
        size = len(digits.lstrip("-"))
        raise ValueError(f"a number has {size} digits; write one of more than {most} as text")
    return int(digits)


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number[:50]} is too large for a 64-bit float; write it as text")
    return float(number)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON; write null, or leave its key out")


def _remedy(error: orjson.JSONDecodeError) -> str:
    """The remedy for the word at which the parser stopped, where there is one."""
    begin = max(error.doc.rfind(sign, 0, error.pos) for sign in ",:[ \t\n") + 1
    found = _NOT_A_NUMBER.match(error.doc, begin)
    return f"; {found[0]} is not a number in JSON: write null, or leave its key out" if found else ""

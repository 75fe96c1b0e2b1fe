"""JSON that loses no digit: whole numbers of any size are read and written as they are."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import orjson

_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 19
"""The shortest whole number that 64 bits may not hold, with all its digits as zeros."""
_NOT_A_NUMBER = re.compile(r"[+-]?(nan|inf(inity)?)\b", re.IGNORECASE)


def loads(text: bytes | str) -> Any:
    """The value of a JSON text. A whole number is an int of any size, another number a float of 64 bits.

    Raises:
        ValueError: it is not JSON; the message says where, and the remedy for NaN and infinity.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    value = None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not str(error).startswith("number is infinity"):  # perhaps a whole number of hundreds of digits
            raise ValueError(f"{error}{_remedy(error)}") from None
    if _LONG in data.translate(_DIGITS_AS_ZEROS) or value is None:
        return json.loads(data, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
    return value


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

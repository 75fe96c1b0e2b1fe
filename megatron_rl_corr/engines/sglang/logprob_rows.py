"""Reads the log-probs of a /generate answer as one flat list of numbers, not as a list of lists.

R response tokens.
"""

from array import array
from typing import Any

import numpy as np
import orjson

KEY = b'"output_token_logprobs":'
IDS = b'"output_ids":['
FLAT = bytes.maketrans(b"[]", b"  ")
"""[[log-prob, id, null], ...] becomes numbers, null and commas, read without a Python list for each token."""


def read_flat(body: bytes) -> tuple[dict[str, Any], np.ndarray, np.ndarray] | None:
    """The answer, true in the place of its output_token_logprobs, the [R] int64 output_ids and [R]
    float64 log-probs.

    None unless the log-probs are R > 0 rows of a number, an id and null, written without blanks
    between brackets, and of the very ids in output_ids: read such a body as any other JSON, to use it
    or to say what is wrong.
    """
    # Neither can be inside a string, where a quotation mark has a backslash before it.
    start = body.find(KEY) + len(KEY)
    quote = body.find(b'"', start)
    end = body.rfind(b"]]", start, quote if quote >= 0 else len(body)) + len(b"]]")
    if start < len(KEY) or end < start or not body.startswith(b"[[", start) or body.find(KEY, end) >= 0:
        return None
    rows, rest = body[start:end], body[:start] + b"true" + body[end:]
    if b"t" in rows or b"f" in rows:  # true and false would be read as numbers
        return None
    try:
        flat, answer = orjson.loads(b"[" + rows.translate(FLAT) + b"]"), orjson.loads(rest)
        logprobs, row_ids = np.fromiter(flat[::3], np.float64), flat[1::3]
        ids = np.asarray(array("q", row_ids))
    except (orjson.JSONDecodeError, TypeError, ValueError, OverflowError):
        return None
    if np.isnan(logprobs).any():  # a null, which may stand anywhere in a row
        return None
    match answer:
        case {"output_ids": [_, *_] as own, "meta_info": {"output_token_logprobs": True}}:
            count = len(own)
            same = (
                len(flat) == 3 * count == 3 * flat[2::3].count(None)
                and own == row_ids
                and _are_rows(rows, count)
            )
            if same and (_are_integers(rest) or set(map(type, own)) == {int}):
                return answer, ids, logprobs
    return None


def _are_rows(rows: bytes, count: int) -> bool:
    """True if numbers and null stand in so many rows, [[.., null],[.., null]]: each ends with null.

    With as many null as rows, none of them in another place, all rows have three entries.
    """
    characters = np.frombuffer(rows, np.uint8)
    opens, closes = characters == ord("["), characters == ord("]")
    between = characters[:-3] == ord("l")  # l],[ from here on; the comma is checked as JSON
    between &= closes[1:-2]
    between &= opens[3:]
    counts = [np.count_nonzero(marks) for marks in (opens, closes, between)]
    return rows.endswith(b"null]]") and counts == [count + 1, count + 1, count - 1]


def _are_integers(rest: bytes) -> bool:
    """True if output_ids are numbers without a point or an exponent. JSON's 7.0 and true are
    equal to an id, too.
    """
    start = rest.find(IDS)
    if start < 0 or rest.find(IDS, start + 1) >= 0:
        return False
    ids = rest[start + len(IDS) : rest.find(b"]", start)]
    return b"." not in ids and b"e" not in ids and b"E" not in ids  # both true and false have an e

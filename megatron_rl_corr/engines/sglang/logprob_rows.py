"""Reads the log-probs of a /generate answer as one flat list of numbers, not as a list of lists.

R response tokens.
"""

from typing import Any

import numpy as np
import orjson

KEY = b'"output_token_logprobs":'

# [[log-prob, id, null], ...] becomes numbers and commas between blanks, read without a Python list for each token.
# null becomes "  99": no log-prob is 99, and Python makes no object for so small an integer.
FLAT, NULL = bytes.maketrans(b"[]nul", b"    9"), 99


def read_flat(body: bytes) -> tuple[dict[str, Any], np.ndarray] | None:
    """The answer, true in the place of its output_token_logprobs, and the [R] float64 log-probs that were there.

    NaN for null. None unless they are R > 0 rows of three, written without blanks between brackets and without a
    text, and of the very ids in output_ids: read such a body as any other JSON, to use it or to say what is wrong.
    """
    # Neither can be inside a string, where a quotation mark has a backslash before it.
    start = body.find(KEY) + len(KEY)
    quote = body.find(b'"', start)
    end = body.rfind(b"]]", start, quote if quote >= 0 else len(body)) + len(b"]]")
    if start < len(KEY) or end < start or not body.startswith(b"[[", start):
        return None
    rows = body[start:end]
    try:
        flat = orjson.loads(b"[" + rows.translate(FLAT) + b"]")
        answer = orjson.loads(body[:start] + b"true" + body[end:])
        logprobs = np.fromiter(flat[::3], np.float64)
    except (orjson.JSONDecodeError, TypeError):
        return None
    opened = np.count_nonzero(np.frombuffer(rows, np.uint8) == ord("["))  # several times faster than bytes.count
    match answer:
        case {"output_ids": [_, *_] as ids, "meta_info": {"output_token_logprobs": True}}:
            if len(flat) == 3 * len(ids) and opened == 1 + len(ids) and flat[1::3] == ids:
                logprobs[logprobs == NULL] = np.nan
                return answer, logprobs
    return None

"""Decodes the routed experts that a vLLM server returns: from base64 of a .npy file to checked ids.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_corr.engines.errors import shown
from megatron_rl_corr.engines.routes import ExpertShape, checked_routes, decoded_base64

TYPES = {"|u1": "uint8", "<u2": "uint16", "<i4": "int32"}
_HEAD = re.compile(
    rb"\x93NUMPY\x01\x00(..)(\{'descr': '([^']{1,20})', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}(?:, ?\d{1,9}){0,4},?)\), \} *\n)",
    re.DOTALL,
)
"""The head as numpy writes it, of an array of five dimensions at most: numpy's own reader takes
Python in its place.
"""


OMITS = "--enable-omit-prefix-routed-experts"
"""vLLM's name for an option that leaves out the routes of cached prompt tokens. No release
up to 0.33 has it.
"""
WITHOUT_OMISSION = f"start it without {OMITS}: a run asks for no routes that it has"


class MissingRoutes(ValueError):
    """The first rows that were asked for did not come, though those that came are of the model's shape."""


def omission_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why routes of tokens that were asked for will be missing, with the remedy; None: none will.

    Args:
        server_info: the server's answer to /server_info.
    """
    name = OMITS.removeprefix("--enable-").replace("-", "_")
    sections = [part for part in (server_info.get("vllm_config") or {}).values() if isinstance(part, Mapping)]
    if any(key.removeprefix("enable_") == name and value for part in sections for key, value in part.items()):
        return (
            f"{OMITS} leaves out the routed experts of prompt tokens that the server had cached, and has it "
            f"refuse requests without an x-session-id; {WITHOUT_OMISSION}"
        )
    return None


def read_ids(encoded: object) -> np.ndarray:
    """The array in a server's `routed_experts`. Raises ValueError naming the rule: base64, npy, type."""
    raw = decoded_base64(encoded, "a .npy file")
    head = _HEAD.match(raw)
    if head is None or len(head[2]) != int.from_bytes(head[1], "little"):
        raise ValueError(f"rule npy: routed_experts of {len(raw)} bytes are no .npy file: {shown(raw[:80])}")
    descr, sizes = head[3].decode("latin1"), tuple(int(size) for size in head[4].split(b",") if size)
    if descr not in TYPES:  # a pickle, which could run code, is of type |O
        raise ValueError(f"rule type: routed_experts must be {', '.join(TYPES.values())}, got {shown(descr)}")
    dtype = np.dtype(descr)
    if math.prod(sizes) * dtype.itemsize != len(raw) - head.end():
        raise ValueError(f"rule npy: routed_experts of shape {sizes} have {len(raw) - head.end()} bytes")
    return np.frombuffer(raw, dtype, offset=head.end()).reshape(sizes)


def decode(encoded: object, *, tokens: int, shape: ExpertShape, first: int = 0) -> Tensor:
    """The routes in a server's `routed_experts`, checked.

    Nothing was computed for the last token, so it has no row.

    Args:
        encoded: base64, text or bytes, of a .npy file of [T - 1 - first, H, k].
        tokens: T.
        shape: the model's.
        first: the token that the rows begin with.

    Returns:
        [T - 1 - first, M, k] of shape.dtype.

    Raises:
        ValueError: it breaks a rule, which the message names: base64, npy, type, rows, range, distinct ids.
    """
    ids, rows = read_ids(encoded), tokens - 1 - first
    if ids.shape[1:] == (shape.num_layers, shape.top_k) and len(ids) < rows:
        raise MissingRoutes(
            f"rule rows: routed_experts of {len(ids)} rows, where {rows} belong to {tokens} tokens, prompt "
            f"included, from token {first} on: did it leave out tokens that it had cached? {WITHOUT_OMISSION}"
        )
    if ids.shape != (rows, shape.num_layers, shape.top_k):
        raise ValueError(
            f"rule rows: routed_experts of {' x '.join(map(str, ids.shape))}, where {rows} rows of "
            f"{shape.num_layers} layers x {shape.top_k} experts belong to {tokens} tokens, prompt included"
            + f", from token {first} on"
            * (first > 0)
        )
    return checked_routes(ids, shape, first=first)

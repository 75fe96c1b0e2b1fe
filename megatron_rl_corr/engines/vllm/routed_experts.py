"""Decodes the routed experts that a vLLM server returns: from base64 of a .npy file to checked ids.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

import io
import math
from tokenize import TokenError

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.errors import shown
from megatron_rl_corr.engines.routes import ExpertShape, check_experts, decoded_base64

TYPES = ("uint8", "uint16", "int32")


def read_ids(encoded: object) -> np.ndarray:
    """The array in a server's `routed_experts`. Raises ValueError naming the rule: base64, npy, type."""
    raw = decoded_base64(encoded, "a .npy file")
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except (ValueError, EOFError, OSError, SyntaxError, TypeError, MemoryError, RecursionError, TokenError) as error:
        why = shown(str(error))
        raise ValueError(f"rule npy: routed_experts of {len(raw)} bytes are no .npy file: {why}") from None
    if dtype.name not in TYPES:  # a pickle, which could run code, is of type object
        raise ValueError(f"rule type: routed_experts must be {', '.join(TYPES)}, got {shown(dtype.name)}")
    rest = len(raw) - stream.tell()
    if by_columns or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"rule npy: routed_experts must be in C order, of sizes of at least 0, got {shown(shape)}")
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"rule npy: routed_experts of shape {shown(shape)} have {rest} bytes")
    return np.frombuffer(raw, dtype, offset=stream.tell()).reshape(shape)


def decode(encoded: object, *, tokens: int, shape: ExpertShape, first: int = 0) -> Tensor:
    """The routes in a server's `routed_experts`, checked.

    Nothing was computed for the last token, so it has no row.

    Args:
        encoded: base64 of a .npy file of [T - 1 - first, H, k].
        tokens: T.
        shape: the model's.
        first: the token that the rows begin with.

    Returns:
        [T - 1 - first, M, k] of shape.dtype.

    Raises:
        ValueError: it breaks a rule, which the message names: base64, npy, type, rows, range, distinct ids.
    """
    ids, rows = read_ids(encoded), tokens - 1 - first
    if ids.shape != (rows, shape.num_layers, shape.top_k):
        raise ValueError(
            f"rule rows: routed_experts of {' x '.join(map(str, ids.shape))}, where {rows} rows of {shape.num_layers} "
            f"layers x {shape.top_k} experts belong to {tokens} tokens, prompt included"
            + f", from token {first} on" * (first > 0)
        )
    ids = ids[:, shape.layers].astype(np.int64)
    check_experts(ids, shape, first=first)
    return torch.from_numpy(ids).to(shape.dtype)

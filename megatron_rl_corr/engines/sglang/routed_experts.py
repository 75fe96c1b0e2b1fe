"""Decodes the routed experts that an SGLang server returns: from its base64 of int32 to checked ids.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape, check_experts, decoded_base64


def read_ids(encoded: object) -> np.ndarray:
    """All ids in a server's `routed_experts`, [N] int32. Raises ValueError naming the rule: base64, int32."""
    raw = decoded_base64(encoded, "int32")
    if len(raw) % 4:
        raise ValueError(f"rule int32: routed_experts of {len(raw)} bytes are no whole number of int32")
    return np.frombuffer(raw, dtype="<i4")


def decode(encoded: object, *, tokens: int, shape: ExpertShape, first: int = 0) -> Tensor:
    """The routes in a server's `routed_experts`, checked.

    Nothing was computed for the last token, so it has no row. A token whose ids are 0 everywhere has no routes:
    SGLang's buffer starts so, and no top-k of two or more is (with one expert a token it may be, and is taken as it
    is).

    Args:
        encoded: base64 of int32 [T - 1 - first, H, k], C order.
        tokens: T.
        shape: the model's.
        first: the token that the rows begin with.

    Returns:
        [T - 1 - first, M, k] of shape.dtype.

    Raises:
        ValueError: it breaks a rule, which the message names: base64, int32, rows, range, distinct ids.
    """
    ids, width = read_ids(encoded), shape.num_layers * shape.top_k
    rows = tokens - 1 - first
    if ids.size != rows * width:
        raise ValueError(
            f"rule rows: {ids.size} ids of routed_experts are {ids.size / width:g} rows of {shape.num_layers} layers x "
            f"{shape.top_k} experts, where {tokens} tokens, prompt included, have {rows}"
            + f" from token {first} on" * (first > 0)
        )
    ids = ids.reshape(rows, shape.num_layers, shape.top_k)[:, shape.layers]
    known = ids.any(axis=(1, 2))
    check_experts(ids, shape, first=first, present=known)
    routes = torch.from_numpy(ids.astype(np.int16)).to(shape.dtype)
    if shape.top_k > 1:
        routes[~torch.from_numpy(known)] = torch.iinfo(shape.dtype).max
    return routes

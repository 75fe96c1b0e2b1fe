"""Decodes the keys that an SGLang server's sparse attention took: from its base64 to checked positions.

T tokens of prompt and response, L layers, K keys of a query.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape, no_routes
from megatron_rl_corr.engines.sglang.routed_experts import read_ids

KEYS = b'"indexer_topk":"'
POSITIONS = (
    "SGLANG_DSA_FUSE_TOPK=0 in its environment, as its fused kernels name slots of the cache, no positions"
)
BLOCK = 256
"""Tokens whose keys are compared at once."""


def decode_keys(
    meta: Mapping[str, Any], encoded: memoryview | None, *, tokens: int, shape: ExpertShape
) -> Tensor:
    """The keys of every token in an answer's `indexer_topk`, checked.

    Nothing was computed for the last token, so it has no row. Where a token has no more than K keys before
    it, itself included, attention takes all, and what the row has is not read: a prompt may be computed
    without an indexer then, which leaves the row of some request before.

    Args:
        meta: the answer's meta_info.
        encoded: base64 of int32 [T - 1, L, K], C order; None where it was not cut out of the answer.
        tokens: T.
        shape: L layers, K of them for the `top_k`, and more positions than T for the experts.

    Returns:
        [T - 1, L, K] of shape.dtype; rows that were not read, and all of a request that was aborted while it
        waited, are those of `no_routes`.

    Raises:
        ValueError: it breaks a rule, which the message names: presence, base64, int32, rows, range, distinct
            keys.
    """
    found = no_routes(shape, tokens - 1)
    sent = meta.get("indexer_topk")
    if sent is None and meta["finish_reason"]["type"] == "abort":
        return found
    if sent is None:
        raise ValueError(
            "rule presence: it sent no indexer_topk though it was asked for: start the server with "
            "--enable-return-indexer-topk, on a GPU"
        )
    ids = read_ids(encoded if sent is True else sent, "indexer_topk")
    layers, top_k = shape.num_layers, shape.top_k
    if ids.size != (tokens - 1) * layers * top_k:
        raise ValueError(
            f"rule rows: {ids.size} ids of indexer_topk are {ids.size / (layers * top_k):g} rows of {layers} "
            f"layers x {top_k} keys, where {tokens} tokens, prompt included, have {tokens - 1}; is it "
            "serving another model?"
        )
    ids = ids.reshape(tokens - 1, layers, top_k)
    for begin in range(top_k, tokens - 1, BLOCK):
        rows = ids[begin : begin + BLOCK]
        _check_rows(rows, begin)
        found[begin : begin + BLOCK] = torch.from_numpy(rows.astype(np.int32)).to(shape.dtype)
    return found


def _check_rows(rows: np.ndarray, first: int) -> None:
    """ValueError unless each of the [N, L, K] ids is no later than its token, and once in its row."""
    last = np.arange(first, first + len(rows))[:, None, None]
    wrong = (rows < 0) | (rows > last)
    if wrong.any():
        token, layer, place = np.argwhere(wrong)[0]
        raise ValueError(
            f"rule range: key {rows[token, layer, place]} of token {first + token} in layer {layer} is "
            f"outside [0, {first + token}]; start the server with {POSITIONS}"
        )
    ordered = np.sort(rows, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        token, layer = np.argwhere(twice)[0]
        raise ValueError(
            f"rule distinct keys: keys of token {first + token} in layer {layer} are not distinct; start the "
            f"server with {POSITIONS}"
        )

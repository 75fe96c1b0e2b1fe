"""Decodes the routed experts that an SGLang server returns: from its base64 of int32 to checked ids.

P tokens of the prompt, T of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rl_corr.engines import answers
from megatron_rl_corr.engines.routes import ExpertShape, checked_routes, decoded_base64
from megatron_rl_corr.engines.trajectory import VersionSpan

MOST_RETRACTIONS = 1 << 20
"""A request that goes on so often is none."""


def read_ids(encoded: object, name: str = "routed_experts") -> np.ndarray:
    """All ids in a server's field, [N] int32. Raises ValueError naming the rule: base64, int32."""
    raw = decoded_base64(encoded, "int32", name)
    if len(raw) % 4:
        raise ValueError(f"rule int32: {name} of {len(raw)} bytes are no whole number of int32")
    return np.frombuffer(raw, dtype="<i4")


def decode(encoded: object, *, tokens: int, shape: ExpertShape, first: int = 0) -> Tensor:
    """The routes in a server's `routed_experts`, checked.

    Nothing was computed for the last token, so it has no row. A token whose ids are 0 everywhere has no
    routes: SGLang's buffer starts so, and no top-k of two or more is (with one expert a token it may be, and
    is taken as it is).

    Args:
        encoded: base64, text or bytes, of int32 [T - 1 - first, H, k], C order.
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
            f"rule rows: {ids.size} ids of routed_experts are {ids.size / width:g} rows of "
            f"{shape.num_layers} layers x {shape.top_k} experts, where {tokens} tokens, prompt included, "
            f"have {rows}" + f" from token {first} on" * (first > 0)
        )
    ids = ids.reshape(rows, shape.num_layers, shape.top_k)
    return checked_routes(ids, shape, first=first, zeros_are_none=True)


def tokens_recomputed(
    meta: Mapping[str, Any], spans: Sequence[VersionSpan], *, prompt: int, tokens: int, pushes_retract: bool
) -> int:
    """How many of the first tokens have the routes of another pass than the one that sampled with
    them, or may have.

    A retraction, in a pause or for want of memory, frees what was computed for a request. When it goes on,
    one prefill computes all its tokens anew, and SGLang (0.5.23) returns the routes of that pass in place of
    the first ones'. It tells how often that happened, not at which token, and a stream would not tell the
    routes before the end. Where each push retracts what is running, at least one retraction is at each switch
    of weights: as many retractions as switches means that the last one is at the last switch.

    Args:
        meta: the answer's `meta_info`.
        spans: of the response's tokens, by weights.
        prompt: P.
        tokens: T.
        pushes_retract: weights change in a pause that retracts.

    Returns:
        0, T - 1, or between them the tokens that the prefill behind a switch has computed again: all before
        it but the last, which had been sampled and not been run yet.

    Raises:
        ValueError: rule retractions, for an answer that does not tell.
    """
    retractions = answers.count_of(meta, "num_retractions", MOST_RETRACTIONS)
    if meta.get("num_retractions") is None:
        raise ValueError(
            "rule retractions: it sent no num_retractions beside routed_experts, so whether these are of "
            "the passes that sampled its tokens is unknown: use SGLang 0.5.19 or newer, without a proxy "
            "that drops the field"
        )
    if not retractions:
        return 0
    starts = [span.start for span in spans if span.start < span.end]
    if pushes_retract and retractions == len(starts) - 1:
        return prompt + starts[-1] - 1
    return tokens - 1

"""Routed experts of a response: which experts each token went to, in the smallest integer type
that holds them.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertShape:
    """How a model routes its tokens, and so what its servers return for one.

    Example: ExpertShape(num_layers=48, layers=tuple(range(48)), top_k=8, experts=128) for Qwen3-30B-A3B.
    """

    num_layers: int
    """H, as the server counts them: without layers for multi-token prediction."""
    layers: tuple[int, ...]
    """Which of them have experts, from 0, rising: M numbers. A server's rows for the others are ignored."""
    top_k: int
    """k, experts a token is sent to."""
    experts: int
    """Experts of one layer."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds every id, and a row without routes beside them."""
        return torch.uint8 if self.experts <= 255 + (self.top_k > 1) else torch.int16

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's routes."""
        return len(self.layers) * self.top_k * self.dtype.itemsize


def decoded_base64(encoded: object, content: str) -> bytes:
    """The bytes of a server's `routed_experts`. content: what they should be, for the error.

    Raises:
        ValueError: rule base64.
    """
    if not isinstance(encoded, str):
        raise ValueError(
            f"rule base64: routed_experts must be base64 of {content}, got {type(encoded).__name__}"
        )
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            f"rule base64: routed_experts of {len(encoded)} characters are no base64: {error}"
        ) from None


def check_experts(
    ids: np.ndarray, shape: ExpertShape, *, first: int, present: np.ndarray | None = None
) -> None:
    """Every token's experts exist, and are distinct.

    Args:
        ids: [T, M, k], signed.
        shape: the model's.
        first: the token of the first row, for the error.
        present: [T] bool, which rows hold routes; None: all.

    Raises:
        ValueError: rule range, or rule distinct ids.
    """
    outside = np.argwhere((ids < 0) | (ids >= shape.experts))
    if outside.size:
        token, layer, place = outside[0]
        raise ValueError(
            f"rule range: expert {ids[token, layer, place]} of token {first + token} in layer "
            f"{shape.layers[layer]} is outside [0, {shape.experts})"
        )
    in_order = np.sort(ids, axis=2)
    repeats = (in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2)
    twice = np.argwhere(repeats if present is None else repeats & present[:, None])
    if twice.size:
        token, layer = twice[0]
        raise ValueError(
            f"rule distinct ids: experts {ids[token, layer].tolist()} of token {first + token} in layer "
            f"{shape.layers[layer]} are not distinct"
        )


def no_routes(shape: ExpertShape, *sizes: int) -> Tensor:
    """Rows that hold no routes: k times the largest value of the type, which no top-k is.

    Args:
        shape: the model's.
        sizes: leading dimensions, for instance a number of tokens.

    Returns:
        [*sizes, M, k] of shape.dtype.
    """
    fill = torch.iinfo(shape.dtype).max
    return torch.full((*sizes, len(shape.layers), shape.top_k), fill, dtype=shape.dtype)


def has_routes(routes: Tensor, experts: int) -> Tensor:
    """Whether rows hold routes, and not the filling of `no_routes`.

    Args:
        routes: [..., k] expert ids.
        experts: experts of one layer; needed where k is 1.

    Returns:
        [...] bool.
    """
    return routes[..., 0] < experts if routes.shape[-1] == 1 else routes[..., 0] != routes[..., 1]


def pack(routes: Sequence[Tensor | None], boundaries: Sequence[int], shape: ExpertShape) -> Tensor:
    """Routes of several samples one behind the other, without routes between each one's end and the next.

    Args:
        routes: for each of N samples [T - 1, M, k], or None.
        boundaries: [N + 1] rising from 0, where each sample begins: at least T - 1 apart.
        shape: the model's.

    Returns:
        [boundaries[-1], M, k].
    """
    packed = no_routes(shape, boundaries[-1])
    for start, end, own in zip(boundaries[:-1], boundaries[1:], routes, strict=True):
        if own is not None:
            assert len(own) <= end - start, f"routes of {len(own)} tokens in the place of {end - start}"
            packed[start : start + len(own)] = own
    return packed

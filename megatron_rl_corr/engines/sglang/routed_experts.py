"""The experts that a server sent each token to: from its base64 of int32 to checked ids of the smallest type.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token, E experts a layer.
"""

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertShape:
    """How a model routes, and so what its servers return for a token."""

    num_layers: int
    """H, as the server counts them: without layers for multi-token prediction."""
    layers: tuple[int, ...]
    """Which of them have experts, from 0, rising: M numbers. A server's rows for the others mean nothing."""
    top_k: int
    experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every id, and a row without routes beside them."""
        return torch.uint8 if self.experts <= 255 + (self.top_k > 1) else torch.int16

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.top_k * self.dtype.itemsize


def no_routes(shape: ExpertShape, *sizes: int) -> Tensor:
    """[*sizes, M, k] without routes: k times the largest value, which no top-k is, nor, for k 1, an id."""
    fill = torch.iinfo(shape.dtype).max
    return torch.full((*sizes, len(shape.layers), shape.top_k), fill, dtype=shape.dtype)


def has_routes(routes: Tensor, experts: int) -> Tensor:
    """[..., k] ids -> [...] bool: these are routes, not the filling of `no_routes`."""
    return routes[..., 0] < experts if routes.shape[-1] == 1 else routes[..., 0] != routes[..., 1]


def first_without_routes(routes: Tensor, experts: int) -> int:
    """How many of the tokens ([T, M, k]) have routes in every layer before one lacks them: these need no asking."""
    known = has_routes(routes, experts).all(dim=1)
    return len(known) if known.all() else int(known.int().argmin())


def decode(encoded: object, *, tokens: int, shape: ExpertShape, first: int = 0) -> Tensor:
    """A server's `routed_experts` for a sample of T tokens, from token `first` on -> [T - 1 - first, M, k].

    Nothing was computed for the last token, so it has no row. A token whose ids are 0 everywhere has no routes:
    SGLang's buffer starts so, and no top-k of two or more is (with one expert a token it may be, and is taken as it
    is). Raises ValueError naming the rule: base64, int32, rows, range, distinct ids.
    """
    if not isinstance(encoded, str):
        raise ValueError(f"rule base64: routed_experts must be base64 of int32, got {type(encoded).__name__}")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"rule base64: routed_experts of {len(encoded)} characters are no base64: {error}") from None
    if len(raw) % 4:
        raise ValueError(f"rule int32: routed_experts of {len(raw)} bytes are no whole number of int32")
    ids, width = np.frombuffer(raw, dtype="<i4"), shape.num_layers * shape.top_k
    rows = tokens - 1 - first
    if ids.size != rows * width:
        raise ValueError(
            f"rule rows: {ids.size} ids of routed_experts are {ids.size / width:g} rows of {shape.num_layers} layers x "
            f"{shape.top_k} experts, where {tokens} tokens, prompt included, have {rows}"
            + f" from token {first} on" * (first > 0)
        )
    ids = ids.reshape(rows, shape.num_layers, shape.top_k)[:, shape.layers]
    outside = np.argwhere((ids < 0) | (ids >= shape.experts))
    if outside.size:
        token, layer, place = outside[0]
        raise ValueError(
            f"rule range: expert {ids[token, layer, place]} of token {first + token} in layer {shape.layers[layer]} is "
            f"outside [0, {shape.experts})"
        )
    if shape.top_k == 1:
        return torch.from_numpy(ids.astype(np.int16)).to(shape.dtype)
    known = ids.any(axis=(1, 2))
    in_order = np.sort(ids, axis=2)
    twice = np.argwhere((in_order[:, :, 1:] == in_order[:, :, :-1]).any(axis=2) & known[:, None])
    if twice.size:
        token, layer = twice[0]
        raise ValueError(
            f"rule distinct ids: experts {ids[token, layer].tolist()} of token {first + token} in layer "
            f"{shape.layers[layer]} are not distinct"
        )
    routes = torch.from_numpy(ids.astype(np.int16)).to(shape.dtype)
    routes[~torch.from_numpy(known)] = torch.iinfo(shape.dtype).max
    return routes


def pack(routes: list[Tensor | None], length: int, shape: ExpertShape) -> Tensor:
    """Rows of several samples, each [T - 1, M, k] or None, as [N, length, M, k]: without routes behind their end."""
    packed = no_routes(shape, len(routes), length)
    for row, own in enumerate(routes):
        if own is not None:
            packed[row, : len(own)] = own
    return packed

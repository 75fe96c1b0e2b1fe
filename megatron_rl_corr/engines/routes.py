"""Routed experts of a response: which experts each token went to, in the smallest integer type
that holds them.

T tokens of prompt and response, H hidden layers, M of them with experts, k experts a token.
"""

import binascii
import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pybase64
import torch
from torch import Tensor

KEY = b'"routed_experts":"'
BLOCK = 1 << 16
"""Rows whose ids are compared at once: they stay in a core's cache."""


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


def cut_routes(body: bytes, key: bytes = KEY) -> tuple[bytes, memoryview | None]:
    """(the answer with true in the place of its `routed_experts`, their base64), as JSON need not read them.
    key: of another field that is base64.

    Of 32k tokens in 94 layers they are 131 MB. (body, None) where the answer is written otherwise: read it as
    any other JSON.
    """
    # Not within a text, where quotation marks have a backslash before them.
    start = body.find(key) + len(key)
    end = body.find(b'"', start)
    if start < len(key) or end < 0 or body.find(key, end) >= 0 or body.find(b"\\", start, end) >= 0:
        return body, None
    return body[: start - 1] + b"true" + body[end + 1 :], memoryview(body)[start:end]


def decoded_base64(encoded: object, content: str, name: str = "routed_experts") -> bytes:
    """The bytes of a server's field of this name. content: what they should be, for the error.

    Raises:
        ValueError: rule base64.
    """
    if not isinstance(encoded, (str, memoryview)):
        raise ValueError(f"rule base64: {name} must be base64 of {content}, got {type(encoded).__name__}")
    try:
        return pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"rule base64: {name} of {len(encoded)} characters are no base64: {error}") from None


def checked_routes(
    ids: np.ndarray, shape: ExpertShape, *, first: int, zeros_are_none: bool = False
) -> Tensor:
    """The layers with experts of a server's ids, in the smallest type: every expert exists, and a token's
    are distinct.

    Args:
        ids: [T, H, k] of any type of integers.
        shape: the model's.
        first: the token of the first row, for the error.
        zeros_are_none: a token whose ids are 0 everywhere has no routes, where k is above 1.

    Returns:
        [T, M, k] of shape.dtype.

    Raises:
        ValueError: rule range, or rule distinct ids.
    """
    layers = shape.layers
    if not layers:
        return no_routes(shape, len(ids))
    dense = layers == tuple(range(layers[0], layers[-1] + 1))
    ids = ids[:, layers[0] : layers[-1] + 1] if dense else ids[:, layers]  # dense: a view
    if ids.size and (ids.min() < 0 or ids.max() >= shape.experts):
        token, layer, place = np.argwhere((ids < 0) | (ids >= shape.experts))[0]
        raise ValueError(
            f"rule range: expert {ids[token, layer, place]} of token {first + token} in layer "
            f"{layers[layer]} is outside [0, {shape.experts})"
        )
    found = np.array(ids, torch.empty(0, dtype=shape.dtype).numpy().dtype, order="C")
    absent = np.zeros(len(found), bool)
    if zeros_are_none and shape.top_k > 1:
        absent = ~found.any(axis=(1, 2))
    rows = found.reshape(-1, shape.top_k)
    for start in range(0, len(rows), BLOCK):
        columns = np.ascontiguousarray(rows[start : start + BLOCK].T)
        twice = np.zeros(columns.shape[1], bool)
        for one, other in combinations(columns, 2):
            twice |= one == other
        wrong = np.flatnonzero(twice) + start
        wrong = wrong[~absent[wrong // len(layers)]]
        if wrong.size:
            token, layer = divmod(int(wrong[0]), len(layers))
            raise ValueError(
                f"rule distinct ids: experts {found[token, layer].tolist()} of token {first + token} in "
                f"layer {layers[layer]} are not distinct"
            )
    found[absent] = torch.iinfo(shape.dtype).max
    return torch.from_numpy(found)


def no_routes(
    shape: ExpertShape, *sizes: int, layers: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Rows that hold no routes: k times the largest value of the type, which no top-k is.

    Args:
        shape: the model's.
        sizes: leading dimensions, for instance a number of tokens.
        layers: how many; None: M.
        device: of the result.

    Returns:
        [*sizes, layers, k] of shape.dtype.
    """
    layers = len(shape.layers) if layers is None else layers
    fill = torch.iinfo(shape.dtype).max
    return torch.full((*sizes, layers, shape.top_k), fill, dtype=shape.dtype, device=device)


def has_routes(routes: Tensor, experts: int) -> Tensor:
    """Whether rows hold routes, and not the filling of `no_routes`.

    Args:
        routes: [..., k] expert ids.
        experts: experts of one layer; needed where k is 1.

    Returns:
        [...] bool.
    """
    return routes[..., 0] < experts if routes.shape[-1] == 1 else routes[..., 0] != routes[..., 1]


def write_routes(
    routes: Sequence[Tensor | None],
    boundaries: Sequence[int],
    runs: Sequence[tuple[int, int]],
    layers: Sequence[int],
    into: Tensor,
) -> None:
    """Write some tokens' routes of several samples, one run behind the other; no routes between a sample's
    end and the next.

    Args:
        routes: for each of N samples [T - 1, M, k], or None.
        boundaries: [N + 1] rising from 0, where each sample begins: at least T - 1 apart.
        runs: (begin, end) of neighbouring tokens of one sample each, rising within it.
        layers: which of the M.
        into: [tokens of all runs, layers, k], all of which is written.
    """
    fill = torch.iinfo(into.dtype).max
    # Neighbouring layers are a view; others are gathered by index.
    dense = list(layers) == list(range(layers[0], layers[-1] + 1))
    chosen = slice(layers[0], layers[-1] + 1) if dense else torch.tensor(layers)
    place = 0
    for begin, end in runs:
        sample = bisect.bisect_right(boundaries, begin) - 1
        own, start, room = routes[sample], boundaries[sample], into[place : place + end - begin]
        assert end <= boundaries[sample + 1], "a run goes beyond its sample"
        known = 0
        if own is not None:
            assert len(own) <= boundaries[sample + 1] - start, "routes of more tokens than the sample has"
            part = own[begin - start : end - start, chosen]
            known = len(part)
            room[:known] = part
        room[known:] = fill
        place += end - begin
    assert place == len(into), f"runs of {place} tokens in the place of {len(into)}"

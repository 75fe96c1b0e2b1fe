"""What passes between the package and an engine: requests, transports, limits, and what servers
say of themselves.

P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from megatron_rl_corr.engines.stacked_parameters import Part as Part

NamedTensor = tuple[str, Tensor]
"""A weight under its Hugging Face name."""


class UnsupportedByEngine(ValueError):
    """An engine lacks what was asked of it.

    Args:
        engine: its name, for instance "SGLang".
        what: for instance "pause mode retract".
    """

    def __init__(self, engine: str, what: str):
        super().__init__(engine, what)
        self.engine, self.what = engine, what

    def __str__(self) -> str:
        return f"{self.engine} does not support {self.what}; use another engine, or leave it out"


@dataclass(frozen=True)
class Request:
    """One request to a server, without the server's address.

    Example: Request("POST", "/pause_generation", {"mode": "retract"}).
    """

    method: str
    """The HTTP method."""
    endpoint: str
    """Path and query."""
    json: dict[str, Any] | None = None
    """The body; None: no body."""
    max_bytes: int = 8 << 20
    """Bytes of a 2xx answer at most: a longer one is refused, and is never in memory as a whole."""
    keeps_connection: bool = False
    """One of many that follow each other within a push: its connection is kept for the next."""

    @cached_property
    def body(self) -> bytes | None:
        """`json` as it is sent: made once, however many servers are sent this request."""
        import orjson  # for what speaks HTTP alone

        return None if self.json is None else orjson.dumps(self.json, option=orjson.OPT_SERIALIZE_NUMPY)


def checked_prompt_ids(prompt_ids: Sequence[int], *, vocab_size: int, prompt_index: int) -> list[int]:
    """The prompt as a list of Python integers, each in [0, vocab_size).

    An id outside the vocabulary is an out-of-range row of the embedding, which may end the server's process
    together with all its requests.

    Args:
        prompt_ids: P integers.
        vocab_size: of the model.
        prompt_index: names the prompt in the error.

    Raises:
        ValueError: it is no list of integers, it is empty, or an id is outside the vocabulary.
    """
    try:
        ids = np.asarray(prompt_ids)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"prompt {prompt_index} must be a non-empty list of ids, got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"prompt {prompt_index} must hold integer token ids, got {ids.dtype}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise ValueError(
            f"prompt {prompt_index} has token id {int(ids[position])} at position {position}; ids must be in "
            f"[0, {vocab_size}), the model's vocabulary: is this the tokenizer of the model being served?"
        )
    return ids.tolist()


class Transport(Protocol):
    """Brings requests to servers and answers back; `http.HTTPTransport` for servers that speak HTTP."""

    needed: Callable[[], int] | None = None
    """How many descriptors this process needs, for the remedy where it has none left; None: not known."""
    waiting_here: int = 0
    """Requests that wait for this process or its host, and have reached no server."""

    async def send(self, url: str, request: Request, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        """(status, body) of the answer. timeout_s None: the transport's own limit; math.inf: no limit.

        Raises:
            RolloutServerError: no answer, or one that says the request failed.
        """
        ...

    async def close(self) -> None:
        """Free connections; the next `send` makes new ones."""
        ...


class Progress(Protocol):
    """Watches whether one server gets on with its requests."""

    async def silence(self, timeout_s: float) -> Exception | None:
        """Why the requests there made no progress since the last call; None: they did, or they have to wait.

        Raises:
            RolloutServerError: the server did not answer within timeout_s.
        """
        ...


@dataclass(frozen=True)
class EngineLimits:
    """What an engine cannot do."""

    min_temperature: float = 0.0
    """Below it, 0 excepted, the engine samples from another distribution than it is asked for."""
    max_temperature: float = math.inf
    """Above it the engine refuses a request."""
    max_top_k: int | None = None
    """Largest top_k for which it returns the sampling mask; None: any."""
    top_p_needs_top_k: bool = False
    """It returns the sampling mask of top_p and of min_p only beside a top_k."""
    scoring_room: int = 1
    """Tokens of its context length that a scored sample can't have: the one that would be
    sampled next, at least.
    """
    max_stop_texts: int | None = None
    """Most texts of `stop` in a request; None: any."""
    pause_modes: tuple[str, ...] = ()
    """Ways to stop sampling for a weight update, of "abort", "in_place" and "retract"."""
    weight_transports: tuple[str, ...] = ()
    """Ways to update weights, of "distributed", "tensor" and "disk"."""
    unusual_weights: bool = False
    """Pushes of experts that one tensor stacks, and of gated delta nets, are proven, and all settings of such
    models are read.
    """
    fp8_models: tuple[str, ...] = ()
    """`model_type` of FP8 checkpoints whose servers load new values and scales."""


@dataclass(frozen=True)
class ServerRanks:
    """How many ranks one server runs its model on."""

    tensor: int
    """Tensor-parallel size."""
    pipeline: int
    """Pipeline-parallel size."""

    @property
    def count(self) -> int:
        """Ranks that the server brings into a group for weight updates."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class ServerChecksums:
    """A server's own checksums of its weights; those of a draft model, which only guesses
    tokens, are apart.
    """

    url: str
    device: str
    """"cpu" or "cuda": checksums of one tensor differ between them."""
    tp_size: int
    layout: tuple
    """Servers whose layouts are equal hold the same tensors."""
    quantization: str | None
    """How the weights are quantised; None: they are not."""
    ranks: tuple[tuple[int, dict[str, str]], ...]
    """For each rank of the server: tensor-parallel rank, {parameter: checksum}."""
    shows_all: bool = True
    """These are the checksums of all ranks, not of the first pipeline stage alone."""
    layout_is_known: bool = False
    """Every parameter must be as `Engine.possible_layouts` has it; else only those that once were."""
    quantises_updates: bool = False
    """It quantises the weights that it is sent, and makes new scales for them."""
    drafts: tuple[dict[str, str], ...] = ()
    """For each rank {parameter of a draft model: checksum}, without those that are tensors of
    the model itself.
    """

    def fingerprint(self) -> int:
        """A number, within this process, that differs where a checksum does."""
        return hash(tuple((rank, tuple(sorted(sums.items()))) for rank, sums in self.ranks))

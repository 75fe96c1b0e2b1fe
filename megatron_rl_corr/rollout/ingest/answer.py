"""One request for a sample and what its answer holds: what an ingest process does, and the client itself
without one.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_rl_corr.engines import answer_size
from megatron_rl_corr.engines.answers import reading
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory

STARTED_AT_ONCE = 16
"""Requests that are sent before the event loop does something else, and so it is with one answer that is
parsed: a thousand that are ready at once would keep it for seconds.
"""


@dataclass(frozen=True)
class SampleRequest:
    """What a sample is asked for with, and what its answer must be one to."""

    prompt_ids: Tensor
    """[P] int64, each in the vocabulary."""
    sampling: SamplingParams
    request_id: str
    seed: int
    prompt_index: int
    sample_index: int
    vocab_size: int
    cache_key: str | None = None
    experts: ExpertShape | None = None
    """The model's, if routes are wanted."""
    routes_from: int = 0
    """The token from which on they are."""
    pushes_retract: bool = False
    """As `Engine.parse`."""
    timed: bool = False
    """`ParsedAnswer.server_times` are wanted."""


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer."""

    part: Trajectory
    server_times: dict[str, float]
    """As `Engine.server_times`; {} where nobody asked."""


class Ingest(Protocol):
    """Sends requests for samples, and parses their answers."""

    @property
    def waiting_here(self) -> int:
        """Requests that wait for this host, and have reached no server."""

    async def ready(self) -> None:
        """Return once a request goes out when it is given to `answer`: no server is slow before."""

    async def answer(self, url: str, asked: SampleRequest) -> ParsedAnswer:
        """The parsed answer of one server.

        Args:
            url: of the server.
            asked: the request.

        Raises:
            RolloutError: as `Fleet.send` and `Engine.parse`.
        """


class IngestHere:
    """In this process, over its own connections."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._starting = asyncio.Semaphore(STARTED_AT_ONCE)
        self._reading = asyncio.Lock()

    @property
    def waiting_here(self) -> int:
        """As `Ingest.waiting_here`."""
        return self._fleet.waiting_here

    async def ready(self) -> None:
        """As `Ingest.ready`."""

    async def answer(self, url: str, asked: SampleRequest) -> ParsedAnswer:
        """As `Ingest.answer`."""
        engine, name = self._fleet.engine_of(url), self._fleet.name_of(url)
        async with self._starting:
            request = engine.generate(
                asked.prompt_ids.numpy(),
                asked.sampling,
                asked.request_id,
                seed=asked.seed,
                routed_experts=asked.experts is not None,
                cache_key=asked.cache_key,
                routes_from=asked.routes_from,
            )
            tokens = asked.prompt_ids.numel() + asked.sampling.max_new_tokens
            routes = answer_size.of_routes(tokens, asked.experts)
            request = replace(request, max_bytes=request.max_bytes + routes)
            await asyncio.sleep(0)
        # No limit while the server makes progress, however long the answer is: `ServerHealth` watches that.
        _, body = await self._fleet.send(url, request, timeout_s=math.inf)
        async with self._reading:
            with reading(url, request.endpoint):
                part = engine.parse(
                    body,
                    prompt_ids=asked.prompt_ids,
                    prompt_index=asked.prompt_index,
                    sample_index=asked.sample_index,
                    server=url,
                    max_new_tokens=asked.sampling.max_new_tokens,
                    vocab_size=asked.vocab_size,
                    truncated=asked.sampling.needs_mask,
                    top_logprobs=asked.sampling.top_logprobs,
                    experts=asked.experts,
                    routes_from=asked.routes_from,
                    pushes_retract=asked.pushes_retract,
                    **({} if asked.sampling.keys is None else {"keys": asked.sampling.keys}),
                )
                times = engine.server_times(body) if asked.timed else {}
            await asyncio.sleep(0)
        return ParsedAnswer(replace(part, engine=name), times)

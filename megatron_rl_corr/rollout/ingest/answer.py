"""One request for a sample and what its answer holds: what an ingest process does, and the client itself
without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatron_rl_corr.engines.answers import reading
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.engines.types import Request


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer."""

    part: Trajectory
    server_times: dict[str, float]
    """As `Engine.server_times`; {} where nobody asked."""


class Ingest(Protocol):
    """Sends requests for samples, and parses their answers."""

    async def answer(
        self, url: str, request: Request, parse: Mapping[str, Any], *, timed: bool
    ) -> ParsedAnswer:
        """The parsed answer of one server.

        Args:
            url: of the server.
            request: for a sample.
            parse: the arguments of its `Engine.parse`, without the answer.
            timed: `ParsedAnswer.server_times` are wanted.

        Raises:
            RolloutError: as `Fleet.send` and `Engine.parse`.
        """


class IngestHere:
    """In this process, over the client's own connections."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    async def answer(
        self, url: str, request: Request, parse: Mapping[str, Any], *, timed: bool
    ) -> ParsedAnswer:
        """As `Ingest.answer`."""
        engine, name = self._fleet.engine_of(url), self._fleet.name_of(url)
        # No limit while the server makes progress, however long the answer is: `ServerHealth` watches that.
        _, body = await self._fleet.send(url, request, timeout_s=math.inf)
        with reading(url, request.endpoint):
            part = replace(engine.parse(body, server=url, **parse), engine=name)
            return ParsedAnswer(part, engine.server_times(body) if timed else {})

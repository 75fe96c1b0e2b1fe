"""Whether the engine of a vLLM server makes progress, from two readings of GET /metrics.

The HTTP process answers /health and /metrics however its engine fares, with what the engine told it after
its last batch: an engine that is paused, stopped or stuck tells nothing. GET /is_paused is answered by the
engine itself, paused or not, between two batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.types import Transport
from megatron_rl_corr.engines.vllm import requests
from megatron_rl_corr.engines.vllm.responses import parse_control

_SAMPLE = re.compile(rb"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_COUNTERS = (
    "generation_tokens_total",
    "prompt_tokens_total",
    "request_success_total",
    "num_preemptions_total",
)
_CACHE = "kv_cache_usage_perc"
"""A long prompt is computed in many batches, of which only the last is counted; but each takes
room in the cache.
"""
_RUNNING, _WAITING = "num_requests_running", "num_requests_waiting"


@dataclass(frozen=True)
class EngineCounts:
    """What the engines of one server have told last, summed over them."""

    running: float
    """Requests in a batch."""
    waiting: float
    """Requests in the queue."""
    done: tuple[float, ...]
    """Tokens, requests and preemptions so far, and the cache in use: one of them changes with every batch,
    or, where that is a part of a long prompt, with every few.
    """

    @classmethod
    def parse(cls, body: bytes) -> EngineCounts | None:
        """An answer to /metrics; None for one without vLLM's counters, as with --disable-log-stats."""
        sums: dict[str, float] = {}
        try:
            for name, value in _SAMPLE.findall(body):
                key = name.decode()
                sums[key] = sums.get(key, 0.0) + float(value)
        except ValueError:
            return None
        if not {_RUNNING, _WAITING, _COUNTERS[0]} <= sums.keys():
            return None
        return cls(
            sums[_RUNNING], sums[_WAITING], tuple(sums.get(name, 0.0) for name in (*_COUNTERS, _CACHE))
        )


class MetricsProgress:
    """Reads the counters of one server again and again.

    Args:
        transport: to the server.
        url: its address.
    """

    def __init__(self, transport: Transport, url: str):
        self._transport, self._url = transport, url
        self._last: EngineCounts | None = None

    async def silence(self, timeout_s: float) -> RolloutServerError | None:
        """Why the requests there made no progress since the last call; None: they did, or the
        server is paused.

        A server without vLLM's counters only has to answer.

        Args:
            timeout_s: limit of each request that this takes.

        Raises:
            RolloutServerError: no answer came in time.
        """
        before, counts = self._last, await self._counts(timeout_s)
        self._last = counts
        if counts is None:
            await self._is_paused(timeout_s)
            return None
        if before is None or counts != before or await self._is_paused(timeout_s):
            return None
        self._last = await self._counts(timeout_s)  # a batch may have ended, which is_paused has waited for
        if self._last != before:
            return None
        detail = "it has no request, though this client waits for answers"
        if counts.running or counts.waiting:
            detail = "the requests in its batch make no progress"
        return RolloutServerError(self._url, requests.GENERATE, None, detail)

    async def _counts(self, timeout_s: float) -> EngineCounts | None:
        try:
            _, body = await self._transport.send(self._url, requests.metrics(), timeout_s=timeout_s)
        except RolloutServerError as error:
            if error.status != 404:
                raise
            return None
        return EngineCounts.parse(body)

    async def _is_paused(self, timeout_s: float) -> bool:
        request = requests.is_paused()
        try:
            status, body = await self._transport.send(self._url, request, timeout_s=timeout_s)
        except RolloutServerError as error:
            if error.status != 404:  # without VLLM_SERVER_DEV_MODE it can't be paused either
                raise
            return False
        try:
            answer = parse_control(body, server=self._url, endpoint=request.endpoint, status=status)
        except RolloutProtocolError:
            return False  # an answer all the same
        return bool(answer.get("is_paused"))

"""What servers are asked after a push: to score texts, and to sample a few tokens and score them.

Checksums prove what a server was sent. This proves what it computes with it: an expert in the wrong
place, a tensor that was packed wrongly, an update that never took place, or that decoding does not see,
shows in the log-probs.

Three values of one token make a triangle: the log-prob that the server sampled it with (decode), the
one that it gives the same token in a text (prefill), and the trainer's own. The side that is too long
names what is wrong.

T tokens of a text that are scored, which are all but the first; D = log pi_train - log
pi_rollout of one of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_corr.engines.addresses import may_change
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    StaleWeightsError,
)
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.events import EVENTS

FIRST_DECODED, DECODED_TOKENS = 8, 16
"""K, the length of the sampled response of every push, for which it waits; and of one that is evidence."""
PROMPT_TOKENS = 32
"""Most tokens of the prompt before it."""

EARLIER_S = 30.0
"""How long a server has for its score before the first push, without which it is not
compared with that one.
"""
ATTEMPTS, PAUSE_S = 3, 0.5
"""How often a server is asked again while its answers are none, and the pause in between."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeDraw:
    """A response to sample. Example: ProbeDraw((3, 17, 5), seed=7)."""

    prompt: tuple[int, ...]
    seed: int
    tokens: int = DECODED_TOKENS
    fresh: bool = False
    """Share no cached keys and values with any other request."""


@dataclass(frozen=True)
class Question:
    """What each server is asked."""

    texts: tuple[tuple[int, ...], ...]
    """Ids of each, at least two."""
    draws: tuple[ProbeDraw, ...] = ()


@dataclass(frozen=True)
class Decoded:
    """A response that a server has sampled."""

    ids: tuple[int, ...]
    """Prompt and response."""
    sampled: np.ndarray
    """[K] log-probs that it was sampled with."""
    scored: np.ndarray
    """[K] what the same server gives the same tokens in a text."""
    fresh: bool
    """As of its `ProbeDraw`."""


@dataclass(frozen=True)
class ProbeAnswer:
    """One server's answer."""

    scores: tuple[np.ndarray, ...]
    """[T] float64 of each text, finite."""
    decoded: tuple[Decoded, ...]
    """The draws that the server could sample."""
    endpoint: str
    """Where it was asked, for messages."""


async def ask_servers(
    servers: ServerControl,
    question: Question,
    *,
    version: str,
    vocab_size: int,
    cache_key: str | None,
    required: bool = True,
) -> dict[str, ProbeAnswer]:
    """The answers of the servers that answer.

    A server that dies or is restarted meanwhile is left out, as it is from sampling, and so is one whose
    answers are no scores, or HTTP 5xx, ATTEMPTS times, where another server is compared. One that refuses the
    question is an error.

    Args:
        servers: those of the update; they sample again, as a paused server answers nothing.
        question: the same for all.
        version: of the weights that were pushed.
        vocab_size: of the model.
        cache_key: of requests to the new weights.
        required: one answer at least.

    Raises:
        RolloutServerError: a server refuses to score; or one is required, and none of them has
            more than failures.
        RolloutProtocolError: one is required, and answers that come are no scores of these ids.
    """
    answers: dict[str, ProbeAnswer] = {}
    failed = []
    asked = [
        _Asked(servers, url, version, vocab_size, cache_key).answer(question) for url in servers.base_urls
    ]
    for url, found in zip(
        servers.base_urls, await asyncio.gather(*asked, return_exceptions=True), strict=True
    ):
        if isinstance(found, ProbeAnswer):
            answers[url] = found
            continue
        if not isinstance(found, RolloutError) or _refuses(found):
            raise found
        logger.warning("%s is not compared with the trainer after this push: %s", url, found)
        EVENTS.tell("server_not_compared", str(found), server=url, version=version)
        if isinstance(found, RolloutProtocolError) or isinstance(found, RolloutServerError) and found.status:
            failed.append(found)
    if required and failed and not answers:  # all of them alive: nothing would ever be compared
        raise failed[0]
    return answers


async def ask_earlier(
    servers: ServerControl, question: Question, *, vocab_size: int, cache_key: str | None
) -> dict[str, ProbeAnswer]:
    """`ask_servers` before a push, of whatever weights there are; a server that does not answer
    is not compared.
    """

    async def ask(url: str) -> ProbeAnswer | None:
        try:
            async with asyncio.timeout(EARLIER_S):
                return await _Asked(servers, url, None, vocab_size, cache_key).answer(question)
        except (RolloutError, TimeoutError) as error:
            logger.warning(
                "%s is not compared with itself before the first push: %s", url, error or "no answer"
            )
            return None

    found = zip(servers.base_urls, await asyncio.gather(*map(ask, servers.base_urls)), strict=True)
    return {url: answer for url, answer in found if answer is not None}


async def ask_types(servers: ServerControl) -> dict[str, str]:
    """The number type that each server computes in; nothing of one that does not answer or tell."""

    async def ask(url: str) -> str | None:
        engine = servers.engine_of(url)
        try:
            info = await servers.ask(url, engine.server_info())
        except RolloutError:
            return None
        return "fp8" if engine.is_quantized(info) else engine.dtype(info)

    found = zip(servers.base_urls, await asyncio.gather(*map(ask, servers.base_urls)), strict=True)
    return {url: dtype for url, dtype in found if dtype is not None}


@dataclass(frozen=True)
class _Asked:
    """One server and what its answers must be of. With version None its weights may have any name."""

    servers: ServerControl
    url: str
    version: str | None
    vocab_size: int
    cache_key: str | None

    async def answer(self, question: Question) -> ProbeAnswer:
        engine = self.servers.engine_of(self.url)
        scores = [self._score(ids[:1], ids[1:]) for ids in question.texts]
        decoded = [self._decode(draw) for draw in question.draws]
        found, count = await asyncio.gather(*scores, *decoded), len(scores)
        sampled = tuple(one for one in found[count:] if one is not None)
        return ProbeAnswer(tuple(found[:count]), sampled, engine.generate_endpoint)

    async def _score(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        engine, ids = self.servers.engine_of(self.url), list(output)
        request = engine.score(list(prompt), ids, likeliest=1, cache_key=self.cache_key)

        def parse(answer: Mapping[str, Any]) -> TokenScores:
            return engine.parse_scores(answer, server=self.url, output_ids=ids, vocab_size=self.vocab_size)

        found = await self._retried(request, parse)
        self._check_version(found.version, request)
        return found.logprobs

    async def _decode(self, draw: ProbeDraw) -> Decoded | None:
        """None: the server can't sample from the whole vocabulary, as vLLM with
        --return-sampling-mask can't.
        """
        engine, prompt = self.servers.engine_of(self.url), list(draw.prompt)
        sampling = SamplingParams(max_new_tokens=draw.tokens, temperature=1.0, ignore_eos=True)
        # With the weights' name: a cache that outlives pushes would have what this very request
        # left there before.
        key = f"{self.cache_key or ''}probe-{self.version}-{draw.seed}" if draw.fresh else self.cache_key
        request = engine.detailed_sample(prompt, sampling, seed=draw.seed, likeliest=1, cache_key=key)

        def parse(answer: Mapping[str, Any]) -> DetailedSample:
            return engine.parse_detailed_sample(
                answer, server=self.url, prompt_ids=prompt, tokens=draw.tokens
            )

        try:
            sample = await self._retried(request, parse)
        except RolloutServerError as error:
            if error.status is None:
                raise
            logger.warning("%s samples no tokens to compare with their scores: %s", self.url, error)
            return None
        if not sample.output:
            raise RolloutServerError(
                self.url, request.endpoint, None, "the response to the probe was aborted"
            )
        self._check_version(sample.version_spans[-1].version if sample.version_spans else None, request)
        scored = await self._score(prompt, sample.output)
        return Decoded((*prompt, *sample.output), sample.logprobs.astype(np.float64), scored, draw.fresh)

    async def _retried[Found](self, request: Request, parse: Callable[[Mapping[str, Any]], Found]) -> Found:
        """The parsed answer, asked for again while what comes is none: it may be a proxy's of a moment."""
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return parse(await self.servers.ask(self.url, request))
            except (RolloutProtocolError, RolloutServerError) as error:
                if _refuses(error):
                    raise RolloutServerError(
                        self.url,
                        error.endpoint,
                        error.status,
                        error.detail,
                        remedy="it was asked to score and sample a few tokens after a push, which "
                        "`probe_push` off leaves out",
                    ) from error
                if not attempts_left or isinstance(error, RolloutServerError) and error.status is None:
                    raise
                await asyncio.sleep(PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _check_version(self, found: str | None, request: Request) -> None:
        if self.version is not None and found not in (None, self.version):
            raise StaleWeightsError(self.url, request.endpoint, found, self.version)


def _refuses(error: RolloutError) -> bool:
    """True if a server has understood the question and does not answer it."""
    return isinstance(error, RolloutServerError) and error.status is not None and not may_change(error)

"""Requests to one server for samples and for log-probs of given tokens, with more detail than training needs.

P prompt tokens, R response tokens.
"""

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from megatron_rl_corr.doctor.findings import Row
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.inspection import DetailedSample, ServedModel, TokenScores
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request, UnsupportedByEngine, checked_prompt_ids
from megatron_rl_corr.rollout.client import RolloutClient

PROMPT_TOKENS = 24
LIKELIEST = 8
"""Likeliest ids that come with each token."""


class Probe(ServerControl):
    """One server of a client; every request goes through the client, in the words of its engine.

    Args:
        client: of all servers.
        url: of the server.
        timeout_s: limit of one request.
    """

    def __init__(self, client: RolloutClient, url: str, timeout_s: float = 60.0):
        super().__init__(client.fleet, [url], update_timeout_s=timeout_s)
        self.engine = client.engine_of(url)
        self.client, self.url, self.timeout_s = client, url, timeout_s
        self._info: dict[str, Any] | None = None

    def fresh_prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """P random ids, of which no server has anything cached."""
        return [self._id(secrets.randbelow(1 << 30)) for _ in range(tokens)]

    def fixed_prompt(self, tokens: int = PROMPT_TOKENS) -> list[int]:
        """The same P ids each time, which an earlier examination may have left in the server's cache."""
        return [self._id(7 * i * i + 3 * i) for i in range(tokens)]

    async def cacheable(self) -> int:
        """P of a prompt of which the server's cache can hold a part: a whole block and some more ids."""
        block = self.engine.cache_block(await self.info())
        return PROMPT_TOKENS if block == 1 else block + PROMPT_TOKENS

    def _id(self, number: int) -> int:
        # From the middle of the vocabulary, at most 1000: special ids stand at its ends.
        low, high = min(100, self.client.vocab_size // 8), min(1000, self.client.vocab_size * 7 // 8)
        return low + number % max(1, high - low)

    async def ask(
        self, url: str, request: Request | None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """As ServerControl's, within the probe's own limit."""
        return await self.client.ask(url, request, timeout_s=self.timeout_s)

    async def control(self, request: Request) -> dict[str, Any]:
        """The server's answer to a request that has no method."""
        return await self.ask(self.url, request)

    async def served_model(self) -> ServedModel:
        """The model, and what its weights are called."""
        (model,) = await self.model_info()
        return self.engine.served_model(model, await self.info())

    async def info(self) -> dict[str, Any]:
        """Version and launch options, as the first answer told them."""
        if self._info is None:
            (self._info,) = await self.server_info()
        return self._info

    async def generate(
        self,
        prompt: list[int],
        tokens: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        experts: ExpertShape | None = None,
        **options: Any,
    ) -> DetailedSample:
        """Sample a response.

        Args:
            prompt: P ids.
            tokens: R; end-of-sequence ids do not end the response.
            temperature, top_p, top_k: of sampling.
            experts: how the model routes, to check the routed experts by; None: unknown.
            options: seed, likeliest, sampling_mask, routed_experts or request_id of
                `Inspection.detailed_sample`.

        Raises:
            ValueError: an id is outside the vocabulary.
            RolloutError: the server did not answer, failed, or answered something malformed.
            UnsupportedByEngine: the engine has no such request.
        """
        ids = checked_prompt_ids(prompt, vocab_size=self.client.vocab_size, prompt_index=0)
        sampling = SamplingParams(tokens, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=True)
        options = {"likeliest": LIKELIEST, "cache_key": self.client.cache_key} | options
        options["likeliest"] = self._likeliest(options["likeliest"])
        answer = await self.control(self.engine.detailed_sample(ids, sampling, **options))
        sample = self.engine.parse_detailed_sample(
            answer, server=self.url, prompt_ids=ids, tokens=tokens, experts=experts
        )
        if (most := max(sample.output, default=0)) >= self.client.vocab_size:
            raise RolloutProtocolError(
                self.url,
                self.engine.generate_endpoint,
                f"it sampled id {most}, and the model has {self.client.vocab_size} ids: serve it without "
                "padding of its vocabulary, or give the --vocab-size that it has",
            )
        return sample

    def _likeliest(self, count: int) -> int:
        """`count`, or what the vocabulary has beside a sampled id: asked for more, a server may end."""
        return max(1, min(count, self.client.vocab_size - 1))

    async def score(self, prompt: list[int], output: list[int], *, likeliest: int = LIKELIEST) -> TokenScores:
        """Log-probs of `output` after `prompt` from one prefill, without any cached key or value.

        Args:
            prompt: P ids.
            output: R ids.
            likeliest: ids that come with each token; fewer where the vocabulary has fewer.

        Raises:
            ValueError, RolloutError, UnsupportedByEngine: as for `generate`.
        """
        vocab_size = self.client.vocab_size
        checked_prompt_ids([*prompt, *output], vocab_size=vocab_size, prompt_index=0)
        request = self.engine.score(
            prompt, output, likeliest=min(likeliest, vocab_size), cache_key=self.client.cache_key
        )
        answer = await self.control(request)
        return self.engine.parse_scores(answer, server=self.url, output_ids=output, vocab_size=vocab_size)

    async def score_ids(self, prompt: list[int], ids: list[int]) -> np.ndarray:
        """[I] log-probs of chosen ids as the token after `prompt`.

        Args:
            prompt: P ids.
            ids: at most the engine's `most_scored_ids`.

        Raises:
            ValueError, RolloutError, UnsupportedByEngine: as for `generate`.
        """
        checked_prompt_ids([*prompt, *ids], vocab_size=self.client.vocab_size, prompt_index=0)
        answer = await self.control(self.engine.score_ids(prompt, ids, cache_key=self.client.cache_key))
        return self.engine.parse_id_scores(answer, server=self.url, ids=ids)


# Questions that an engine may not support


NotAnswered = UnsupportedByEngine | RolloutServerError
"""Why a question has no answer: the engine does not have it, or this server refused it and lives on."""
REFUSED = (400, 500)


async def if_supported[T](answer: Awaitable[T]) -> T | NotAnswered:
    """The answer, or the error that takes its place.

    Raises:
        RolloutServerError: the server did not answer, or lets nobody in.
    """
    try:
        return await answer
    except UnsupportedByEngine as error:
        return error
    except RolloutServerError as error:
        if error.status not in REFUSED:
            raise
        return error


def known[T](answer: T | NotAnswered) -> T:
    """The answer.

    Raises:
        UnsupportedByEngine: the engine does not support the question.
        RolloutServerError: the server refused it.
    """
    if isinstance(answer, NotAnswered):
        raise answer
    return answer


def unsupported(check: str, error: NotAnswered) -> Row:
    """The row of a question that has no answer."""
    if isinstance(error, RolloutServerError):
        return Row(
            check, "failed", f"refused: {error.detail}" + (f"; {error.remedy}" if error.remedy else "")
        )
    return Row(check, "failed", f"{error.what}: not supported by {error.engine}")


def attempt[T](function: Callable[..., T], *answers: Any) -> T | NotAnswered:
    """function(*answers), or the error among the answers or of the function itself."""
    try:
        return function(*map(known, answers))
    except (UnsupportedByEngine, RolloutServerError) as error:
        return error


def row_of(check: str, judge: Callable[..., Row], *answers: Any) -> Row:
    """The row that a judgement makes of answers; a failed one where the engine does not support one of them.

    Args:
        check: name of the row.
        judge: from the answers to the row.
        answers: as `if_supported` and `attempt` return them.
    """
    row = attempt(judge, *answers)
    return unsupported(check, row) if isinstance(row, NotAnswered) else row

"""Requests to one server for samples and for log-probs of given tokens, with more detail than training needs.

P prompt tokens, R response tokens, K likeliest ids of a token.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.types import Request, checked_prompt_ids
from megatron_rl_corr.rollout.client import RolloutClient

GENERATE = "/generate"
PROMPT_TOKENS = 24
TOP = 8


@dataclass(frozen=True)
class Answer:
    """A sampled response."""

    prompt: list[int]
    output: list[int]
    logprobs: np.ndarray
    """[R] log-probs of the sampled ids."""
    top: np.ndarray
    """[R, K] log-probs of the likeliest ids, in falling order."""
    top_ids: np.ndarray
    """[R, K] the likeliest ids."""
    meta: dict[str, Any]
    """The server's meta_info."""


@dataclass(frozen=True)
class Scores:
    """Log-probs of a text's tokens at temperature 1, from a prefill."""

    logprobs: np.ndarray
    """[R] log-probs of the ids after the prompt."""
    top: np.ndarray
    """[R, K] log-probs of the likeliest ids at their positions."""
    cached_tokens: int


class Probe(ServerControl):
    """One server of a client; every request goes through the client.

    Args:
        client: of all servers.
        url: of the server.
        timeout_s: limit of one request.
    """

    def __init__(self, client: RolloutClient, url: str, timeout_s: float = 60.0):
        super().__init__(client.engine, [url], client._transport, update_timeout_s=timeout_s)
        self.client, self.url, self.timeout_s = client, url, timeout_s

    def fresh_prompt(self) -> list[int]:
        """P random ids, of which no server has anything cached."""
        return [self._id(secrets.randbelow(1 << 30)) for _ in range(PROMPT_TOKENS)]

    def fixed_prompt(self) -> list[int]:
        """The same P ids each time, which an earlier examination may have left in the server's cache."""
        return [self._id(7 * i * i + 3 * i) for i in range(PROMPT_TOKENS)]

    def _id(self, number: int) -> int:
        # From the middle of the vocabulary, at most 1000: special ids stand at its ends.
        low, high = min(100, self.client.vocab_size // 8), min(1000, self.client.vocab_size * 7 // 8)
        return low + number % max(1, high - low)

    async def ask(self, url: str, request: Request | None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """As ServerControl's, within the probe's own limit."""
        return await self.client.ask(url, request, timeout_s=self.timeout_s)

    async def control(self, request: Request) -> dict[str, Any]:
        """The server's answer to a request that has no method."""
        return await self.ask(self.url, request)

    async def generate(self, prompt: list[int], tokens: int, *, temperature: float = 1.0, **fields: Any) -> Answer:
        """Sample a response.

        Args:
            prompt: ids.
            tokens: R; end-of-sequence ids do not end the response.
            temperature: of sampling.
            fields: top_p, top_k, seed, or any other field of the request.

        Raises:
            RolloutError: the server did not answer, failed, or answered something malformed.
        """
        sampling = requests.NEUTRAL | {
            "max_new_tokens": tokens,
            "temperature": temperature,
            "top_p": fields.pop("top_p", 1.0),
            "top_k": fields.pop("top_k", -1),
            "ignore_eos": True,
        }
        if "seed" in fields:
            sampling["sampling_seed"] = fields.pop("seed")
        body = {
            "input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": TOP, **fields
        }
        answer, meta = await self._ask(body)
        # An abort before the first token returns neither field.
        rows, tops = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
        try:
            output = [int(token) for token in answer["output_ids"]]
            if [row[1] for row in rows] != output or len(tops) != len(output):
                raise ValueError("output_ids, output_token_logprobs and output_top_logprobs are of different tokens")
            top, top_ids = _top(tops)
            return Answer(prompt, output, _column(rows, 0), top, top_ids, meta)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self.error(f"log-probs of {tokens} sampled tokens are missing or malformed ({error!r})") from None

    async def score(self, prompt: list[int], output: list[int], *, cached: bool = False) -> Scores:
        """Log-probs of `output` after `prompt` from one prefill.

        Args:
            prompt: ids.
            output: R ids.
            cached: use the prompt's cached keys and values, if there are any.

        Raises:
            RolloutError: as for `generate`.
        """
        start = len(prompt) - 1 if cached else 0
        sampling = requests.NEUTRAL | {"max_new_tokens": 1, "temperature": 0.0}
        body = {
            "input_ids": [*prompt, *output], "sampling_params": sampling, "return_logprob": True,
            "logprob_start_len": start, "top_logprobs_num": TOP,
        }  # fmt: skip
        _, meta = await self._ask(body)
        try:
            rows = meta["input_token_logprobs"][-len(output):]
            # SGLang 0.5.23 names the last id of the vocabulary 0 here; its log-prob is right.
            last = self.client.vocab_size - 1
            wrong = [row[1] for row, token in zip(rows, output, strict=True) if row[1] != token and token != last]
            if wrong:
                raise ValueError(f"input_token_logprobs are of other ids than were sent: {wrong[:4]}")
            top, _ = _top(meta["input_top_logprobs"][-len(output):])
            return Scores(_column(rows, 0), top, int(meta.get("cached_tokens", 0)))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise self.error(f"log-probs of {len(output)} scored tokens are missing or malformed ({error!r})") from None

    async def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        checked_prompt_ids(body["input_ids"], vocab_size=self.client.vocab_size, prompt_index=0)
        key = self.client.cache_key
        answer = await self.control(Request("POST", GENERATE, body if key is None else body | {"extra_key": key}))
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise self.error(f"no meta_info in {str(answer)[:200]}")
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and (reason.get("status_code") or reason.get("err_type")):
            detail = f"the request was aborted ({reason.get('err_type')}): {reason.get('message')}"
            raise RolloutServerError(self.url, GENERATE, reason.get("status_code") or 200, detail)
        return answer, meta

    def error(self, detail: str) -> RolloutProtocolError:
        return RolloutProtocolError(self.url, GENERATE, detail)


def _column(rows: list, index: int) -> np.ndarray:
    """One column of the rows as [R] float64. Raises ValueError for a log-prob that is not finite."""
    values = np.array([row[index] for row in rows], dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} log-probs are not finite")
    return values


def _top(tops: list) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and ids of the likeliest, [R, K] each."""
    shape = (len(tops), len(tops[0]) if tops else 0)
    logprobs = np.array([[entry[0] for entry in row] for row in tops], dtype=np.float64).reshape(shape)
    return logprobs, np.array([[entry[1] for entry in row] for row in tops], dtype=np.int64).reshape(shape)

"""Samples and scores in more detail than training needs: what the doctor asks a vLLM server for.

P prompt tokens, R response tokens, K likeliest ids of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rl_corr.engines import answer_size, answers
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.inspection import DetailedSample, KeptIds, TokenScores
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.engines.vllm.requests import GENERATE, sampling_fields
from megatron_rl_corr.engines.vllm.responses import FLOOR
from megatron_rl_corr.engines.vllm.routed_experts import decode, read_ids
from megatron_rl_corr.engines.vllm.seeds import server_seed

MALFORMED = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)


def detailed_sample(
    prompt_ids: list[int],
    sampling: SamplingParams,
    *,
    seed: int | None = None,
    likeliest: int,
    sampling_mask: bool = False,
    routed_experts: bool = False,
    request_id: str | None = None,
    cache_key: str | None = None,
) -> Request:
    """POST /inference/v1/generate with `logprobs`; arguments as in `Inspection.detailed_sample`.

    Whether the sampling mask and the routed experts are returned is for the server's flags alone:
    no request asks.
    """
    # One more than K: the list begins with the sampled id, and 0.32 cuts it to this length.
    params = sampling_fields(sampling) | {"logprobs": likeliest + 1}
    if seed is not None:
        params["seed"] = server_seed(seed)
    size = answer_size.of_sample(len(prompt_ids), sampling)
    size += answer_size.of_likeliest(sampling.max_new_tokens, likeliest)
    return _generate(prompt_ids, params, size, request_id=request_id, cache_key=cache_key)


def parse_detailed_sample(
    answer: Mapping[str, Any],
    *,
    server: str,
    prompt_ids: list[int],
    tokens: int,
    experts: ExpertShape | None = None,
) -> DetailedSample:
    """The response; arguments and errors as in `Inspection.parse_detailed_sample`."""
    try:
        (choice,) = answer["choices"]
        output = answers.token_ids(choice["token_ids"], "token_ids")
        rows = answers.mapping_of(choice["logprobs"], "logprobs").get("content") or []
        of_ids = answers.token_ids([row["token_id"] for row in rows], "logprobs.content")
        if not np.array_equal(of_ids, output):
            raise ValueError("token_ids and logprobs are of different tokens")
        if len(output) > tokens:
            raise ValueError(f"{len(output)} token_ids were returned where {tokens} were asked for")
        logprobs = _finite([row["logprob"] for row in rows])
        top, top_ids = _likeliest([row["top_logprobs"] for row in rows])
        spans = choice.get("weight_versions")
        return DetailedSample(
            prompt_ids,
            output.tolist(),
            logprobs,
            top,
            top_ids,
            _kept(choice, logprobs),
            routed_ids(choice.get("routed_experts"), tokens=len(prompt_ids) + len(output), shape=experts),
            retractions=None,
            version_spans=None if spans is None else answers.version_spans(spans, len(output)),
            cached_tokens=_cached_tokens(answer, len(prompt_ids)),
        )
    except MALFORMED as error:
        detail = f"log-probs of {tokens} sampled tokens are missing or malformed ({error!r})"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def score(
    prompt_ids: list[int], output_ids: list[int], *, likeliest: int, cache_key: str | None = None
) -> Request:
    """POST /inference/v1/generate with `prompt_logprobs`; arguments as in `Inspection.score`.

    vLLM answers from the softmax at temperature 1, whatever its logprobs mode, and reads no
    prefix from its cache.
    """
    # A server that returns sampling masks refuses temperature 0, and a request without a top_k. 1 is greedy.
    params = sampling_fields(SamplingParams(1)) | {"top_k": 1, "prompt_logprobs": likeliest}
    size = answer_size.of_likeliest(len(prompt_ids) + len(output_ids), likeliest)
    return _generate([*prompt_ids, *output_ids], params, size, cache_key=cache_key)


def parse_scores(
    answer: Mapping[str, Any], *, server: str, output_ids: list[int], vocab_size: int
) -> TokenScores:
    """The scores; arguments and errors as in `Inspection.parse_scores`."""
    count = len(output_ids)
    try:
        rows = answer["prompt_logprobs"][1:][-count:]
        # The id itself always comes, beside the likeliest.
        own = [row[str(token)]["logprob"] for row, token in zip(rows, output_ids, strict=True)]
        top, top_ids = _likeliest(
            [[{"token_id": int(token)} | entry for token, entry in row.items()] for row in rows]
        )
        # of the one token that was sampled, after the scores
        spans = answer["choices"][0].get("weight_versions")
        version = answers.version_spans(spans, 1)[-1].version if spans else None
        return TokenScores(_finite(own), top, top_ids, version)
    except MALFORMED as error:
        detail = f"log-probs of {count} scored tokens are missing or malformed ({error!r})"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def routed_ids(encoded: str | None, *, tokens: int, shape: ExpertShape | None) -> int | str | None:
    """How many ids a server's `routed_experts` has; a text: what is wrong with them; None: it
    has no such field.

    Args:
        encoded: base64 of a .npy file, with a row for each token but the last, for which
            nothing was computed.
        tokens: of prompt and response.
        shape: the model's; None: unknown, so that only the number of rows is checked.
    """
    if encoded is None:
        return None
    try:
        ids = read_ids(encoded)
        if shape is not None:
            decode(encoded, tokens=tokens, shape=shape)
        elif ids.ndim != 3 or len(ids) != tokens - 1 or ids.size == 0:
            raise ValueError(f"{' x '.join(map(str, ids.shape))} ids for {tokens - 1} tokens")
        return int(ids.size)
    except ValueError as error:
        return str(error)


def _generate(
    token_ids: list[int],
    params: dict[str, Any],
    max_bytes: int,
    *,
    request_id: str | None = None,
    cache_key: str | None = None,
) -> Request:
    body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": params, "stream": False}
    if request_id is not None:
        body["request_id"] = request_id
    if cache_key is not None:
        body["cache_salt"] = cache_key
    return Request("POST", GENERATE, body, max_bytes=max_bytes)


def _kept(choice: Mapping[str, Any], logprobs: np.ndarray) -> KeptIds | str:
    """What a token was drawn from."""
    sets = choice.get("sampling_mask")
    if sets is None:
        return "the answer holds no sampling_mask"
    for ids in answers.check_lengths(sets, len(logprobs), "sampling_mask"):
        answers.token_ids(ids, "sampling_mask")
    return KeptIds(sets, logprobs.tolist())


def _cached_tokens(answer: Mapping[str, Any], prompt_tokens: int) -> int | None:
    """Prompt tokens that came from the cache; None without --enable-prompt-tokens-details."""
    usage = answers.mapping_of(answer.get("usage"), "usage")
    details = answers.mapping_of(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return (
        None
        if details.get("cached_tokens") is None
        else answers.count_of(details, "cached_tokens", prompt_tokens)
    )


def _finite(values: list[float | None]) -> np.ndarray:
    """[N] float64. Raises ValueError for a log-prob that is not finite, for which vLLM writes
    null or its floor.
    """
    numbers = answers.float64(values, "they are no numbers")
    return answers.finite_logprobs(
        np.where(numbers > FLOOR, numbers, np.nan).tolist(), "they are no log-probs"
    )


def _likeliest(rows: list[list[Mapping[str, Any]]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and ids of the likeliest, [R, K] each, in falling order; K is what all rows have.

    Args:
        rows: for each of R tokens entries of `token_id`, `logprob` and `rank` (from 1): of the likeliest,
            and of the token's own id, wherever that ranks.
    """
    ordered = [sorted(row, key=lambda entry: entry["rank"]) for row in rows]
    width = min(
        (sum(entry["rank"] == place for place, entry in enumerate(row, 1)) for row in ordered), default=0
    )
    shape = (len(rows), width)
    entries = [entry for row in ordered for entry in row[:width]]
    logprobs = answers.float64([entry["logprob"] for entry in entries], "the likeliest have no log-probs")
    ids = answers.token_ids([entry["token_id"] for entry in entries], "the likeliest")
    return logprobs.reshape(shape), ids.reshape(shape)

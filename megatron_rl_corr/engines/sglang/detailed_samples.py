"""Samples and scores in more detail than training needs: what the doctor asks an SGLang
server's /generate for.

P prompt tokens, R response tokens, K likeliest ids of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rl_corr.engines import answer_size, answers
from megatron_rl_corr.engines.errors import MESSAGE_START, RolloutProtocolError, RolloutServerError, shown
from megatron_rl_corr.engines.inspection import DetailedSample, KeptIds, TokenScores
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sglang.requests import NEUTRAL, sampling_fields
from megatron_rl_corr.engines.sglang.responses import GENERATE, MASK, MASK_LOGPROBS
from megatron_rl_corr.engines.sglang.routed_experts import MOST_RETRACTIONS, decode, read_ids
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request

MALFORMED = (KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError)
ROWS = "it is not a list of (log-prob, id, text)"


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
    """POST /generate with `top_logprobs_num`; arguments as in `Inspection.detailed_sample`."""
    body = {
        "input_ids": prompt_ids,
        "sampling_params": sampling_fields(sampling),
        "return_logprob": True,
        "top_logprobs_num": likeliest,
    }
    if seed is not None:
        body["sampling_params"]["sampling_seed"] = seed
    if sampling_mask:
        body["return_sampling_mask"] = True
    if routed_experts:
        body["return_routed_experts"] = True
    if request_id is not None:
        body["rid"] = request_id
    if cache_key is not None:
        body["extra_key"] = cache_key
    size = answer_size.of_sample(len(prompt_ids), sampling)
    size += answer_size.of_likeliest(sampling.max_new_tokens, likeliest)
    return Request("POST", GENERATE, body, max_bytes=size)


def parse_detailed_sample(
    answer: Mapping[str, Any],
    *,
    server: str,
    prompt_ids: list[int],
    tokens: int,
    experts: ExpertShape | None = None,
) -> DetailedSample:
    """The response; arguments and errors as in `Inspection.parse_detailed_sample`."""
    meta = _meta(answer, server)
    # An abort before the first token returns neither field.
    rows, tops = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
    spans = meta.get("weight_versions")
    try:
        output = answers.token_ids(answer["output_ids"], "output_ids")
        of_ids = answers.token_ids([row[1] for row in rows], "output_token_logprobs")
        if not np.array_equal(of_ids, output) or len(tops) != len(output):
            raise ValueError(
                "output_ids, output_token_logprobs and output_top_logprobs are of different tokens"
            )
        if len(output) > tokens:
            raise ValueError(f"{len(output)} output_ids were returned where {tokens} were asked for")
        top, top_ids = _top(tops)
        return DetailedSample(
            prompt_ids,
            output.tolist(),
            answers.finite_logprobs([row[0] for row in rows], ROWS),
            top,
            top_ids,
            _kept(meta, len(output)),
            routed_ids(meta.get("routed_experts"), tokens=len(prompt_ids) + len(output), shape=experts),
            answers.count_of(meta, "num_retractions", MOST_RETRACTIONS),
            None if spans is None else answers.version_spans(spans, len(output)),
            answers.count_of(meta, "cached_tokens", len(prompt_ids)),
        )
    except MALFORMED as error:
        detail = f"log-probs of {tokens} sampled tokens are missing or malformed ({error!r})"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def score(
    prompt_ids: list[int], output_ids: list[int], *, likeliest: int, cache_key: str | None = None
) -> Request:
    """POST /generate for one token after both; arguments as in `Inspection.score`."""
    body = {
        "input_ids": [*prompt_ids, *output_ids],
        "sampling_params": {**NEUTRAL, "max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,  # SGLang takes at most the tokens before this one from its cache
        "top_logprobs_num": likeliest,
    }
    if cache_key is not None:
        body["extra_key"] = cache_key
    size = answer_size.of_likeliest(len(prompt_ids) + len(output_ids), likeliest)
    return Request("POST", GENERATE, body, max_bytes=size)


def parse_scores(
    answer: Mapping[str, Any], *, server: str, output_ids: list[int], vocab_size: int
) -> TokenScores:
    """The scores; arguments and errors as in `Inspection.parse_scores`."""
    meta, count = _meta(answer, server), len(output_ids)
    try:
        rows = meta["input_token_logprobs"][-count:]
        of_ids = answers.token_ids([row[1] for row in rows], "input_token_logprobs").tolist()
        # SGLang 0.5.23 names the last id of the vocabulary 0 here; its log-prob is right.
        last = vocab_size - 1
        wrong = [own for own, token in zip(of_ids, output_ids, strict=True) if own != token and token != last]
        if wrong:
            raise ValueError(f"input_token_logprobs are of other ids than were sent: {wrong[:4]}")
        top, top_ids = _top(meta["input_top_logprobs"][-count:])
        if len(top) != count:
            raise ValueError(f"input_top_logprobs are of {len(top)} tokens")
        # of the one token that was sampled, in the pass that scored the others
        spans = meta.get("weight_versions")
        version = answers.version_spans(spans, 1)[-1].version if spans else None
        logprobs = answers.finite_logprobs([row[0] for row in rows], ROWS)
        return TokenScores(logprobs, top, top_ids, version)
    except MALFORMED as error:
        detail = f"log-probs of {count} scored tokens are missing or malformed ({error!r})"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def score_ids(prompt_ids: list[int], ids: list[int], *, cache_key: str | None = None) -> Request:
    """POST /generate for one token with `token_ids_logprob`; arguments as in `Inspection.score_ids`."""
    body = {
        "input_ids": prompt_ids,
        "sampling_params": sampling_fields(SamplingParams(1)),
        "return_logprob": True,
        "token_ids_logprob": ids,
    }
    if cache_key is not None:
        body["extra_key"] = cache_key
    size = answer_size.of_sample(len(prompt_ids), SamplingParams(1))
    return Request("POST", GENERATE, body, max_bytes=size + answer_size.of_likeliest(1, len(ids)))


def parse_id_scores(answer: Mapping[str, Any], *, server: str, ids: list[int]) -> np.ndarray:
    """The log-probs; arguments and errors as in `Inspection.parse_id_scores`."""
    meta = _meta(answer, server)
    try:
        [rows] = meta["output_token_ids_logprobs"]
        if answers.token_ids([row[1] for row in rows], "output_token_ids_logprobs").tolist() != ids:
            raise ValueError("output_token_ids_logprobs are of other ids than were asked for")
        return answers.logprobs_of_ids([row[0] for row in rows], ROWS)
    except MALFORMED as error:
        detail = f"log-probs of {len(ids)} chosen ids are missing or malformed ({error!r})"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def routed_ids(encoded: object, *, tokens: int, shape: ExpertShape | None) -> int | str | None:
    """How many ids a server's `routed_experts` has; a text: what is wrong with them; None: it
    has no such field.

    Args:
        encoded: a row for each token but the last, for which nothing was computed.
        tokens: of prompt and response.
        shape: the model's; None: unknown, so that only the number of ids is checked.
    """
    if encoded is None:
        return None
    try:
        ids = read_ids(encoded)
        if shape is not None:
            decode(encoded, tokens=tokens, shape=shape)
        elif ids.size == 0 or tokens < 2 or ids.size % (tokens - 1):
            raise ValueError(f"{ids.size} ids for {tokens - 1} tokens")
        return int(ids.size)
    except ValueError as error:
        return str(error)


def _meta(answer: Mapping[str, Any], server: str) -> dict[str, Any]:
    """`meta_info` of an answer to /generate that does not say that the request failed."""
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise RolloutProtocolError(server, GENERATE, f"no meta_info in {shown(answer)}")
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return meta
    status, kind = reason.get("status_code"), reason.get("err_type")
    if status or kind:
        detail = f"the request was aborted ({shown(kind)}): {shown(reason.get('message'), MESSAGE_START)}"
        raise RolloutServerError(server, GENERATE, answers.status_of(status, 200), detail)
    return meta


def _kept(meta: Mapping[str, Any], count: int) -> KeptIds | str:
    if meta.get(MASK) is None or meta.get(MASK_LOGPROBS) is None:
        return f"the answer holds no {MASK}"
    for name in (MASK, MASK_LOGPROBS):
        answers.check_lengths(meta[name], count, name)
    for ids in meta[MASK]:
        answers.token_ids(ids, MASK)
    answers.float32(meta[MASK_LOGPROBS], f"{MASK_LOGPROBS} is not a list of log-probs")
    return KeptIds(meta[MASK], meta[MASK_LOGPROBS])


def _top(tops: list) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and ids of the likeliest, [R, K] each."""
    shape = (len(tops), len(tops[0]) if tops else 0)
    entries = [entry for row in tops for entry in row]
    logprobs = answers.float64(
        [entry[0] for entry in entries], "the likeliest ids have log-probs that are none"
    )
    return logprobs.reshape(shape), answers.token_ids(
        [entry[1] for entry in entries], "the likeliest"
    ).reshape(shape)

"""Parses what a vLLM server answers: bytes in, `Trajectory` or dict out, or a `RolloutProtocolError`.

P prompt tokens, R response tokens, K_t ids that token t was drawn from, K likeliest ids of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from megatron_rl_corr.engines import answers
from megatron_rl_corr.engines.answer_types import check_fields
from megatron_rl_corr.engines.errors import MESSAGE_START, RolloutServerError, body_start, shown
from megatron_rl_corr.engines.routes import cut_routes, no_routes
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.trajectory import TopLogprobs, Trajectory, VersionSpan
from megatron_rl_corr.engines.vllm.answer_fields import EMPTY, FIELDS
from megatron_rl_corr.engines.vllm.requests import GENERATE
from megatron_rl_corr.engines.vllm.routed_experts import MissingRoutes, decode

FLOOR = -9999.0
"""What vLLM writes for a log-prob that is NaN or -inf, and for one that it does not have."""
REFUSED = 400
"""The status of what a method of the worker extension has refused: vLLM answers 200 with
the refusal in it.
"""
UNKNOWN_VERSION = "unknown"
"""The weight version of a response without tokens, for which vLLM tells none."""


def parse_generate(body: bytes, asked: SampleRequest, *, server: str) -> Trajectory:
    """The trajectory in the answer to one `generate_request`; arguments as in `Engine.parse`.

    Log-probs that are null, NaN or infinite become NaN. An abort for a pause or by request gives
    the tokens so far. `pushes_retract` is without effect: vLLM (0.32) hands out the routes of each pass with
    the token sampled in it, and none of a pass that computes tokens anew.

    Raises:
        RolloutServerError: the answer is an error.
        RolloutProtocolError: the answer is not what was asked for: ids that differ from those the
            log-probs are of, lengths that disagree, unknown ids, spans of weight versions that don't
            partition the response, a support that is missing or lacks the token drawn from it, routes that
            break a rule of `decode`.
    """
    with answers.reading(server, GENERATE):
        body, encoded = cut_routes(body)
        answer = answers.json_object(body, server, GENERATE)
        _raise_error(answer, server, GENERATE, 200)
        choice = _choice(answer)
        ids = answers.token_ids(choice.get("token_ids"), "token_ids")
        usage = answers.mapping_of(answer.get("usage"), "usage")
        answers.check_count(usage, "prompt_tokens", asked.prompt_ids.numel(), "ids were sent")
        answers.check_count(usage, "completion_tokens", ids.size, "token_ids were returned")
        answers.check_length(ids, choice["finish_reason"], asked.sampling.max_new_tokens)
        answers.check_vocabulary(ids, asked.vocab_size, "token id")
        return Trajectory(
            prompt_index=asked.prompt_index,
            sample_index=asked.sample_index,
            prompt_ids=asked.prompt_ids,
            output_ids=torch.from_numpy(ids),
            rollout_logprobs=torch.from_numpy(_logprobs(choice, ids)),
            finish_reason=choice["finish_reason"],
            weight_versions=_weight_versions(choice, ids.size),
            cached_tokens=_cached_tokens(usage, asked.prompt_ids.numel()),
            server=server,
            support=_support(choice, ids, asked.vocab_size) if asked.sampling.needs_mask else None,
            top_logprobs=_top_logprobs(choice, ids.size, asked.sampling.top_logprobs, asked.vocab_size),
            routed_experts=_routes(choice, encoded, ids.size, asked),
            routes_from=asked.routes_from,
        )


def parse_control(body: bytes, *, server: str, endpoint: str, status: int) -> dict[str, Any]:
    """The JSON object of a control endpoint's answer; {} for those that answer nothing.

    Raises RolloutServerError for {"success": false}, for {"error": ..}, whatever the status, and for an
    error that a worker extension's method has answered.
    """
    with answers.reading(server, endpoint):
        if not body and endpoint in EMPTY:
            return {}
        answer = answers.json_object(answers.without_secrets(body), server, endpoint)
        if answer.get("success") is False:
            raise RolloutServerError(server, endpoint, status, body_start(body))
        _raise_error(answer, server, endpoint, status)
        check_fields(answer, endpoint, FIELDS)
        results = answer.get("results") or []
        told = [
            shown(one["error"], MESSAGE_START) for one in results if isinstance(one, dict) and "error" in one
        ]
        if told:  # of each rank that refused, mostly the same
            raise RolloutServerError(server, endpoint, REFUSED, "; ".join(dict.fromkeys(told)))
        return answer


def _raise_error(answer: dict, server: str, endpoint: str, status: int) -> None:
    """{"error": {"message", "type", "param", "code"}}, in older endpoints {"error": text}."""
    error = answer.get("error")
    if error is None:
        return
    code, message = None, error
    if isinstance(error, dict):
        code, message = error.get("code"), error.get("message")
    raise RolloutServerError(server, endpoint, answers.status_of(code, status), shown(message, MESSAGE_START))


def _choice(answer: dict) -> dict:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError(f"choices must hold one response, got {shown(choices)}")
    reason = choices[0].get("finish_reason")
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason must be stop, length or abort, got {shown(reason)}")
    return choices[0]


def _logprobs(choice: dict, ids: np.ndarray) -> np.ndarray:
    """[R] float32 from rows of {"token_id", "logprob"}, whose ids must be the response's."""
    name = "logprobs.content"
    content = answers.mapping_of(choice.get("logprobs"), "logprobs").get("content")
    if content is None and not ids.size:  # aborted before the first token
        return np.empty(0, np.float32)
    rows = answers.check_lengths(content, ids.size, name)
    try:
        values, of_ids = list(map(itemgetter("logprob"), rows)), list(map(itemgetter("token_id"), rows))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name} is not a list of token_id and logprob: {error}") from None
    answers.check_same_ids(ids, answers.token_ids(of_ids, name), "token_ids", name)
    logprobs = answers.float32(values, f"{name} has a logprob that is no number")
    logprobs[logprobs <= FLOOR] = np.nan
    return logprobs


def _weight_versions(choice: dict, response_length: int) -> tuple[VersionSpan, ...]:
    """Spans that partition [0, R)."""
    spans = choice.get("weight_versions")
    if spans in (None, []) and not response_length:
        return (VersionSpan(UNKNOWN_VERSION, 0, 0),)
    if spans is None:
        raise ValueError(
            "it sent no weight_versions, so which weights sampled what is unknown: use vLLM 0.32 or newer"
        )
    return answers.version_spans(spans, response_length)


def _cached_tokens(usage: Mapping[str, Any], prompt_tokens: int) -> int:
    """Only a server with --enable-prompt-tokens-details tells; 0 else."""
    details = answers.mapping_of(usage.get("prompt_tokens_details"), "prompt_tokens_details")
    return answers.count_of(details, "cached_tokens", prompt_tokens)


def _support(choice: dict, ids: np.ndarray, vocab_size: int | None):
    sets = choice.get("sampling_mask")
    if sets is None and ids.size:
        raise ValueError(
            "it sent no sampling_mask, so what `top_p`, `top_k` and `min_p` kept is unknown: start the "
            "server with --return-sampling-mask (and VLLM_USE_V2_MODEL_RUNNER=1 where that runner is not "
            "the default), or leave them out"
        )
    sets = answers.check_lengths([] if sets is None else sets, ids.size, "sampling_mask")
    return answers.support(sets, ids, vocab_size, "sampling_mask")


def _top_logprobs(choice: dict, tokens: int, count: int, vocab_size: int | None) -> TopLogprobs | None:
    """[R, K], from R rows of {"token_id", "logprob"}: of the sampled id and the likeliest, it among them."""
    if not count:
        return None
    name = "top_logprobs of logprobs.content"
    content = answers.mapping_of(choice.get("logprobs"), "logprobs").get("content")
    logprobs, ids = [], []
    for row in answers.check_lengths([] if content is None else content, tokens, "logprobs.content"):
        try:
            by_id = {entry["token_id"]: entry["logprob"] for entry in row["top_logprobs"]}
            ordered = sorted(by_id, key=by_id.__getitem__, reverse=True)[:count]
        except (TypeError, KeyError):
            raise ValueError(f"{name} is not a list of token_id and logprob: {shown(row)}") from None
        ids.append(ordered)
        logprobs.append([by_id[one] for one in ordered])
    return answers.top_logprobs(logprobs, ids, count=count, vocab_size=vocab_size, name=name)


def _routes(choice: dict, cut: memoryview | None, output: int, asked: SampleRequest) -> torch.Tensor | None:
    """[P + R - 1 - routes_from, M, k]."""
    if asked.experts is None:
        return None
    experts, first, tokens = asked.experts, asked.routes_from, asked.prompt_ids.numel() + output
    encoded = choice.get("routed_experts")
    if encoded is True and cut is not None:
        encoded = cut
    # before it ran: the server has no routes to give
    if encoded is None and choice["finish_reason"] == "abort":
        return no_routes(experts, tokens - 1 - first)
    if encoded is None:
        raise ValueError(
            "rule presence: it sent no routed_experts though they were asked for, which `router_replay` R3 "
            "needs: start the server with --enable-return-routed-experts (and VLLM_USE_V2_MODEL_RUNNER=1 "
            "where that runner is not the default)"
        )
    try:
        return decode(encoded, tokens=tokens, shape=experts, first=first)
    except MissingRoutes:
        raise
    except ValueError as error:
        raise ValueError(f"{error}; is it serving another model?") from None

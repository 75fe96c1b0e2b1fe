"""Parses what an SGLang server answers: bytes in, `Trajectory` or dict out, or a `RolloutProtocolError`.

P prompt tokens, R response tokens, K_t ids that token t was drawn from, K likeliest ids of each.
"""

from operator import itemgetter
from typing import Any

import numpy as np
import torch

from megatron_rl_corr.engines import answers
from megatron_rl_corr.engines.answer_types import check_fields
from megatron_rl_corr.engines.errors import MESSAGE_START, RolloutServerError, body_start, shown
from megatron_rl_corr.engines.routes import ExpertShape, cut_routes, no_routes
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.secrets import redacted
from megatron_rl_corr.engines.sglang.answer_fields import EMPTY, FIELDS, SENTENCES
from megatron_rl_corr.engines.sglang.indexer_keys import KEYS, decode_keys
from megatron_rl_corr.engines.sglang.logprob_rows import read_flat
from megatron_rl_corr.engines.sglang.routed_experts import decode, tokens_recomputed
from megatron_rl_corr.engines.trajectory import Support, TopLogprobs, Trajectory, VersionSpan

GENERATE = "/generate"
MASK, MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
TOP = "output_top_logprobs"
NO_ROWS = "output_token_logprobs is not a list of (log-prob, id, text)"
MOST_SECONDS = 1e6
"""A request of more than 11 days is none: a time above that says nothing."""


def parse_generate(body: bytes, asked: SampleRequest, *, server: str) -> Trajectory:
    """The trajectory in the answer to one `generate_request`; arguments as in `Engine.parse`.

    Log-probs that are null, NaN or infinite become NaN. An abort for a pause or by request gives
    the tokens so far.

    Raises:
        RolloutServerError: the request failed: its abort carries a status code or an error type.
        RolloutProtocolError: the answer is not what was asked for: ids that differ from those the
            log-probs are of, lengths that disagree, unknown ids, a support that is missing or lacks the
            token drawn from it, routes that break a rule of `decode` or `tokens_recomputed`, keys that
            break one of `decode_keys`.
    """
    with answers.reading(server, GENERATE):
        body, encoded = cut_routes(body)
        body, encoded_keys = cut_routes(body, KEYS) if asked.sampling.keys is not None else (body, None)
        answer, output_ids, values = read_flat(body) or (
            answers.json_object(body, server, GENERATE),
            None,
            None,
        )
        meta = answer.get("meta_info")
        if not isinstance(meta, dict) or "output_ids" not in answer:
            raise ValueError(f"no output_ids or meta_info in {body_start(body)}")
        finish_reason = _finish_reason(meta, server)
        if output_ids is None:
            output_ids = answers.token_ids(answer["output_ids"], "output_ids")
        answers.check_count(meta, "prompt_tokens", asked.prompt_ids.numel(), "ids were sent")
        answers.check_count(meta, "completion_tokens", output_ids.size, "output_ids were returned")
        answers.check_length(output_ids, finish_reason, asked.sampling.max_new_tokens)
        answers.check_vocabulary(output_ids, asked.vocab_size, "token id")
        if values is None:
            values = _logprob_values(meta, output_ids)
        logprobs, support = answers.float32(values, NO_ROWS), None
        if asked.sampling.needs_mask:
            logprobs, support = _truncated(meta, output_ids, asked.vocab_size)
        versions = _weight_versions(meta, output_ids.size)
        return Trajectory(
            prompt_index=asked.prompt_index,
            sample_index=asked.sample_index,
            prompt_ids=asked.prompt_ids,
            output_ids=torch.from_numpy(output_ids),
            rollout_logprobs=torch.from_numpy(logprobs),
            finish_reason=finish_reason,
            weight_versions=versions,
            # Absent when a request was aborted before it started.
            cached_tokens=answers.count_of(meta, "cached_tokens", asked.prompt_ids.numel()),
            server=server,
            support=support,
            top_logprobs=_top_logprobs(meta, output_ids.size, asked.sampling.top_logprobs, asked.vocab_size),
            routed_experts=_routes(meta, versions, encoded, output_ids.size, asked),
            routes_from=asked.routes_from,
            indexer_keys=_keys(meta, versions, encoded_keys, output_ids.size, asked),
        )


def parse_control(body: bytes, *, server: str, endpoint: str, status: int) -> dict[str, Any]:
    """The JSON object of a control endpoint's answer; {} for those that answer with a sentence or nothing.

    Raises:
        RolloutServerError: {"success": false}, whatever the status.
        RolloutProtocolError: it is no answer to this request, as a proxy's page is none.
    """
    name = endpoint.partition("?")[0]
    with answers.reading(server, endpoint):
        sentence = SENTENCES.get(name)
        if sentence is not None and not body.startswith(sentence):
            raise ValueError(f'it must begin with "{sentence.decode()}", got {body_start(body)}')
        if sentence is not None or (name in EMPTY and not body):
            return {}
        answer = answers.json_object(answers.without_secrets(body), server, endpoint)
        if answer.get("success") is False:
            raise RolloutServerError(server, endpoint, status, body_start(body))
        return check_fields(answer, endpoint, FIELDS)


def _logprob_values(meta: dict, output_ids: np.ndarray) -> list:
    """[R] log-probs or null, from rows of (log-prob or null, id, text or null); the ids must
    be the output_ids.
    """
    name = "output_token_logprobs"
    rows = meta.get(name)
    rows = answers.check_lengths([] if rows is None else rows, output_ids.size, name)
    try:
        values, of_ids = list(map(itemgetter(0), rows)), list(map(itemgetter(1), rows))
    except (TypeError, IndexError, KeyError):  # a text has both, which are no numbers then
        raise ValueError(f"{NO_ROWS}: {shown(rows)}") from None
    answers.check_same_ids(output_ids, answers.token_ids(of_ids, name), "output_ids", name)
    return values


def _truncated(meta: dict, output_ids: np.ndarray, vocab_size: int | None) -> tuple[np.ndarray, Support]:
    """[R] float32 log-probs renormalised on the ids that each token was drawn from, and those ids."""
    if not output_ids.size:  # an abort before the first token has neither field
        meta = {MASK: [], MASK_LOGPROBS: []} | meta
    for name in (MASK, MASK_LOGPROBS):
        if meta.get(name) is None:
            raise ValueError(
                f"it sent no {name} though return_sampling_mask asked for it, so what `top_p`, "
                "`top_k` and `min_p` kept is unknown: use SGLang 0.5.16 or newer, or leave them out"
            )
        answers.check_lengths(meta[name], output_ids.size, name)
    logprobs = answers.float32(meta[MASK_LOGPROBS], f"{MASK_LOGPROBS} is not a list of log-probs")
    return logprobs, answers.support(meta[MASK], output_ids, vocab_size, MASK)


def _top_logprobs(meta: dict, tokens: int, count: int, vocab_size: int | None) -> TopLogprobs | None:
    """[R, K], from R rows of K times (log-prob, id, text or null)."""
    if not count:
        return None
    rows = meta.get(TOP)
    rows = answers.check_lengths([] if rows is None else rows, tokens, TOP)
    try:
        logprobs, ids = ([[entry[at] for entry in row] for row in rows] for at in (0, 1))
    except (TypeError, IndexError, KeyError):
        raise ValueError(f"{TOP} is not a list of lists of (log-prob, id, text): {shown(rows)}") from None
    return answers.top_logprobs(logprobs, ids, count=count, vocab_size=vocab_size, name=TOP)


def _routes(
    meta: dict,
    versions: tuple[VersionSpan, ...],
    cut: memoryview | None,
    output: int,
    asked: SampleRequest,
) -> torch.Tensor | None:
    """[P + R - 1 - routes_from, M, k]: the answer's rows, none for tokens computed anew."""
    if asked.experts is None:
        return None
    experts, first, tokens = asked.experts, asked.routes_from, asked.prompt_ids.numel() + output
    encoded = meta.get("routed_experts")
    if encoded is True and cut is not None:
        encoded = cut
    # Aborted while it waited, for the first time or to be computed anew: the server has no routes to give.
    if encoded is None and meta["finish_reason"]["type"] == "abort":
        return no_routes(experts, tokens - 1 - first)
    if encoded is None:
        raise ValueError(
            "rule presence: it sent no routed_experts though they were asked for, which `router_replay` R3 "
            "needs: start the server with --enable-return-routed-experts"
        )
    try:
        own = decode(encoded, tokens=tokens, shape=experts, first=first)
    except ValueError as error:
        raise ValueError(f"{error}; is it serving another model?") from None
    return _without_recomputed(own, experts, meta, versions, output, asked, first=first)


def _keys(
    meta: dict,
    versions: tuple[VersionSpan, ...],
    cut: memoryview | None,
    output: int,
    asked: SampleRequest,
) -> torch.Tensor | None:
    """[P + R - 1, L, K]: the keys that sparse attention took, none for tokens computed anew."""
    shape = asked.sampling.keys
    if shape is None:
        return None
    found = decode_keys(meta, cut, tokens=asked.prompt_ids.numel() + output, shape=shape)
    if meta.get("indexer_topk") is None:
        return found
    return _without_recomputed(found, shape, meta, versions, output, asked)


def _without_recomputed(
    rows: torch.Tensor,
    shape: ExpertShape,
    meta: dict,
    versions: tuple[VersionSpan, ...],
    output: int,
    asked: SampleRequest,
    *,
    first: int = 0,
) -> torch.Tensor:
    """The rows, from token `first` on, none of them for tokens computed anew; they are changed."""
    prompt = asked.prompt_ids.numel()
    anew = tokens_recomputed(
        meta, versions, prompt=prompt, tokens=prompt + output, pushes_retract=asked.pushes_retract
    )
    lost = max(0, anew - first)
    rows[:lost] = no_routes(shape, lost)
    return rows


def _finish_reason(meta: dict, server: str) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason must be stop, length or abort, got {shown(reason)}")
    failed = kind == "abort" and (reason.get("status_code") is not None or reason.get("err_type") is not None)
    if failed:
        detail = (
            f"request {shown(meta.get('id'))} was aborted ({shown(reason.get('err_type'))}): "
            f"{shown(reason.get('message'), MESSAGE_START)}"
        )
        raise RolloutServerError(server, GENERATE, answers.status_of(reason.get("status_code"), 200), detail)
    return kind


def _weight_versions(meta: dict, response_length: int) -> tuple[VersionSpan, ...]:
    """Spans that partition [0, R). SGLang before 0.5.19 reports no spans, only the version at the end."""
    spans = meta.get("weight_versions")
    if spans is not None:
        return answers.version_spans(spans, response_length)
    version = meta.get("weight_version")
    if not isinstance(version, str):
        raise ValueError(f"weight_version must be a string, got {shown(version)}")
    return (VersionSpan(redacted(version), 0, response_length),)


def server_times(body: bytes) -> dict[str, float]:
    """Seconds of a response; only servers with --enable-metrics tell more than the whole.

    A time that is no number in [0, MOST_SECONDS], such as NaN, is left out: no sample depends on it.

    Args:
        body: of an answer that `parse_generate` has read.
    """
    meta = answers.json_object(cut_routes(body)[0], "", GENERATE)["meta_info"]
    names = {"queue_s": "queue_time", "first_token_s": "first_token_latency", "total_s": "e2e_latency"}
    told = {ours: meta.get(theirs) for ours, theirs in names.items()}
    return {
        name: float(value)
        for name, value in told.items()
        if type(value) in (int, float) and 0 <= value <= MOST_SECONDS
    }

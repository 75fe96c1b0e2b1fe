"""Parses what an SGLang server answers: bytes in, `Trajectory` or dict out, or a `RolloutProtocolError`.

P prompt tokens, R response tokens, K_t ids that token t was drawn from.
"""

import itertools
import json
from array import array
from typing import Any

import numpy as np
import orjson
import torch

from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError, body_start
from megatron_rl_corr.engines.routes import ExpertShape, no_routes
from megatron_rl_corr.engines.sglang.logprob_rows import read_flat
from megatron_rl_corr.engines.sglang.routed_experts import decode
from megatron_rl_corr.engines.trajectory import Support, Trajectory, VersionSpan

GENERATE = "/generate"
MASK, MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
NO_ROWS = "output_token_logprobs is not a list of (log-prob, id, text)"


def parse_generate(
    body: bytes,
    *,
    prompt_ids: torch.Tensor,
    prompt_index: int,
    sample_index: int,
    server: str,
    vocab_size: int | None = None,
    truncated: bool = False,
    experts: ExpertShape | None = None,
    known_routes: torch.Tensor | None = None,
) -> Trajectory:
    """The trajectory in the answer to one `generate_request`.

    Log-probs that are null, NaN or infinite become NaN. An abort for a pause or by request gives the tokens so far.

    Args:
        body: of the answer.
        prompt_ids: [P] int64, what was sent.
        prompt_index, sample_index, server: go into the trajectory.
        vocab_size: every id must be below it.
        truncated: the request had top_p, top_k or min_p, so the trajectory has a support, and its log-probs are
            renormalised on it.
        experts: the request asked for routed experts, and the model routes so.
        known_routes: [routes_from, M, k], of the first tokens, which the request did not ask for.

    Raises:
        RolloutServerError: the request failed: its abort carries a status code or an error type.
        RolloutProtocolError: the answer is not what was asked for: ids that differ from those the log-probs are of,
            lengths that disagree, unknown ids, a support that is missing or lacks the token drawn from it, routes that
            break a rule of `decode`.
    """
    answer, values = read_flat(body) or (_json_object(body, server, GENERATE), None)
    meta = answer.get("meta_info")
    if not isinstance(meta, dict) or "output_ids" not in answer:
        raise RolloutProtocolError(server, GENERATE, f"no output_ids or meta_info in {body_start(body)}")
    finish_reason = _finish_reason(meta, server)
    output_ids = _token_ids(answer["output_ids"], "output_ids", server)
    _check_count(meta, "prompt_tokens", prompt_ids.numel(), "ids were sent", server)
    _check_count(meta, "completion_tokens", output_ids.size, "output_ids were returned", server)
    _check_vocabulary(output_ids, vocab_size, "token id", server)
    if values is None:
        values = _logprob_values(meta, output_ids, server)
    logprobs, support = _float32(values, NO_ROWS, server), None
    if truncated:
        logprobs, support = _truncated(meta, output_ids, vocab_size, server)
    return Trajectory(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_ids=prompt_ids,
        output_ids=torch.from_numpy(output_ids),
        rollout_logprobs=torch.from_numpy(logprobs),
        finish_reason=finish_reason,
        weight_versions=_weight_versions(meta, output_ids.size, server),
        cached_tokens=meta.get("cached_tokens", 0),  # absent when a request was aborted before it started
        server=server,
        support=support,
        routed_experts=_routes(meta, prompt_ids.numel() + output_ids.size, experts, known_routes, server),
    )


def parse_control(body: bytes, *, server: str, endpoint: str, status: int) -> dict[str, Any]:
    """The JSON object of a control endpoint's answer; {"message": text} for the ones that answer with text.

    Raises RolloutServerError for {"success": false}, whatever the status.
    """
    try:
        answer = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:  # /flush_cache answers with a sentence
        answer = {"message": body.decode("utf-8", "replace").strip()}
    if not isinstance(answer, dict):
        raise RolloutProtocolError(server, endpoint, f"expected a JSON object, got {body_start(body)}")
    if answer.get("success") is False:
        raise RolloutServerError(server, endpoint, status, body_start(body))
    return answer


def _json_object(body: bytes, server: str, endpoint: str) -> dict[str, Any]:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            answer = json.loads(body)  # the standard library reads the NaN and Infinity that orjson refuses
        except ValueError as error:
            raise RolloutProtocolError(server, endpoint, f"not JSON ({error}): {body_start(body)}") from None
    if not isinstance(answer, dict):
        raise RolloutProtocolError(server, endpoint, f"expected a JSON object, got {body_start(body)}")
    return answer


def _token_ids(values, name: str, server: str) -> np.ndarray:
    try:
        return np.asarray(array("q", values or ()))
    except (TypeError, OverflowError):
        detail = f"{name} is not a list of integers: {str(values)[:200]}"
        raise RolloutProtocolError(server, GENERATE, detail) from None


def _logprob_values(meta: dict, output_ids: np.ndarray, server: str) -> list:
    """[R] log-probs or null, from rows of (log-prob or null, id, text or null); the ids must be the output_ids."""
    rows = meta.get("output_token_logprobs") or []
    if not isinstance(rows, list) or len(rows) != output_ids.size:
        entries = f"{len(rows)} entries" if isinstance(rows, list) else "no list"
        detail = f"{output_ids.size} output_ids have {entries} in output_token_logprobs"
        raise RolloutProtocolError(server, GENERATE, detail)
    try:
        values = [row[0] for row in rows]
        ids = _token_ids([row[1] for row in rows], "output_token_logprobs", server)
    except (TypeError, IndexError, KeyError) as error:
        raise RolloutProtocolError(server, GENERATE, f"{NO_ROWS}: {error}") from None
    differs = np.flatnonzero(ids != output_ids)
    if differs.size:
        first = differs[0]
        detail = (
            f"output_ids and the ids of output_token_logprobs differ at {differs.size} of {ids.size} "
            f"positions, first at {first}: {output_ids[first]} and {ids[first]}"
        )
        raise RolloutProtocolError(server, GENERATE, detail)
    return values


def _float32(values: list | np.ndarray, what: str, server: str) -> np.ndarray:
    """[R] float32; NaN for null and for what is not finite in float32."""
    try:
        with np.errstate(over="ignore"):  # to infinity, and below to NaN
            logprobs = np.array(values, dtype=np.float32)  # None becomes NaN
    except (TypeError, ValueError):
        logprobs = np.empty((0, 0))
    if logprobs.ndim != 1:
        raise RolloutProtocolError(server, GENERATE, f"{what}: {str(values)[:200]}")
    logprobs[~np.isfinite(logprobs)] = np.nan
    return logprobs


def _truncated(
    meta: dict, output_ids: np.ndarray, vocab_size: int | None, server: str
) -> tuple[np.ndarray, Support]:
    """[R] float32 log-probs renormalised on the ids that each token was drawn from, and those ids."""
    if not output_ids.size:  # an abort before the first token has neither field
        meta = {MASK: [], MASK_LOGPROBS: []} | meta
    for name in (MASK, MASK_LOGPROBS):
        values = meta.get(name)
        if values is None:
            detail = (
                f"it sent no {name} though return_sampling_mask asked for it, so what `top_p`, "
                "`top_k` and `min_p` kept is unknown: use SGLang 0.5.16 or newer, or leave them out"
            )
            raise RolloutProtocolError(server, GENERATE, detail)
        if not isinstance(values, list) or len(values) != output_ids.size:
            entries = f"{len(values)} entries" if isinstance(values, list) else "no list"
            raise RolloutProtocolError(server, GENERATE, f"{output_ids.size} output_ids have {entries} in {name}")
    logprobs = _float32(meta[MASK_LOGPROBS], f"{MASK_LOGPROBS} is not a list of log-probs", server)
    return logprobs, _support(meta[MASK], output_ids, vocab_size, server)


def _support(sets: list, output_ids: np.ndarray, vocab_size: int | None, server: str) -> Support:
    """The sets, each not empty, of distinct ids in the vocabulary, and with the token drawn from it."""
    if not all(isinstance(ids, list) for ids in sets):
        raise RolloutProtocolError(server, GENERATE, f"{MASK} is not a list of lists: {str(sets)[:200]}")
    ids = _token_ids(list(itertools.chain.from_iterable(sets)), MASK, server)
    _check_vocabulary(ids, vocab_size, f"{MASK} with id", server)
    lengths = np.array([len(ids) for ids in sets], dtype=np.int32)
    if not lengths.all():
        detail = f"{MASK} is empty at position {lengths.argmin()}, where a token was drawn from it"
        raise RolloutProtocolError(server, GENERATE, detail)
    rows = np.repeat(np.arange(lengths.size), lengths)
    found = np.bincount(rows[ids == output_ids[rows]], minlength=lengths.size)
    if not found.all():
        first = int(np.argmin(found))
        detail = f"{MASK} at position {first} has not the token {output_ids[first]} that was drawn from it"
        raise RolloutProtocolError(server, GENERATE, detail)
    stride = ids.max(initial=0) + 1
    pairs = np.sort(rows * stride + ids)
    repeated = pairs[1:][np.diff(pairs) == 0]
    if repeated.size:
        row, token = divmod(int(repeated[0]), int(stride))
        raise RolloutProtocolError(server, GENERATE, f"{MASK} at position {row} has id {token} twice")
    return Support(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(lengths))


def _routes(
    meta: dict, tokens: int, experts: ExpertShape | None, known: torch.Tensor | None, server: str
) -> torch.Tensor | None:
    """[T - 1, M, k]: the known rows, and those of the answer behind them."""
    if experts is None:
        return None
    if known is None:
        known = no_routes(experts, 0)
    encoded = meta.get("routed_experts")
    # Aborted while it waited, for the first time or to be computed anew: the server has no routes to give.
    if encoded is None and meta["finish_reason"]["type"] == "abort":
        return torch.cat([known, no_routes(experts, tokens - 1 - len(known))])
    if encoded is None:
        detail = (
            "rule presence: it sent no routed_experts though they were asked for, which `router_replay` R3 needs: "
            "start the server with --enable-return-routed-experts"
        )
        raise RolloutProtocolError(server, GENERATE, detail)
    try:
        return torch.cat([known, decode(encoded, tokens=tokens, shape=experts, first=len(known))])
    except ValueError as error:
        raise RolloutProtocolError(server, GENERATE, f"{error}; is it serving another model?") from None


def _finish_reason(meta: dict, server: str) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind not in ("stop", "length", "abort"):
        detail = f"finish_reason must be stop, length or abort, got {reason!r}"
        raise RolloutProtocolError(server, GENERATE, detail)
    failed = kind == "abort" and (reason.get("status_code") is not None or reason.get("err_type") is not None)
    if failed:
        detail = f"request {meta.get('id')} was aborted ({reason.get('err_type')}): {reason.get('message')}"
        status = reason.get("status_code")
        raise RolloutServerError(server, GENERATE, status if type(status) is int else 200, detail)
    return kind


def _weight_versions(meta: dict, response_length: int, server: str) -> tuple[VersionSpan, ...]:
    """Spans that partition [0, R). SGLang before 0.5.19 reports no spans, only the version at the end."""
    spans = meta.get("weight_versions")
    if spans is None:
        version = meta.get("weight_version")
        if not isinstance(version, str):
            raise RolloutProtocolError(server, GENERATE, f"weight_version must be a string, got {version!r}")
        return (VersionSpan(version, 0, response_length),)
    try:
        parsed = tuple(VersionSpan(span["version"], span["start"], span["end"]) for span in spans)
    except (TypeError, KeyError):
        parsed = ()
    bounds = [0, *(span.end for span in parsed)]
    adjoin = bounds[-1] == response_length and bounds[:-1] == [span.start for span in parsed]
    if not parsed or not adjoin or not all(isinstance(span.version, str) for span in parsed):
        detail = f"weight_versions {spans} do not partition the {response_length} output_ids"
        raise RolloutProtocolError(server, GENERATE, detail)
    return parsed


def _check_vocabulary(ids: np.ndarray, vocab_size: int | None, what: str, server: str) -> None:
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        detail = f"it returned {what} {outside[0]}, outside [0, {limit}): is it serving another model?"
        raise RolloutProtocolError(server, GENERATE, detail)


def _check_count(meta: dict, name: str, count: int, what: str, server: str) -> None:
    if name in meta and meta[name] != count:
        raise RolloutProtocolError(server, GENERATE, f"{name} is {meta[name]} where {count} {what}")


def server_times(body: bytes) -> dict[str, float]:
    """Seconds of a response; only servers with --enable-metrics tell more than the whole."""
    meta = orjson.loads(body)["meta_info"]
    names = {"queue_s": "queue_time", "first_token_s": "first_token_latency", "total_s": "e2e_latency"}
    return {ours: float(meta[theirs]) for ours, theirs in names.items() if meta.get(theirs) is not None}

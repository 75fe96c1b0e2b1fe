"""What a /generate answer says, read slowly and by the letter: nothing is shared with the
parsers that it judges.
"""

import base64
import json
import math
import struct
from dataclasses import dataclass
from unicodedata import category


class Refused(Exception):
    """The answer is not within what was asked, or no JSON."""


class Failed(Exception):
    """The answer says that the request failed."""


@dataclass(frozen=True)
class Asked:
    """What the request was."""

    prompt_tokens: int
    max_new_tokens: int
    vocab_size: int
    truncated: bool = False
    routes: tuple[int, int, int] | None = None
    """(layers, experts a token, experts) where routes were asked for."""


@dataclass(frozen=True)
class Reading:
    """What an answer says that may be used; log-probs that are none are None."""

    ids: list
    logprobs: list
    reason: str
    spans: list
    cached: int
    kept: list | None


def loaded(body):
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("JSON") from error
    return _is(answer, dict)


def sglang(body, asked: Asked) -> Reading:
    """The answer of an SGLang server."""
    answer = loaded(body)
    meta = _is(answer.get("meta_info"), dict)
    reason = _is(meta.get("finish_reason"), dict)
    kind = _reason(reason.get("type"))
    if kind == "abort" and (reason.get("status_code") is not None or reason.get("err_type") is not None):
        raise Failed
    ids = _ids(answer.get("output_ids"), asked)
    rows = meta.get("output_token_logprobs")
    rows = _is([] if rows is None else rows, list)
    _need(len(rows) == len(ids) and all(type(row) is list and len(row) >= 2 for row in rows))
    _need(all(type(row[1]) is int for row in rows) and [row[1] for row in rows] == ids)
    logprobs = [_logprob(row[0]) for row in rows]
    kept = None
    if asked.truncated:
        sets, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
        if not ids:
            sets, values = (
                meta.get("output_token_sampling_mask", []),
                meta.get("output_token_sampling_logprobs", []),
            )
        kept = _kept(sets, ids, asked)
        _need(type(values) is list and len(values) == len(ids))
        logprobs = [_logprob(value) for value in values]
    if "weight_versions" in meta and meta["weight_versions"] is not None:
        spans = _spans(meta["weight_versions"], len(ids))
    else:
        spans = [(_version(meta.get("weight_version")), 0, len(ids))]
    _counts(meta, ids, asked)
    if asked.routes and not (kind == "abort" and meta.get("routed_experts") is None):
        raw = _base64(meta.get("routed_experts"))
        _need(len(raw) % 4 == 0)
        _routes(struct.unpack(f"<{len(raw) // 4}i", raw), ids, asked, zeros=True)
        times = meta.get("num_retractions")
        _need(type(times) is int and 0 <= times <= 1 << 20)
    return _whole(ids, logprobs, kind, spans, _cached(meta, asked), kept, asked)


def vllm(body, asked: Asked) -> Reading:
    """The answer of a vLLM server."""
    answer = loaded(body)
    if answer.get("error") is not None:
        raise Failed
    choices = _is(answer.get("choices"), list)
    _need(len(choices) == 1)
    choice = _is(choices[0], dict)
    kind = _reason(choice.get("finish_reason"))
    ids = _ids([] if choice.get("token_ids") is None else choice["token_ids"], asked)
    usage = _is({} if answer.get("usage") is None else answer["usage"], dict)
    logprobs = _is({} if choice.get("logprobs") is None else choice["logprobs"], dict)
    rows = logprobs.get("content")
    if rows is None and not ids:
        rows = []
    _need(type(rows) is list and len(rows) == len(ids) and all(type(row) is dict for row in rows))
    _need(all({"token_id", "logprob"} <= row.keys() and type(row["token_id"]) is int for row in rows))
    _need([row["token_id"] for row in rows] == ids)
    values = [_logprob(row["logprob"]) for row in rows]
    values = [None if value is not None and value <= -9999.0 else value for value in values]
    spans = choice.get("weight_versions")
    spans = [("unknown", 0, 0)] if spans in (None, []) and not ids else _spans(spans, len(ids))
    kept = None
    if asked.truncated:
        sets = choice.get("sampling_mask")
        kept = _kept([] if sets is None and not ids else sets, ids, asked)
    _counts(usage, ids, asked)
    if asked.routes and not (kind == "abort" and choice.get("routed_experts") is None):
        _routes(_npy(_base64(choice.get("routed_experts")), ids, asked), ids, asked, zeros=False)
    details = usage.get("prompt_tokens_details")
    cached = _cached(_is({} if details is None else details, dict), asked)
    return _whole(ids, values, kind, spans, cached, kept, asked)


def _need(holds):
    if not holds:
        raise Refused


def _is(value, kind):
    _need(type(value) is kind)
    return value


def _reason(kind):
    _need(type(kind) is str and kind in ("stop", "length", "abort"))
    return kind


def _ids(ids, asked):
    _need(type(ids) is list and all(type(one) is int and 0 <= one < asked.vocab_size for one in ids))
    return ids


def _logprob(value):
    _need(value is None or type(value) in (int, float))
    try:
        value = None if value is None else float(value)
    except OverflowError:
        raise Refused from None
    if value is None or not math.isfinite(value):
        return None
    _need(value <= 1e-3)
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:  # not finite in float32
        return None


def _kept(sets, ids, asked):
    _need(type(sets) is list and len(sets) == len(ids))
    for own, token in zip(sets, ids, strict=True):
        _ids(own, asked)
        _need(token in own and len(set(own)) == len(own))
    return sets


def _version(value):
    """A name of weights, which messages and files can have: half a surrogate pair, or a
    control, becomes ?.
    """
    bad = ("Cs", "Cc")
    return "".join("?" if category(one) in bad and one not in "\t\n" else one for one in _is(value, str))


def _spans(spans, length):
    _need(type(spans) is list and spans)
    found, end = [], 0
    for span in spans:
        _need(type(span) is dict and {"version", "start", "end"} <= span.keys())
        version = _version(span["version"])
        _need(type(span["start"]) is int and type(span["end"]) is int)
        _need(end == span["start"] <= span["end"])
        end = span["end"]
        found.append((version, span["start"], end))
    _need(end == length)
    return found


def _counts(counts, ids, asked):
    for name, right in (("prompt_tokens", asked.prompt_tokens), ("completion_tokens", len(ids))):
        _need(name not in counts or (type(counts[name]) is int and counts[name] == right))


def _cached(counts, asked):
    cached = counts.get("cached_tokens")
    _need(cached is None or (type(cached) is int and 0 <= cached <= asked.prompt_tokens))
    return cached or 0


def _base64(text):
    _need(type(text) is str)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Refused from None


def _npy(raw, ids, asked):
    """The numbers of a .npy file of the right shape, of one byte each, as the recorded ones are."""
    layers, top_k, _ = asked.routes
    tokens = asked.prompt_tokens + len(ids) - 1
    (length,) = struct.unpack("<H", raw[8:10]) if len(raw) > 10 else (0,)
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({tokens}, {layers}, {top_k}), }}"
    _need(raw.startswith(b"\x93NUMPY\x01\x00"))
    _need(raw[10 : 10 + length].decode("latin1") == head.ljust(length - 1) + "\n")
    return list(raw[10 + length :])


def _routes(numbers, ids, asked, *, zeros):
    layers, top_k, experts = asked.routes
    tokens = asked.prompt_tokens + len(ids) - 1
    _need(len(numbers) == tokens * layers * top_k)
    for token in range(tokens):
        own = numbers[token * layers * top_k : (token + 1) * layers * top_k]
        _need(all(0 <= expert < experts for expert in own))
        for layer in range(layers):
            chosen = own[layer * top_k : (layer + 1) * top_k]
            _need(len(set(chosen)) == top_k or (zeros and not any(own)))


def _whole(ids, logprobs, kind, spans, cached, kept, asked):
    _need(len(ids) <= asked.max_new_tokens and (ids or kind == "abort"))
    return Reading(ids, logprobs, kind, spans, cached, kept)

"""Checks of what servers answer that every engine needs: each raises ValueError, which says what
contradicts what.

R response tokens, K_t ids that token t was drawn from.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import torch

from megatron_rl_corr.engines.errors import RolloutError, UnreadableAnswer, body_start, shown
from megatron_rl_corr.engines.secrets import redacted, without_keys
from megatron_rl_corr.engines.trajectory import Support, TopLogprobs, VersionSpan
from megatron_rl_corr.engines.types import UnsupportedByEngine

MOST_LOGPROB = 1e-3
"""A log-prob may be so far above 0 by rounding; beyond it is none."""
NUMBER = {int, float, type(None)}
"""The types of a log-prob as JSON has it. A bool is an int for Python, and no number for JSON."""


@contextmanager
def reading(server: str, endpoint: str) -> Iterator[None]:
    """While it is open an answer is read: whatever fails then says whose answer it was.

    The readers raise ValueError for what they check. An answer that makes one of them fail in another way is
    as useless, and must not end a run with an error that names no server.

    Raises:
        UnreadableAnswer: in the place of any error that is not a RolloutError.
    """
    try:
        yield
    except (RolloutError, UnsupportedByEngine):
        raise
    except ValueError as error:
        raise UnreadableAnswer(server, endpoint, str(error)) from None
    except Exception as error:  # noqa: BLE001  raised again, with the server's name
        raise UnreadableAnswer(
            server, endpoint, f"it can't be read ({type(error).__name__}: {error})"
        ) from None


def json_object(body: bytes, server: str, endpoint: str) -> dict[str, Any]:
    """The JSON object that a body is. Raises UnreadableAnswer, naming server and endpoint,
    for anything else.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            answer = json.loads(body)  # the standard library reads the NaN and Infinity that orjson refuses
        except (ValueError, RecursionError) as error:  # the latter for lists in lists in lists
            raise UnreadableAnswer(server, endpoint, f"not JSON ({error}): {body_start(body)}") from None
    if not isinstance(answer, dict):
        raise UnreadableAnswer(server, endpoint, f"expected a JSON object, got {body_start(body)}")
    return answer


def without_secrets(body: bytes) -> bytes:
    """A control answer with *** in the place of each key that this process sends: its texts go into
    messages and files.

    Args:
        body: in UTF-8.
    """
    text = body.decode("utf-8", "surrogateescape")
    return without_keys(text).encode("utf-8", "surrogateescape")


def mapping_of(value: object, name: str) -> Mapping[str, Any]:
    """The object of a field; {} for null. name: of the field."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {shown(value)}")
    return value


def count_of(counts: Mapping[str, Any], name: str, most: int) -> int:
    """A number that the server counted, in [0, most]; 0 where it does not tell.

    Args:
        counts: where it is.
        name: of the field.
        most: what was sent can't give more.
    """
    value = counts.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} must be an integer in [0, {most}], got {shown(value)}")
    return value


def token_ids(values: object, name: str) -> np.ndarray:
    """[N] int64 from a list of integers, or None for none. name: of the field."""
    try:
        if values is not None and (type(values) is not list or not set(map(type, values)) <= {int}):
            raise TypeError
        return np.asarray(array("q", values or ()))
    except (TypeError, OverflowError):
        raise ValueError(f"{name} is not a list of integers: {shown(values)}") from None


def check_length(output_ids: np.ndarray, finish_reason: str, max_new_tokens: int) -> None:
    """A response has at most the tokens that were asked for, and one at least unless it was cut short."""
    if output_ids.size > max_new_tokens:
        raise ValueError(f"{output_ids.size} output_ids were returned where {max_new_tokens} were asked for")
    if not output_ids.size and finish_reason != "abort":
        raise ValueError(
            f"finish_reason {finish_reason} has no output_ids, and only an abort may end a response before "
            "its first token"
            + "; is there room for one behind the prompt in its context length?"
            * (finish_reason == "length")
        )


def check_vocabulary(ids: np.ndarray, vocab_size: int | None, what: str) -> None:
    """Every id is in the vocabulary. what: names the field, for instance "token id"."""
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        raise ValueError(
            f"it returned {what} {outside[0]}, outside [0, {limit}): is it serving another model?"
        )


def check_same_ids(output_ids: np.ndarray, of_logprobs: np.ndarray, name: str, other: str) -> None:
    """The log-probs are those of the response's tokens. name, other: the fields that output_ids
    and these are from.
    """
    differs = np.flatnonzero(of_logprobs != output_ids)
    if differs.size:
        first = differs[0]
        raise ValueError(
            f"{name} and the ids of {other} differ at {differs.size} of {output_ids.size} "
            f"positions, first at {first}: {output_ids[first]} and {of_logprobs[first]}"
        )


def float32(values: Sequence | np.ndarray, what: str) -> np.ndarray:
    """[N] float32 log-probs; NaN for null and for what is not finite in float32.

    Args:
        values: N numbers or null.
        what: is said of anything else.

    Raises:
        ValueError: one is no number, or above 0 by more than rounding.
    """
    if not isinstance(values, np.ndarray):
        values = float64(values, what)
    if np.fmax.reduce(values, initial=-np.inf) > MOST_LOGPROB:  # fmax passes NaN over
        above = np.flatnonzero((values > MOST_LOGPROB) & (values < np.inf))
        if above.size:
            raise ValueError(f"{what}: {values[above[0]]:g} at position {above[0]} is above 0")
    with np.errstate(over="ignore"):  # to infinity, and below to NaN
        numbers = values.astype(np.float32)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def finite_logprobs(values: list, what: str) -> np.ndarray:
    """[N] float64. Raises ValueError for a log-prob that is no number, null, not finite, or above 0."""
    logprobs = float64(values, what)
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{int((~np.isfinite(logprobs)).sum())} of {logprobs.size} log-probs are not finite")
    if (logprobs > MOST_LOGPROB).any():
        raise ValueError(f"{what}: {logprobs.max():g} is above 0")
    return logprobs


def logprobs_of_ids(values: list, what: str) -> np.ndarray:
    """[N] float64, -inf for null, as JSON writes it. Raises ValueError for what is no number, or above 0."""
    logprobs = float64(values, what)
    if (logprobs > MOST_LOGPROB).any():
        raise ValueError(f"{what}: {np.nanmax(logprobs):g} is above 0")
    return np.where(np.isnan(logprobs), -np.inf, logprobs)


def float64(values: object, what: str) -> np.ndarray:
    """[N] float64 from a list of numbers or null, which is NaN. what: is said of anything else."""
    try:
        if not isinstance(values, list) or not set(map(type, values)) <= NUMBER:
            raise TypeError
        return np.array(values, dtype=np.float64)  # None becomes NaN
    except (TypeError, OverflowError):  # the latter for an integer of hundreds of digits
        raise ValueError(f"{what}: {shown(values)}") from None


def support(sets: list, output_ids: np.ndarray, vocab_size: int | None, name: str) -> Support:
    """The ids that each token was drawn from: distinct, in the vocabulary, and the token among them.

    Args:
        sets: R lists of K_t ids.
        output_ids: [R] int64.
        vocab_size: every id must be below it.
        name: of the field.
    """
    if not all(isinstance(ids, list) for ids in sets):
        raise ValueError(f"{name} is not a list of lists: {shown(sets)}")
    ids = token_ids(list(itertools.chain.from_iterable(sets)), name)
    check_vocabulary(ids, vocab_size, f"{name} with id")
    lengths = np.array([len(ids) for ids in sets], dtype=np.int32)
    if not lengths.all():
        raise ValueError(f"{name} is empty at position {lengths.argmin()}, where a token was drawn from it")
    rows = np.repeat(np.arange(lengths.size), lengths)
    found = np.bincount(rows[ids == output_ids[rows]], minlength=lengths.size)
    if not found.all():
        first = int(np.argmin(found))
        raise ValueError(
            f"{name} at position {first} has not the token {output_ids[first]} that was drawn from it"
        )
    stride = ids.max(initial=0) + 1
    pairs = np.sort(rows * stride + ids)
    repeated = pairs[1:][np.diff(pairs) == 0]
    if repeated.size:
        row, token = divmod(int(repeated[0]), int(stride))
        raise ValueError(f"{name} at position {row} has id {token} twice")
    return Support(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(lengths))


def top_logprobs(
    logprobs: list[list], ids: list[list], *, count: int, vocab_size: int | None, name: str
) -> TopLogprobs:
    """The likeliest ids of each token: distinct, in the vocabulary, so many as were asked for.

    Args:
        logprobs, ids: R lists.
        count: K.
        vocab_size: every id must be below it.
        name: of the field.
    """
    short = next((row for row, own in enumerate(ids) if len(own) != count), None)
    if short is not None:
        raise ValueError(f"{name} at position {short} has {len(ids[short])} ids, and {count} were asked for")
    flat = token_ids(list(itertools.chain.from_iterable(ids)), name)
    check_vocabulary(flat, vocab_size, f"{name} with id")
    values = finite_logprobs(
        list(itertools.chain.from_iterable(logprobs)), f"{name} has a log-prob that is none"
    )
    rows = flat.reshape(len(ids), count).astype(np.int32)
    if count > 1 and (np.diff(np.sort(rows, axis=1), axis=1) == 0).any():
        raise ValueError(f"{name} has an id twice for one token")
    made = values.reshape(rows.shape).astype(np.float32)
    return TopLogprobs(torch.from_numpy(rows), torch.from_numpy(made))


def version_spans(spans: object, response_length: int) -> tuple[VersionSpan, ...]:
    """Spans that partition [0, R), from a list of {"version", "start", "end"}."""
    try:
        parsed = tuple(VersionSpan(redacted(span["version"]), span["start"], span["end"]) for span in spans)
    # no list of objects, a field that lacks, a version that is no text
    except (TypeError, KeyError, AttributeError):
        parsed = ()
    typed = all(type(span.start) is type(span.end) is int and span.start <= span.end for span in parsed)
    bounds = [0, *(span.end for span in parsed)]
    adjoin = bounds[-1] == response_length and bounds[:-1] == [span.start for span in parsed]
    if not parsed or not typed or not adjoin:
        raise ValueError(f"weight_versions {shown(spans)} do not partition the {response_length} output_ids")
    return parsed


def check_count(counts: Mapping[str, Any], name: str, count: int, what: str) -> None:
    """A number that the server tells, if it does, is what was counted here. what: for instance
    "ids were sent".
    """
    if name in counts and (type(counts[name]) is not int or counts[name] != count):
        raise ValueError(f"{name} is {shown(counts[name])} where {count} {what}")


def status_of(told: object, status: int) -> int:
    """The HTTP status of a failure that a 2xx answer tells.

    Args:
        told: in the answer. One that would mean a wrong key or address can't be, as the request was taken.
        status: of the answer itself, for one that tells none.
    """
    return told if type(told) is int and (told == 400 or 406 <= told < 600) else status


def check_lengths(values: object, count: int, name: str) -> Sequence:
    """The list, of as many entries as there are tokens."""
    if not isinstance(values, list) or len(values) != count:
        entries = f"{len(values)} entries" if isinstance(values, list) else "no list"
        raise ValueError(f"{count} output_ids have {entries} in {name}")
    return values

"""Checks of what servers answer that every engine needs: each raises ValueError, which says what contradicts what.

R response tokens, K_t ids that token t was drawn from.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import torch

from megatron_rl_corr.engines.errors import RolloutProtocolError, body_start
from megatron_rl_corr.engines.trajectory import Support, VersionSpan


def json_object(body: bytes, server: str, endpoint: str) -> dict[str, Any]:
    """The JSON object that a body is. Raises RolloutProtocolError, naming server and endpoint, for anything else."""
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


def token_ids(values: object, name: str) -> np.ndarray:
    """[N] int64 from a list of integers, or None for none. name: of the field."""
    try:
        return np.asarray(array("q", values or ()))
    except (TypeError, OverflowError):
        raise ValueError(f"{name} is not a list of integers: {str(values)[:200]}") from None


def check_vocabulary(ids: np.ndarray, vocab_size: int | None, what: str) -> None:
    """Every id is in the vocabulary. what: names the field, for instance "token id"."""
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= limit)]
    if outside.size:
        raise ValueError(f"it returned {what} {outside[0]}, outside [0, {limit}): is it serving another model?")


def check_same_ids(output_ids: np.ndarray, of_logprobs: np.ndarray, name: str, other: str) -> None:
    """The log-probs are those of the response's tokens. name, other: the fields that output_ids and these are from."""
    differs = np.flatnonzero(of_logprobs != output_ids)
    if differs.size:
        first = differs[0]
        raise ValueError(
            f"{name} and the ids of {other} differ at {differs.size} of {output_ids.size} "
            f"positions, first at {first}: {output_ids[first]} and {of_logprobs[first]}"
        )


def float32(values: object, what: str) -> np.ndarray:
    """[N] float32; NaN for null and for what is not finite in float32. what: is said of anything else."""
    try:
        with np.errstate(over="ignore"):  # to infinity, and below to NaN
            numbers = np.array(values, dtype=np.float32)  # None becomes NaN
    except (TypeError, ValueError):
        numbers = np.empty((0, 0))
    if numbers.ndim != 1:
        raise ValueError(f"{what}: {str(values)[:200]}")
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def finite_logprobs(values: list) -> np.ndarray:
    """[N] float64. Raises ValueError for a log-prob that is null or not finite."""
    logprobs = np.array(values, dtype=np.float64)  # None becomes NaN
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{int((~np.isfinite(logprobs)).sum())} of {logprobs.size} log-probs are not finite")
    return logprobs


def support(sets: list, output_ids: np.ndarray, vocab_size: int | None, name: str) -> Support:
    """The ids that each token was drawn from: distinct, in the vocabulary, and the token among them.

    Args:
        sets: R lists of K_t ids.
        output_ids: [R] int64.
        vocab_size: every id must be below it.
        name: of the field.
    """
    if not all(isinstance(ids, list) for ids in sets):
        raise ValueError(f"{name} is not a list of lists: {str(sets)[:200]}")
    ids = token_ids(list(itertools.chain.from_iterable(sets)), name)
    check_vocabulary(ids, vocab_size, f"{name} with id")
    lengths = np.array([len(ids) for ids in sets], dtype=np.int32)
    if not lengths.all():
        raise ValueError(f"{name} is empty at position {lengths.argmin()}, where a token was drawn from it")
    rows = np.repeat(np.arange(lengths.size), lengths)
    found = np.bincount(rows[ids == output_ids[rows]], minlength=lengths.size)
    if not found.all():
        first = int(np.argmin(found))
        raise ValueError(f"{name} at position {first} has not the token {output_ids[first]} that was drawn from it")
    stride = ids.max(initial=0) + 1
    pairs = np.sort(rows * stride + ids)
    repeated = pairs[1:][np.diff(pairs) == 0]
    if repeated.size:
        row, token = divmod(int(repeated[0]), int(stride))
        raise ValueError(f"{name} at position {row} has id {token} twice")
    return Support(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(lengths))


def version_spans(spans: object, response_length: int) -> tuple[VersionSpan, ...]:
    """Spans that partition [0, R), from a list of {"version", "start", "end"}."""
    try:
        parsed = tuple(VersionSpan(span["version"], span["start"], span["end"]) for span in spans)
    except (TypeError, KeyError):
        parsed = ()
    bounds = [0, *(span.end for span in parsed)]
    adjoin = bounds[-1] == response_length and bounds[:-1] == [span.start for span in parsed]
    if not parsed or not adjoin or not all(isinstance(span.version, str) for span in parsed):
        raise ValueError(f"weight_versions {spans} do not partition the {response_length} output_ids")
    return parsed


def check_count(counts: Mapping[str, Any], name: str, count: int, what: str) -> None:
    """A number that the server tells, if it does, is what was counted here. what: for instance "ids were sent"."""
    if name in counts and counts[name] != count:
        raise ValueError(f"{name} is {counts[name]} where {count} {what}")


def check_lengths(values: object, count: int, name: str) -> Sequence:
    """The list, of as many entries as there are tokens."""
    if not isinstance(values, list) or len(values) != count:
        entries = f"{len(values)} entries" if isinstance(values, list) else "no list"
        raise ValueError(f"{count} output_ids have {entries} in {name}")
    return values

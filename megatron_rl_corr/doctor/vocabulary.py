"""Which ids of the vocabulary a server gives other log-probs than the model does, sampled or not.

C places at which next-token distributions are compared, V ids of the model, K likeliest ids that a server
lists at a place, M log-probs of single ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX
from megatron_rl_corr.doctor.findings import Row, found

CHECK = "whole vocabulary"
FACTOR = 8.0
"""How many times the median difference of the likeliest ids of a place an id may be off. The median of
Gaussian noise is 0.67 of its deviation: of 150 000 ids a healthy server has one so far off in 100 runs, and
that is asked about again.
"""
ANOTHER_MODEL = 4.0
"""Median difference of the likeliest ids, in units of the model's own 16-bit rounding, from which on all ids
are off.
"""
MOST_SUSPECTS = 64
MOST_NAMED = 8
MOST_PLACES = 32
"""Places at which an id is compared with all others."""
LEAST_PLACES = 4
"""Places at which an id must be known for a verdict."""
LEAST_MASS = 1e-5
"""Mass of ids that the model lacks, in the mean."""


@dataclass(frozen=True)
class Model:
    """The model's log-probs at the C places, [C, V] float32."""

    exact: np.ndarray
    """Computed in float32."""
    rounded: np.ndarray
    """Computed in bfloat16."""


@dataclass(frozen=True)
class IdLogprobs:
    """M log-probs that a server gave, of one id at one place each.

    Example: at place 3 id 17 has -9.5: IdLogprobs([3], [17], [-9.5]).
    """

    places: np.ndarray
    """[M] int64 in [0, C)."""
    ids: np.ndarray
    """[M] int64."""
    logprobs: np.ndarray
    """[M] float64, -inf of an id without mass."""

    @staticmethod
    def joined(parts: Sequence["IdLogprobs"]) -> "IdLogprobs":
        """All of them, one behind the other."""
        none = IdLogprobs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        return IdLogprobs(
            *(np.concatenate([vars(one)[name] for one in (none, *parts)]) for name in vars(none))
        )


class Comparison:
    """A server's log-probs against the model's, at each place less what all ids of the place have in common.

    Args:
        model: its log-probs.
        listed: the server's of the likeliest ids of every place.
        half: the server computes in 16 bits, so that the model's own rounding is no difference.
    """

    def __init__(self, model: Model, listed: IdLogprobs, half: bool):
        self.model, self.listed, self._half = model, listed, half
        self.vocab_size = model.exact.shape[1]
        own = self._known(listed)
        of_place, differences = _groups(own.places, len(model.exact)), self._differences(own)
        self._common = np.array([np.median(differences[:, rows], axis=1) for rows in of_place]).T  # [2, C]
        left = np.abs(self._off(own))
        self.scale = np.array([np.median(left[rows]) for rows in of_place])
        noise = model.rounded - model.exact
        noise = np.abs(noise - np.median(noise, axis=1, keepdims=True))
        self.noise = np.median(noise, axis=1)
        of_place = np.maximum(FLOAT32_MAX, FACTOR * np.maximum(self.scale, self.noise if half else 0.0))
        # A large logit, likely or not, is rounded by more.
        of_id = FACTOR * np.median(noise, axis=0) if half else np.zeros(self.vocab_size)
        self._allowed_at, self._allowed_of = of_place, of_id

    @property
    def is_another_model(self) -> bool:
        """True if the likeliest ids differ by more than rounding in the median: all are off."""
        return bool(np.median(self.scale) > max(FLOAT32_MAX, ANOTHER_MODEL * np.median(self.noise)))

    @property
    def lacking(self) -> tuple[np.ndarray, float]:
        """(ids that the model lacks among the likeliest, their mass in the mean over places)."""
        beyond = self.listed.ids >= self.vocab_size
        mass = np.exp(self.listed.logprobs[beyond]).sum() / len(self.model.exact)
        return np.unique(self.listed.ids[beyond]), float(mass)

    @property
    def missing(self) -> float:
        """Mass that the likeliest ids together have less than in the model; 0 where rounding explains it."""
        common = self._common[0]
        middle = float(np.median(common))
        spread = float(np.median(np.abs(common - middle)))
        allowed = max(LEAST_MASS, FLOAT32_MAX * self._half, FACTOR * spread / len(common) ** 0.5)
        return float(-np.expm1(-middle)) if middle > allowed else 0.0

    def times_allowed(self, seen: IdLogprobs) -> tuple[IdLogprobs, np.ndarray]:
        """(those of the model's ids, how many times what rounding allows each is off)."""
        seen = self._known(seen)
        allowed = np.maximum(self._allowed_at[seen.places], self._allowed_of[seen.ids])
        return seen, np.abs(self._off(seen)) / allowed

    def suspects(self, seen: IdLogprobs) -> np.ndarray:
        """Ids that are off at some place, those that are furthest first, at most MOST_SUSPECTS."""
        seen, times = self.times_allowed(seen)
        worst = np.zeros(self.vocab_size)
        np.maximum.at(worst, seen.ids, times)
        order = np.argsort(-worst, kind="stable")[:MOST_SUSPECTS]
        return order[worst[order] > 1]

    def off_ids(self, seen: IdLogprobs) -> dict[int, float]:
        """Id -> the median of model less server in nats, of those that are off at most of their places.

        An id that is known at fewer than LEAST_PLACES is left out. The furthest come first.
        """
        seen, times = self.times_allowed(seen)
        off, of_id, medians = self._off(seen), _groups(seen.ids, self.vocab_size), {}
        for one in np.unique(seen.ids[times > 1]).tolist():
            rows = of_id[one]
            if len(rows) >= LEAST_PLACES and np.median(times[rows]) > 1:
                medians[one] = float(np.median(off[rows]))
        return dict(sorted(medians.items(), key=lambda pair: -abs(pair[1])))

    def looks_like(self, token: int, seen: IdLogprobs) -> int | float | None:
        """What an id's log-probs are: another id's (that id), the model's and a constant (of how many nats
        more in the server), or neither.
        """
        rows = np.flatnonzero(seen.ids == token)[-MOST_PLACES:]
        places, own = seen.places[rows], seen.logprobs[rows]
        allowed = np.maximum(np.median(self._allowed_at[places]), self._allowed_of)
        precisions = (self.model.exact, self.model.rounded)[: 1 + self._half]
        far = [
            np.median(np.abs(one[places] - (own + common[places])[:, None]), axis=0)
            for one, common in zip(precisions, self._common, strict=False)
        ]
        times = np.min(far, axis=0) / allowed
        other = int(times.argmin())
        if other != token and times[other] <= 1:
            return other
        off = self._off(IdLogprobs(places, seen.ids[rows], own))
        if np.abs(off - np.median(off)).max() <= 2 * allowed[token]:
            return float(-np.median(off))
        return None

    def _known(self, seen: IdLogprobs) -> IdLogprobs:
        """Those of ids that the model has."""
        own = seen.ids < self.vocab_size
        return IdLogprobs(seen.places[own], seen.ids[own], seen.logprobs[own])

    def _differences(self, seen: IdLogprobs) -> np.ndarray:
        """[2, M]: the model's in either precision less the server's; large for an id without mass."""
        given = np.maximum(seen.logprobs, -1e4)
        return np.stack(
            [one[seen.places, seen.ids] - given for one in (self.model.exact, self.model.rounded)]
        )

    def _off(self, seen: IdLogprobs) -> np.ndarray:
        """[M] differences less the place's common one; in 16 bits to the nearer precision of the model."""
        exact, rounded = self._differences(seen) - self._common[:, seen.places]
        return np.where(self._half & (np.abs(rounded) < np.abs(exact)), rounded, exact)


def _groups(values: np.ndarray, count: int) -> list[np.ndarray]:
    """For each number in [0, count) the places at which it stands in values [M]."""
    order = np.argsort(values, kind="stable")
    return np.split(order, np.searchsorted(values[order], np.arange(1, count)))


def id_chunks(vocab_size: int, size: int, most: int, seed: int) -> list[list[int]]:
    """At most `most` lists of up to `size` ids: the whole vocabulary if it fits in, else a seeded sample."""
    order = np.random.default_rng(seed).permutation(vocab_size)
    return [order[start : start + size].tolist() for start in range(0, vocab_size, size)][:most]


@dataclass(frozen=True)
class Seen:
    """What a server was asked about single ids."""

    scanned: IdLogprobs
    """Ids over the whole vocabulary, at a place or two each."""
    again: IdLogprobs
    """Those that were off, at more places."""
    uncovered: str = ""
    """Why ids beyond the likeliest were not, or not all, asked for; "" where they were."""


def judge_vocabulary(
    comparison: Comparison, seen: Seen, distances: dict[str, float], text_of: Callable[[int], str]
) -> Row:
    """Do all ids have the log-probs that the model gives them?

    Args:
        comparison: with the model.
        seen: what the server was asked.
        distances: of the listed distributions, in the mean: kl, least_tv, most_tv, mass.
        text_of: an id as a text, with what it stands for where that is known.
    """
    known = np.concatenate([comparison.listed.ids, seen.scanned.ids])
    covered = len(np.unique(known[known < comparison.vocab_size]))
    off = comparison.off_ids(IdLogprobs.joined([comparison.listed, seen.again]))
    lacking, mass = comparison.lacking
    numbers = distances | {
        "ids": covered,
        "vocabulary": comparison.vocab_size,
        "off": {str(one): value for one, value in off.items()},
        "lacking_mass": mass,
        "noise": float(np.median(comparison.noise)),
    }
    bounds = (
        f"TV {distances['least_tv']:.1e} to {distances['most_tv']:.1e}, KL {distances['kl']:.1e} or more, by "
        f"lists of {distances['mass']:.3g} of the mass"
    )
    message = f"{covered} of {comparison.vocab_size} ids; {bounds}"
    if seen.uncovered:
        message += f"; {seen.uncovered}"
    if comparison.is_another_model:
        return Row(CHECK, "note", f"all ids differ, see the model difference; {message}", numbers)
    parts = [_described(comparison, one, seen, off[one], text_of) for one in list(off)[:MOST_NAMED]]
    if len(off) > MOST_NAMED:
        parts.append(f"and {len(off) - MOST_NAMED} more" + " at least" * (len(off) >= MOST_SUSPECTS))
    if mass > LEAST_MASS:
        parts.append(f"ids {lacking[0]} to {lacking[-1]}, which the model lacks, have {mass:.2g} of the mass")
    elif not off and (missing := comparison.missing):
        parts.append(f"ids that the model lacks, or that were not asked for, have {missing:.2g} of the mass")
    if parts:
        return found(CHECK, "ids_differ", f"{'; '.join(parts)}; {message}", **numbers)
    return Row(CHECK, "ok", message, numbers)


def _described(
    comparison: Comparison, token: int, seen: Seen, median: float, text_of: Callable[[int], str]
) -> str:
    like = comparison.looks_like(token, IdLogprobs.joined([comparison.listed, seen.again]))
    if isinstance(like, int):
        return f"id {text_of(token)} has the log-probs of {text_of(like)}"
    if isinstance(like, float):
        return f"id {text_of(token)} has {like:+.2g} nats wherever it stands"
    return f"id {text_of(token)} is off by {-median:+.2g} nats in the median"

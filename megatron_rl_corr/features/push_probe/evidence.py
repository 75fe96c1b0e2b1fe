"""Evidence that a server computes with other weights than the trainer: a sequential test with a
stated error rate.

The unit is a text. A text is *off* if its log-probs are further apart than rounding explains, by a factor of
MARGIN; the trainer simulates that rounding (simulated_rounding.py). A healthy server's text is off with
a probability of at most HEALTHY_OFF, whatever the texts before were. So the likelihood ratio

    2 ** bits = product over texts of  FAULTY_OFF / HEALTHY_OFF              where the text is off
                                       (1 - FAULTY_OFF) / (1 - HEALTHY_OFF)  where it is not

exceeds 2 ** DIFFERS_BITS for a healthy server at most once in 2 ** DIFFERS_BITS verdicts, however many texts
are asked and whenever one stops asking (Ville's inequality).

T tokens of a text that are scored, R simulations; D = log pi_train - log pi_rollout of a token.

Source: Wald, Sequential tests of statistical hypotheses, 1945; Ville, Étude critique de la notion de
collectif, 1939.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

MARGIN = 4.0
"""A text is off beyond so many times the simulated rounding."""
HEALTHY_OFF, FAULTY_OFF = 1 / 64, 1 / 2
"""Share of texts that are off at a healthy server, at most, and at one whose weights are wrong."""
DIFFERS_BITS = 20.0
"""Evidence for `differs`: at most one false verdict in a million."""
NUMERICS_BITS = -3.0
"""Evidence for `numerics`, with which nothing more is asked."""

QUANTILE, SHORT_QUANTILE, SHORT = 0.9, 0.75, 48
"""Beside the median, as a wrong expert moves the tokens that are sent to it alone: of texts with SHORT
tokens and more, and of shorter ones, where two tokens near a tie would decide.
"""
TIE = 16.0
"""A token that the simulated rounding moves more than so many times the text's median stands near a
tie of a router.
"""
LEAST_TIED = 4
"""Such tokens from which on they are judged, too: by their median, against the QUANTILE of
what moves them.
"""
WITHOUT_SIMULATION = 10.0
"""Nats over the relative error, for a model that no simulation reaches."""

Answer = Literal["equal", "numerics", "differs", "unclear"]


@dataclass(frozen=True)
class Rounding:
    """What rounding of a number type does to a log-prob. Example: Rounding(2.5e-3, 2e-4), of bfloat16."""

    relative_error: float
    """Root mean square of the relative error of one operation."""
    least: float
    """Nats below which a difference means nothing, however little the simulation moves."""


ROUNDINGS = {
    "float32": Rounding(2e-7, 3e-6),
    "tf32": Rounding(2e-4, 1e-4),
    "float16": Rounding(3.2e-4, 1e-4),
    "bfloat16": Rounding(2.5e-3, 2e-4),
    "fp8": Rounding(4e-2, 4e-3),
    "int4": Rounding(0.15, 1.5e-2),
}
"""By number type. The last place's own root mean square is 2 ** -(bits + 1) / sqrt(3); these are rounded
up, as an engine rounds more often than the simulation, its weights too.
"""


@dataclass(frozen=True)
class TextRounding:
    """What rounding does to a text's log-probs. Example: TextRounding(median=0.004, upper=0.02,
    tied=array([...])).
    """

    median: float
    """Median of |D|, of the tokens that stand near no tie; at least `Rounding.least`."""
    upper: float
    """Their upper quantile."""
    tied: np.ndarray
    """[T] bool: tokens that a rounding of the trainer's own forward pass moves much farther than the
    others: near a tie, or where the policy is sure of most of the text, simply those of which it is not.
    """
    at_ties: float = math.inf
    """Upper quantile of |D| of these."""

    @classmethod
    def of(cls, simulated: np.ndarray, rounding: Rounding) -> TextRounding:
        """From simulations.

        Tokens near a tie are set apart, unless that leaves less than half of the text: then rounding moves
        all of it, and the quantiles have that in them.

        Args:
            simulated: [R, T] what each simulation moves the trainer's own log-probs by.
            rounding: that was simulated.
        """
        moved = np.abs(simulated)
        if not moved.any():  # the model runs where no simulation reaches it, as in a captured graph
            wide = max(WITHOUT_SIMULATION * rounding.relative_error, rounding.least)
            return cls(wide, wide, np.zeros(moved.shape[1], dtype=bool))
        tied = moved.max(axis=0) > TIE * max(float(np.median(moved)), rounding.least)
        if 2 * tied.sum() > len(tied):
            tied = np.zeros_like(tied)
        median, upper = np.quantile(moved[:, ~tied], (0.5, _upper(moved.shape[1])))
        at_ties = float(np.quantile(moved[:, tied], QUANTILE)) if tied.sum() >= LEAST_TIED else math.inf
        return cls(max(float(median), rounding.least), max(float(upper), rounding.least), tied, at_ties)

    @classmethod
    def bound(cls, largest: float, tokens: int) -> TextRounding:
        """As a user's bound of a token has it: a text is off where its upper quantile exceeds `largest`."""
        return cls(largest / MARGIN, largest / MARGIN, np.zeros(tokens, dtype=bool))


def off_by(difference: np.ndarray, expected: TextRounding) -> float:
    """How far apart the log-probs of a text are, over what rounding does: of median and upper
    quantile the larger one.

    The median of tokens that are set apart counts too, where it is larger still.

    A text is off where it is not at most MARGIN; it is NaN where a log-prob is not finite.

    Args:
        difference: [T] D.
        expected: of that text, or of the same kind of texts, with `tied` of other length; then no
            token is set apart.
    """
    distance = np.abs(difference)
    if not np.isfinite(distance).all():
        return math.nan
    tied = expected.tied if len(expected.tied) == len(distance) else np.zeros(len(distance), dtype=bool)
    median, upper = np.quantile(distance[~tied], (0.5, _upper(len(distance))))
    at_ties = float(np.median(distance[tied])) / expected.at_ties if tied.any() else 0.0
    return max(float(median) / expected.median, float(upper) / expected.upper, at_ties)


def _upper(tokens: int) -> float:
    return QUANTILE if tokens >= SHORT else SHORT_QUANTILE


def is_off(ratio: float) -> bool:
    """True if rounding does not explain such an `off_by`; True for NaN."""
    return not ratio <= MARGIN


def is_new(ids: Sequence[int], earlier: Iterable[Sequence[int]], scored: int) -> bool:
    """True if more than half of a text's last `scored` tokens are none that an earlier one has, too.

    A token's log-prob follows from it and from all ids before it: of two texts that begin alike, it is the
    same token with the same rounding as far as they are alike, and that is evidence once.
    """
    common = max((len(os.path.commonprefix([tuple(ids), tuple(one)])) for one in earlier), default=0)
    return 2 * (len(ids) - common) > scored


def bits_of(ratios: Iterable[float]) -> float:
    """log2 of the likelihood ratio of faulty to healthy, of the `off_by` of texts."""
    off, not_off = math.log2(FAULTY_OFF / HEALTHY_OFF), math.log2((1 - FAULTY_OFF) / (1 - HEALTHY_OFF))
    return sum(off if is_off(ratio) else not_off for ratio in ratios)


def answer_of(ratios: Sequence[float]) -> Answer:
    """What texts say of a server: "unclear" where more must be asked."""
    if not any(map(is_off, ratios)):
        return "equal"
    bits = bits_of(ratios)
    if bits >= DIFFERS_BITS:
        return "differs"
    return "numerics" if bits <= NUMERICS_BITS else "unclear"

"""The mismatch measured per token: which rows the moment table needs, and the metrics made of their sums.

T tokens; D = log pi_train - log pi_rollout (subtracted in float32), rho = e^D, e = rho - 1 with D clamped to +-20.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.histogram import LogRatioHistogram, log_ratio_histogram
from megatron_rl_corr.core.moments import MomentTable, constant
from megatron_rl_corr.core.rejection import as_float32_meets
from megatron_rl_corr.core.tokens import Tokens
from megatron_rl_corr.core.weights import LOG_CLAMP, OUTLIER

# Where k3 = e^D - 1 - D is 10: the clamped metrics let no token weigh more, as verl's KL penalty does.
CLAMPED = (-10.9999833, OUTLIER)

# Lower and upper, of the rows rollout, train, d, d_clamped, abs_capped and abs_clamped.
_CLAMPS = (
    ((-math.inf,), (-math.inf,), (-LOG_CLAMP,), (CLAMPED[0],), (0.0,), (0.0,)),
    ((math.inf,), (math.inf,), (LOG_CLAMP,), (CLAMPED[1],), (OUTLIER,), (LOG_CLAMP,)),
)

BANDS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_1e-2", "1e-2_to_1e-1", "above_1e-1")
_EDGES = tuple(as_float32_meets(math.log(10.0**-power), -1) for power in (4, 3, 2, 1))
_BAND_ROWS = tuple(f"by_prob/{band}" for band in BANDS)
_TURN_ROWS = ("by_turn/first", "by_turn/later")


def base_rows(optional: Collection[str]) -> tuple[str, ...]:
    """Names of the rows that `fill_base_rows` writes, in an order in which one kernel can write several."""
    return (
        "q_rollout", "q_train", "e", "e_clamped", "e_abs_capped", "e_abs",  # expm1 of the rows from rollout on
        "abs_diff", *(name for name in ("square", "k3") if name in optional),
        "abs", *(name for name in ("routing", "advantage", "passed") if name in optional),
        "one", "exact", "rollout", "train", "d", "d_clamped", "abs_capped", "abs_clamped",
        "position", "in_mask", "softplus", "softplus_clamped",
        *_BAND_ROWS, *(_TURN_ROWS if "turns" in optional else ()),
    )  # fmt: skip


def fill_base_rows(table: MomentTable, tokens: Tokens) -> None:
    """Every row that needs only the inputs. `passed` starts as `one`."""
    device, size, difference = tokens.valid.device, tokens.size, tokens.difference
    ones = constant(1.0, torch.float32, device).expand_as(size)
    optional = [values for values in (tokens.routing, tokens.advantages) if values is not None]
    given = [size, *optional, *[ones] * table.has("passed"), ones, difference, tokens.rollout, tokens.train]
    given += [difference, difference, size, size, ones, tokens.in_mask]
    torch.stack(given, out=table.rows("abs", "in_mask"))
    given = table.rows("abs", "abs_clamped")
    # A select, not a product: a NaN outside the mask must leave nothing behind.
    torch.where(tokens.valid, given, constant((0.0,), torch.float64, device), out=given)
    lower, upper = (constant(bounds, torch.float64, device) for bounds in _CLAMPS)
    exponents = table.rows("rollout", "abs_clamped").clamp_(lower, upper)
    # expm1, not exp: it is 0 outside the mask, and D of 1e-7 keeps its digits.
    torch.expm1(exponents, out=table.rows("q_rollout", "e_abs"))
    torch.sub(table.row("q_train"), table.row("q_rollout"), out=table.row("abs_diff")).abs_()
    if table.has("square"):
        torch.square(table.row("exact"), out=table.row("square"))
    if table.has("k3"):
        torch.sub(table.row("e"), table.row("exact"), out=table.row("k3"))
    nothing = constant(0.0, torch.float64, device)
    torch.logaddexp(table.rows("d", "d_clamped"), nothing, out=table.rows("softplus", "softplus_clamped"))
    # One row a part, not nested ones to subtract: an outlier in one must not round away another.
    band = torch.bucketize(table.row("rollout"), constant(_EDGES, torch.float64, device), right=True)
    torch.eq(band, _column(len(BANDS), device), out=table.rows(_BAND_ROWS[0], _BAND_ROWS[-1]))
    if tokens.turn_ids is not None:
        torch.eq(tokens.turn_ids != 0, _column(2, device), out=table.rows(*_TURN_ROWS))


def _column(count: int, device: torch.device) -> Tensor:
    """0, 1, ... as int64 [count, 1]."""
    return constant(tuple((i,) for i in range(count)), torch.int64, device)


Pairs = tuple[tuple[str, str], ...]


def _sums(*names: str) -> Pairs:
    return tuple((name, "one") for name in names)


_TWO_SIDES: Pairs = (
    *_sums("q_train", "q_rollout"), ("q_train", "q_train"), ("q_rollout", "q_rollout"), ("q_train", "q_rollout"),
    *_sums("one"),
)  # fmt: skip

_MISMATCH: dict[str, tuple[type[m.Metric], Pairs]] = {
    "valid_tokens": (m.Sum, _sums("one")),
    "nonfinite_tokens": (m.Difference, (("in_mask", "in_mask"), ("one", "one"))),
    "padded_tokens": (m.Difference, (("position", "position"), ("in_mask", "in_mask"))),
    "kl": (m.NegativeMean, _sums("exact", "one")),
    "kl_clamped": (m.NegativeMean, _sums("d_clamped", "one")),
    "k3_kl": (m.MeanOfDifference, _sums("e", "exact", "one")),
    "k3_kl_clamped": (m.MeanOfDifference, _sums("e_clamped", "d_clamped", "one")),
    "log_ratio_abs_mean": (m.Mean, _sums("abs", "one")),
    "log_ratio_abs_mean_clamped": (m.Mean, _sums("abs_capped", "one")),
    "token_mult_prob_error": (m.MeanPlusOne, _sums("e_abs", "one")),
    "token_mult_prob_error_clamped": (m.MeanPlusOne, _sums("e_abs_capped", "one")),
    "prob_diff_abs_mean": (m.Mean, _sums("abs_diff", "one")),
    "prob_diff_std": (m.StdOfDifference, _TWO_SIDES),
    "chi2_token": (m.Chi2, (("e", "e"), *_sums("e", "one"))),
    "chi2_token_clamped": (m.Chi2, (("e_clamped", "e_clamped"), *_sums("e_clamped", "one"))),
    "jsd": (m.JensenShannon, (("e", "softplus"), ("e", "d"), *_sums("softplus", "e", "d", "one"))),
    "jsd_clamped": (m.JensenShannon, (
        ("e_clamped", "softplus_clamped"), ("e_clamped", "d_clamped"),
        *_sums("softplus_clamped", "e_clamped", "d_clamped", "one"),
    )),
    "pearson": (m.Pearson, _TWO_SIDES),
}
_WEIGHTS: dict[str, tuple[type[m.Metric], Pairs]] = {
    "weight_mean": (m.Mean, _sums("weight", "one")),
    "weight_std": (m.Std, (("weight", "one"), ("weight", "weight"), ("one", "one"))),
    "ess": (m.EffectiveSampleSize, (("weight", "one"), ("weight", "weight"), ("one", "one"))),
    "weight_out_of_bounds": (m.Mean, _sums("out_of_bounds", "one")),
}
_BY_PART: dict[str, tuple[type[m.Metric], tuple[str, ...]]] = {
    "tokens": (m.Sum, ("one",)),
    "kl": (m.NegativeMean, ("exact", "one")),
    "kl_clamped": (m.NegativeMean, ("d_clamped", "one")),
    "k3_kl": (m.MeanOfDifference, ("e", "exact", "one")),
    "k3_kl_clamped": (m.MeanOfDifference, ("e_clamped", "d_clamped", "one")),
    "log_ratio_abs_mean": (m.Mean, ("abs", "one")),
    "log_ratio_abs_mean_clamped": (m.Mean, ("abs_capped", "one")),
}
"""What is told for each probability band and each kind of turn, of the products of its row with these."""

MAXIMA = {"log_ratio_abs_max": "abs", "prob_diff_abs_max": "abs_diff", "weight_max": "weight"}


@lru_cache(maxsize=64)
def metric_pairs(weighted: bool, rules: tuple[str, ...], turns: bool) -> dict[str, tuple[type[m.Metric], Pairs]]:
    """Every token metric of a configuration: its class, and the pairs of rows whose sums it is made of."""
    found = dict(_MISMATCH)
    if weighted:
        found |= _WEIGHTS
    kept = kept_row(rules)
    found["kept_fraction"] = (m.Mean, _sums(kept, "one"))
    for rule in rules:
        found[f"rejected_fraction/{rule}"] = (m.LeftOut, _sums(f"rule/{rule}", "one"))
    for part in _BAND_ROWS + (_TURN_ROWS if turns else ()):
        for name, (kind, rows) in _BY_PART.items():
            found[f"{part}/{name}"] = (kind, tuple((part, row) for row in rows))
    return found


def kept_row(rules: Sequence[str]) -> str:
    """The row that is 1 where all rules keep a valid token."""
    if len(rules) > 1:
        return "kept"
    return f"rule/{rules[0]}" if rules else "one"


class TokenStatistics:
    """What the token metrics are made of, over the chunks added so far: sums of products, extrema, bins of |D|."""

    def __init__(self, row_names: Sequence[str], *, weighted: bool, rules: Sequence[str], turns: bool):
        self._rows, self._weighted = tuple(row_names), weighted
        self._chosen = metric_pairs(weighted, tuple(rules), turns)
        totals = ("one", kept_row(rules), "e", "exact") + (("weight",) if weighted else ())
        self._totals, self._pairs = len(totals), list(_sums(*totals))
        self._starts = {}
        for name, (_, wanted) in self._chosen.items():
            self._starts[name] = len(self._pairs)
            self._pairs += wanted
        self._parts: tuple[Tensor, ...] | None = None

    def add(self, table: MomentTable) -> None:
        """Count the filled table of a chunk of tokens in."""
        bins = log_ratio_histogram(table.row("abs"), table.row("one"))
        parts = (table.sums(tuple(self._pairs)), bins, *table.extrema())
        if self._parts is not None:
            sums, counts, minima, maxima = self._parts
            parts = (
                sums + parts[0], counts + parts[1], torch.minimum(minima, parts[2]), torch.maximum(maxima, parts[3])
            )
        self._parts = parts

    @property
    def totals(self) -> Tensor:
        """[4 or 5]: tokens that are valid, and kept; sums of e and of D; and of the weights, if there are any."""
        return self._parts[0][: self._totals]

    def metrics(self, scale: Tensor | None) -> dict[str, m.Metric]:
        """The token metrics; where `scale`, a scalar, is given, the weights in them are multiplied by it."""
        sums, bins, minima, maxima = self._parts
        if scale is not None:
            powers = tuple(float(pair.count("weight")) for pair in self._pairs)
            sums = sums * scale.pow(constant(powers, torch.float64, sums.device))
            powers = tuple(float(row in ("weight", "weight_or_inf")) for row in self._rows)
            factors = scale.pow(constant(powers, torch.float64, sums.device))
            minima, maxima = minima * factors, maxima * factors
        found: dict[str, m.Metric] = {
            name: kind(sums[self._starts[name] : self._starts[name] + len(wanted)])
            for name, (kind, wanted) in self._chosen.items()
        }
        found["log_ratio"] = LogRatioHistogram(bins)
        for name, row in MAXIMA.items():
            if self._weighted or row != "weight":
                at, present = self._rows.index(row), self._rows.index("one")
                found[name] = m.MaxOfPresent(maxima[at : present + 1 : present - at])
        if self._weighted:
            at = self._rows.index("weight_or_inf")
            found["weight_min"] = m.Min(minima[at : at + 1])
        return found

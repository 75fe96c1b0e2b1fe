"""The mismatch measured per token: which rows the moment table needs, and the metrics made of their sums.

T tokens; D = log pi_train - log pi_rollout (subtracted in float32), rho = e^D, e = rho - 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.moments import MomentTable, constant
from megatron_rl_corr.core.weights import LOG_CLAMP

# Where k3 = e^D - 1 - D reaches 10: the clamped metrics let no token weigh more, as verl's KL penalty does.
CLAMPED = (-10.9999833, 2.610868638)

# Lower and upper, of the rows abs_clamped, d_clamped, train, rollout and d.
_CLAMPS = (
    ((0.0,), (CLAMPED[0],), (-math.inf,), (-math.inf,), (-LOG_CLAMP,)),
    ((LOG_CLAMP,), (CLAMPED[1],), (math.inf,), (math.inf,), (LOG_CLAMP,)),
)

BANDS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_1e-2", "1e-2_to_1e-1", "above_1e-1")
_EDGES = tuple(math.log(10.0**-power) for power in (4, 3, 2, 1))
_BAND_ROWS = tuple(f"by_prob/{band}" for band in BANDS)
_TURN_ROWS = ("by_turn/first", "by_turn/later")


def base_rows(optional: Collection[str]) -> tuple[str, ...]:
    """Names of the rows that `fill_base_rows` writes, in an order in which one kernel can write several."""
    return (
        "position", "in_mask", "abs_clamped", "d_clamped", "train", "rollout", "d", "exact", "one",
        *(name for name in ("advantage",) if name in optional), "abs",
        "e_abs", "e_clamped", "q_train", "q_rollout", "e",  # expm1 of the rows from abs_clamped to d
        "abs_diff", *(name for name in ("square", "k3") if name in optional),
        "softplus", "large", *_BAND_ROWS, *(_TURN_ROWS if "turns" in optional else ()),
    )  # fmt: skip


def fill_base_rows(
    table: MomentTable, train: Tensor, rollout: Tensor, difference: Tensor, size: Tensor, valid: Tensor,
    in_mask: Tensor, *, turn_ids: Tensor | None, advantages: Tensor | None,
) -> None:
    """Every row that needs only the inputs; [T] each, `difference` is D and `size` |D|, both before masking.

    advantages: where a rule looks at them.
    """
    device = valid.device
    ones = constant(1.0, torch.float32, device).expand_as(train)
    given = [size, difference, train, rollout, difference, difference, ones]
    given += [size] if advantages is None else [advantages, size]
    torch.stack([ones, in_mask, *given], out=table.rows("position", "abs"))
    given = table.rows("abs_clamped", "abs")
    # A select, not a product: a NaN outside the mask must leave nothing behind.
    torch.where(valid, given, constant((0.0,), torch.float64, device), out=given)
    lower, upper = (constant(bounds, torch.float64, device) for bounds in _CLAMPS)
    exponents = table.rows("abs_clamped", "d").clamp_(lower, upper)
    # expm1, not exp: it is 0 outside the mask, and D of 1e-7 keeps its digits.
    torch.expm1(exponents, out=table.rows("e_abs", "e"))
    torch.sub(table.row("q_train"), table.row("q_rollout"), out=table.row("abs_diff")).abs_()
    if table.has("square"):
        torch.square(table.row("d"), out=table.row("square"))
    if table.has("k3"):
        torch.sub(table.row("e"), table.row("d"), out=table.row("k3"))
    torch.logaddexp(table.row("d"), constant(0.0, torch.float64, device), out=table.row("softplus"))
    # Bounds rounded to float32, as log-probs are: a ratio of 2 is not above 2.
    torch.gt(table.row("abs"), constant(math.log(2), torch.float32, device), out=table.row("large"))
    # One row a part, not nested ones to subtract: an outlier in one must not round away another.
    band = torch.bucketize(table.row("rollout"), constant(_EDGES, torch.float32, device), right=True)
    torch.eq(band, _column(len(BANDS), device), out=table.rows(_BAND_ROWS[0], _BAND_ROWS[-1]))
    if turn_ids is not None:
        torch.eq(turn_ids != 0, _column(2, device), out=table.rows(*_TURN_ROWS))


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
    "k3_kl": (m.MeanOfDifference, _sums("e", "d", "one")),
    "k3_kl_clamped": (m.MeanOfDifference, _sums("e_clamped", "d_clamped", "one")),
    "log_ratio_abs_mean": (m.Mean, _sums("abs", "one")),
    "log_ratio_large_fraction": (m.Mean, _sums("large", "one")),
    "token_mult_prob_error": (m.MeanPlusOne, _sums("e_abs", "one")),
    "prob_diff_abs_mean": (m.Mean, _sums("abs_diff", "one")),
    "prob_diff_std": (m.StdOfDifference, _TWO_SIDES),
    "chi2_token": (m.Chi2, (("e", "e"), *_sums("e", "one"))),
    "chi2_token_clamped": (m.Chi2, (("e_clamped", "e_clamped"), *_sums("e_clamped", "one"))),
    "jsd": (m.JensenShannon, (("e", "softplus"), ("e", "d"), *_sums("softplus", "e", "d", "one"))),
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
    "k3_kl": (m.MeanOfDifference, ("e", "d", "one")),
    "log_ratio_abs_mean": (m.Mean, ("abs", "one")),
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


def token_metrics(
    table: MomentTable, *, weighted: bool, rules: Sequence[str], turns: bool
) -> tuple[dict[str, m.Metric], Tensor]:
    """The token metrics of a filled table, and [valid, kept, sum of e, sum of D] for the batch's totals."""
    chosen = metric_pairs(weighted, tuple(rules), turns)
    pairs = list(_sums("one", kept_row(rules), "e", "d"))
    starts = {}
    for name, (_, wanted) in chosen.items():
        starts[name] = len(pairs)
        pairs += wanted
    sums = table.sums(tuple(pairs))
    metrics = {
        name: kind(sums[starts[name] : starts[name] + len(wanted)]) for name, (kind, wanted) in chosen.items()
    }
    minima, maxima = table.extrema()
    for name, row in MAXIMA.items():
        if weighted or row != "weight":
            present, at = table.index("one"), table.index(row)
            metrics[name] = m.MaxOfPresent(maxima[present : at + 1 : at - present])
    if weighted:
        at = table.index("weight_or_inf")
        metrics["weight_min"] = m.Min(minima[at : at + 1])
    return metrics, sums[:4]

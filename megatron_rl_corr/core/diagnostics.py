"""The mismatch measured per token: which rows the moment table needs, and the metrics made of their sums.

T tokens; D = log pi_train - log pi_rollout (subtracted in float32), rho = e^D, e = rho - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.moments import MomentTable, constant
from megatron_rl_corr.core.weights import LOG_CLAMP

# Where k3 = e^D - 1 - D reaches 10: the clamped metrics let no token weigh more, as verl's KL penalty does.
CLAMPED = (-10.9999833, 2.610868638)

# Lower and upper, of the rows d, abs_clamped and d_clamped.
_CLAMPS = (((-LOG_CLAMP,), (0.0,), (CLAMPED[0],)), ((LOG_CLAMP,), (LOG_CLAMP,), (CLAMPED[1],)))

BANDS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_1e-2", "1e-2_to_1e-1", "above_1e-1")
_NESTED = ("p_1e-4", "p_1e-3", "p_1e-2", "p_1e-1")
_EDGES = tuple((math.log(10.0**-power),) for power in (4, 3, 2, 1))

BASE_ROWS = (
    "q_train", "q_rollout", "e", "e_abs", "e_clamped",  # expm1 of train, rollout, d, abs_clamped, d_clamped
    "one", "exact", "abs", "train", "rollout", "d", "abs_clamped", "d_clamped",  # from the inputs, 0 outside valid
    "softplus", "abs_diff", "large", *_NESTED, "in_mask",
)  # fmt: skip


def fill_base_rows(
    table: MomentTable, train: Tensor, rollout: Tensor, difference: Tensor, size: Tensor, valid: Tensor,
    in_mask: Tensor,
) -> None:
    """Every row that needs only the log-probs; [T] each, `difference` is D and `size` |D|, both before masking."""
    table.row("in_mask").copy_(in_mask)
    device = valid.device
    given = table.rows("one", "d_clamped")
    ones = constant(1.0, torch.float32, device).expand_as(train)
    torch.stack([ones, difference, size, train, rollout, difference, size, difference], out=given)
    # A select, not a product: a NaN outside the mask must leave nothing behind.
    torch.where(valid, given, constant((0.0,), torch.float64, device), out=given)
    lower, upper = (constant(bounds, torch.float64, device) for bounds in _CLAMPS)
    table.rows("d", "d_clamped").clamp_(lower, upper)
    # expm1, not exp: it is 0 outside the mask, and D of 1e-7 keeps its digits.
    torch.expm1(table.rows("train", "d_clamped"), out=table.rows("q_train", "e_clamped"))
    torch.logaddexp(table.row("d"), constant(0.0, torch.float64, device), out=table.row("softplus"))
    torch.sub(table.row("q_train"), table.row("q_rollout"), out=table.row("abs_diff")).abs_()
    # Bounds rounded to float32, as log-probs are: a ratio of 2 is not above 2.
    torch.gt(table.row("abs"), constant(math.log(2), torch.float32, device), out=table.row("large"))
    edges = constant(_EDGES, torch.float32, device)
    torch.ge(table.row("rollout"), edges, out=table.rows(_NESTED[0], _NESTED[-1]))


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
_BY_PART = {"k3_kl": ("e", "d"), "kl": ("exact",), "log_ratio_abs_mean": ("abs",)}
"""What is told for each probability band and each kind of turn."""

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
    nested = ("one", *_NESTED)
    for band, outer, inner in zip(BANDS, nested, (*_NESTED, None), strict=True):
        found |= _part(f"by_prob/{band}", outer, inner)
    if turns:
        found |= _part("by_turn/first", "first_turn", None)
        found |= _part("by_turn/later", "one", "first_turn")
    return found


def kept_row(rules: Sequence[str]) -> str:
    """The row that is 1 where all rules keep a valid token."""
    if len(rules) > 1:
        return "kept"
    return f"rule/{rules[0]}" if rules else "one"


def _part(prefix: str, outer: str, inner: str | None) -> dict[str, tuple[type[m.Metric], Pairs]]:
    """Metrics over the tokens in `outer` but not in `inner` (a set within it)."""
    found: dict[str, tuple[type[m.Metric], Pairs]] = {}
    for name, rows in _BY_PART.items():
        sign_flipped = name == "kl"
        if inner is None:
            kind = {1: m.NegativeMean if sign_flipped else m.Mean, 2: m.MeanOfDifference}[len(rows)]
            pairs = (*((outer, row) for row in rows), (outer, "one"))
        else:
            kind = {1: m.NegativeBand if sign_flipped else m.Band, 2: m.BandOfDifference}[len(rows)]
            pairs = (
                *((outer, row) for row in rows), *((inner, row) for row in rows), (outer, "one"), (inner, "one")
            )  # fmt: skip
        found[f"{prefix}/{name}"] = (kind, pairs)
    if inner is None:
        found[f"{prefix}/tokens"] = (m.Sum, ((outer, "one"),))
    else:
        found[f"{prefix}/tokens"] = (m.Difference, ((outer, "one"), (inner, "one")))
    return found


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
    maxima = table.maxima()
    for name, row in MAXIMA.items():
        if weighted or row != "weight":
            present, at = table.index("one"), table.index(row)
            metrics[name] = m.MaxOfPresent(maxima[present : at + 1 : at - present])
    return metrics, sums[:4]

"""How far the two policies are apart: the metrics of a correction, as partial sums and extrema of
this rank's share.

T tokens, S sequences; D = log pi_train - log pi_rollout (subtracted in float32), rho = e^D, e = rho - 1
with D clamped to +-20; k3 is e - D with D at most 1e8, so that no absurd D makes it negative. Everything
is 0 outside the valid tokens, so plain sums over T are sums over the valid tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from megatron_rl_corr.core.ratios import LARGEST_LESS, LOG_CLAMP, SpanSums, TokenRatios
from megatron_rl_corr.core.rejection import Rejection
from megatron_rl_corr.core.segments import Columns, constant, segment_sums
from megatron_rl_corr.reduce import metrics as m

OUTLIER = 2.610868638
"""Where k3 = e^D - 1 - D reaches 10: in clamped metrics no ratio counts for more than e^2.61 = 13.6."""
LOWEST = -10.9999833
"""The other D for which k3 is 10. In the clamped metrics no token counts for more, as in
verl's KL penalty.
"""
LONGEST_LOG_PPL = math.log(100)
"""No sequence counts for more than 100 in the clamped perplexities, which is a guess among
a hundred tokens.
"""

BANDS = ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_1e-2", "1e-2_to_1e-1", "above_1e-1")
_BAND_EDGES = tuple(math.log(10.0**-power) for power in (4, 3, 2, 1))
TURNS = ("first", "later")
TURN_NUMBERS = ("1", "2_to_3", "4_to_15", "16+")
"""The turns that `later` has, by number; turn 0 is `first`."""
_TURN_EDGES = (1, 2, 4, 16)
_OF_TURN_NUMBERS = ("tokens", "k3_kl", "log_ratio_abs_mean")
_BY_TURN_NUMBER = tuple(f"by_turn/{number}/" for number in TURN_NUMBERS)
LAGS = ("0", "1", "2+")

Parts = dict[str, tuple[type[m.Metric], tuple[Tensor, ...]]]
"""A metric's name -> its class, and its values as float64 scalars."""


def pack(parts: Parts) -> dict[str, m.Metric]:
    """Metrics whose values are views of one tensor: stacking each by itself would cost a kernel a metric."""
    values = torch.stack([value for _, scalars in parts.values() for value in scalars])
    pieces = values.split([len(scalars) for _, scalars in parts.values()])
    return {name: kind(piece) for (name, (kind, _)), piece in zip(parts.items(), pieces, strict=True)}


def token_metrics(ratios: TokenRatios, turn_ids: Tensor | None, token_lags: Tensor | None = None) -> Parts:
    """Means, spreads and extrema over the valid tokens, and the main means by probability band, turn and lag.

    turn_ids [T]: 0 for a sequence's first turn; None leaves the metrics by turn out. token_lags [T]:
    pushes since the weights that sampled the token; None leaves the metrics by lag out.
    """
    parts = _probability_metrics(ratios)  # first: its rows are freed before the others are made
    d, e, size, count = ratios.log_ratio, ratios.rho_less_one, ratios.log_ratio.abs(), ratios.valid_tokens
    in_mask = ratios.tokens_in_mask
    parts |= {
        "nonfinite_tokens": (m.Difference, (in_mask, count)),
        "padded_tokens": (m.Sum, (len(d) - in_mask,)),
        "log_ratio": (m.LogRatioHistogram, _log_ratio_histogram(size, ratios.one)),
        "log_ratio_abs_max": (m.MaxOfPresent, (_largest(size), count)),
    }
    d_exponent = d.clamp(-LOG_CLAMP, LOG_CLAMP)
    exponents_total, products_total = d_exponent.sum(), torch.dot(e, d_exponent)
    del d_exponent
    kept: list[Tensor] = []  # e_clamped, made as the last column and used once more below
    sums = _sums_by_part(ratios, turn_ids, token_lags, _main_columns(ratios, size, kept))
    for part, totals in sums.items():
        names = _OF_TURN_NUMBERS if part in _BY_TURN_NUMBER else None
        parts |= _main_means(part, totals, names)
    e_total, d_clamped_total, e_clamped_total = (
        sums[""][_MAIN.index(x)] for x in ("e", "d_clamped", "e_clamped")
    )
    parts["chi2_token"] = m.Chi2, (torch.dot(e, e), e_total, count)
    exp_abs = size.clamp_(max=LOG_CLAMP).expm1_()
    parts["token_mult_prob_error"] = m.MeanPlusOne, (exp_abs.sum(), count)
    exp_abs.clamp_(max=math.expm1(OUTLIER))
    parts["token_mult_prob_error_clamped"] = m.MeanPlusOne, (exp_abs.sum(), count)
    log_middle = torch.mul(e, 0.5, out=size).log1p_()  # ln((1 + rho) / 2)
    parts["jsd"] = (
        m.JensenShannon,
        (torch.dot(e, log_middle), products_total, log_middle.sum(), exponents_total, count),
    )
    d_clamped, (e_clamped,) = d.clamp(LOWEST, OUTLIER), kept  # made again rather than kept, for memory
    parts["chi2_token_clamped"] = m.Chi2, (torch.dot(e_clamped, e_clamped), e_clamped_total, count)
    log_middle.clamp_(math.log1p(math.expm1(LOWEST) / 2), math.log1p(math.expm1(OUTLIER) / 2))
    parts["jsd_clamped"] = (
        m.JensenShannon,
        (
            torch.dot(e_clamped, log_middle),
            torch.dot(e_clamped, d_clamped),
            log_middle.sum(),
            d_clamped_total,
            count,
        ),
    )
    return parts


def _probability_metrics(ratios: TokenRatios) -> Parts:
    """Metrics that compare probabilities, from x = pi_train - 1 and y = pi_rollout - 1, 0 outside
    the valid tokens.
    """
    x, y = ratios.train_logprobs.double().expm1_(), ratios.rollout_logprobs.double().expm1_()
    count = ratios.valid_tokens
    pearson = x.sum(), y.sum(), torch.dot(x, x), torch.dot(y, y), torch.dot(x, y), count
    difference = x.sub_(y)
    std = difference.sum(), torch.dot(difference, difference), count
    size = difference.abs_()
    return {
        "pearson": (m.Pearson, pearson),
        "prob_diff_std": (m.Std, std),
        "prob_diff_abs_mean": (m.Mean, (size.sum(), count)),
        "prob_diff_abs_max": (m.MaxOfPresent, (_largest(size), count)),
    }


def _sums_by_part(
    ratios: TokenRatios, turn_ids: Tensor | None, token_lags: Tensor | None, columns: Columns
) -> dict[str, tuple[Tensor, ...]]:
    """Sums of the columns, float64 scalars: of all tokens (""), by the server's probability, by
    turn and by lag.

    One sum for each cell of lag, turns and band, of which the others are made: parts are added, never
    subtracted, so an outlier in one does not round away another.
    """
    edges = constant(_BAND_EDGES, torch.float32, ratios.valid.device)
    cells = torch.bucketize(ratios.rollout_logprobs, edges, right=True, out_int32=True)
    if turn_ids is not None:
        turn_edges = constant(_TURN_EDGES, torch.int64, ratios.valid.device)
        numbers = torch.bucketize(turn_ids, turn_edges, right=True, out_int32=True)
        cells = torch.add(numbers, cells, alpha=1 + len(TURN_NUMBERS))
    if token_lags is not None:
        cells = torch.add(token_lags.clamp(0, 2), cells, alpha=3)
    which = _cells_of_parts(turn_ids is not None, token_lags is not None)
    table = segment_sums(columns, cells, len(which[""]))
    ones = constant(tuple(which.values()), torch.float64, ratios.valid.device)
    return {part: sums.unbind() for part, sums in zip(which, (ones @ table.T).unbind(), strict=True)}


@lru_cache(maxsize=4)
def _cells_of_parts(with_turns: bool, with_lags: bool) -> dict[str, tuple[float, ...]]:
    """For each part 1 at the cells that it sums, and 0 at the others; cells are counted by band, then turn,
    then lag.
    """
    bands, lags = range(len(BANDS)), range(len(LAGS) if with_lags else 1)
    turns = range(1 + len(TURN_NUMBERS) if with_turns else 1)
    cells = list(product(bands, turns, lags))
    parts = {"": cells}
    parts |= {f"by_prob/{name}/": product([one], turns, lags) for one, name in enumerate(BANDS)}
    if with_turns:
        numbers = {"first": [0], "later": turns[1:]} | {
            name: [one] for one, name in enumerate(TURN_NUMBERS, start=1)
        }
        parts |= {f"by_turn/{name}/": product(bands, own, lags) for name, own in numbers.items()}
    if with_lags:
        parts |= {f"by_lag/{name}/": product(bands, turns, [one]) for one, name in enumerate(LAGS)}
    summed = {part: set(own) for part, own in parts.items()}
    return {part: tuple(float(cell in own) for cell in cells) for part, own in summed.items()}


def engine_metrics(ratios: TokenRatios, engine_ids: Tensor, engines: Sequence[str]) -> Parts:
    """The main means and the largest |D| over the tokens that each engine sampled.

    Args:
        ratios: of the tokens.
        engine_ids: [T] int64 in [0, len(engines)).
        engines: their names, the same on all ranks.
    """
    size = ratios.log_ratio.abs()
    sums = segment_sums(_main_columns(ratios, size, []), engine_ids, len(engines))
    parts: Parts = {}
    for number, (name, totals) in enumerate(zip(engines, sums.unbind(dim=1), strict=True)):
        totals = totals.unbind()
        parts |= _main_means(f"by_engine/{name}/", totals)
        largest = _largest(torch.where(engine_ids == number, size, constant(0.0, size.dtype, size.device)))
        parts[f"by_engine/{name}/log_ratio_abs_max"] = m.MaxOfPresent, (largest, totals[0])
    return parts


FILTERED = "rollout/by_fate/filtered_"
"""Before the names of metrics of groups that the filter left out; mcore/batch/collect_metrics.py
says what they mean.
"""


def filtered_metrics(
    train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, m.Metric]:
    """The main means and the largest |D| of samples that are not trained, as the group filter left them out.

    Args:
        train_logprobs, rollout_logprobs: [T] float.
        loss_mask: [T] bool, the sampled tokens.
    """
    ratios = TokenRatios.of(train_logprobs, rollout_logprobs, loss_mask, {})
    size = ratios.log_ratio.abs()
    everywhere = constant(0, torch.int64, size.device).expand(len(size))
    totals = segment_sums(_main_columns(ratios, size, []), everywhere, 1)[:, 0].unbind()
    means = _main_means(FILTERED, totals)
    parts = {name: part for name, part in means.items() if not name.endswith("_clamped")}
    parts[f"{FILTERED}log_ratio_abs_max"] = m.MaxOfPresent, (_largest(size), totals[0])
    parts[f"{FILTERED}nonfinite_tokens"] = m.Difference, (ratios.tokens_in_mask, totals[0])
    return pack(parts)


_MAIN = ("tokens", "d", "d_to_subtract", "e", "size", "size_clamped", "d_clamped", "e_clamped")
"""The columns whose sums the main means are made of."""


def _main_columns(ratios: TokenRatios, size: Tensor, kept: list[Tensor]) -> Columns:
    """The columns of _MAIN.

    Args:
        ratios: of the tokens.
        size: [T] |D|.
        kept: the last column, e_clamped [T], is added to it for who needs it once more.
    """
    d, e = ratios.log_ratio, ratios.rho_less_one

    def clamped_e() -> Tensor:
        # e^x grows with x, so clamping the exponential is clamping D.
        kept.append(e.clamp(math.expm1(LOWEST), math.expm1(OUTLIER)))
        return kept[-1]

    makers = (
        lambda: ratios.one,
        lambda: d,
        lambda: d.clamp(max=LARGEST_LESS),
        lambda: e,
        lambda: size,
        lambda: size.clamp(max=OUTLIER),
        lambda: d.clamp(LOWEST, OUTLIER),
        clamped_e,
    )
    return dict(zip(_MAIN, makers, strict=True))


def _main_means(part: str, totals: Sequence[Tensor], names: Sequence[str] | None = None) -> Parts:
    """The metrics of a part, from the sums of _MAIN. names: only these; None: all."""
    tokens, d, d_to_subtract, e, size, size_clamped, d_clamped, e_clamped = totals
    means: Parts = {
        f"{part}tokens" if part else "valid_tokens": (m.Sum, (tokens,)),
        f"{part}kl": (m.NegativeMean, (d, tokens)),
        f"{part}kl_clamped": (m.NegativeMean, (d_clamped, tokens)),
        f"{part}k3_kl": (m.MeanOfDifference, (e, d_to_subtract, tokens)),
        f"{part}k3_kl_clamped": (m.MeanOfDifference, (e_clamped, d_clamped, tokens)),
        f"{part}log_ratio_abs_mean": (m.Mean, (size, tokens)),
        f"{part}log_ratio_abs_mean_clamped": (m.Mean, (size_clamped, tokens)),
    }
    return means if names is None else {f"{part}{name}": means[f"{part}{name}"] for name in names}


@lru_cache(maxsize=8)
def _bin_ends(device: torch.device) -> Tensor:
    """float64 upper ends of the bins of |D|, rounded to float32 as log-probs are; the bin that
    ends at 0 has D = 0.
    """
    return torch.tensor((0.0, *m.EDGES), dtype=torch.float32, device=device).double()


def _log_ratio_histogram(size: Tensor, one: Tensor) -> tuple[Tensor, ...]:
    """Valid tokens of D = 0, and of the others in each bin of |D| [T], as scalars.

    No bincount: on a GPU that reads its own result.
    """
    bins = torch.bucketize(size, _bin_ends(size.device), out_int32=True)
    return segment_sums({"tokens": lambda: one}, bins, 1 + len(m.LABELS))[0].unbind()


def weight_metrics(weights: Tensor, out_of_bounds: Tensor, ratios: TokenRatios) -> Parts:
    """Spread of the final weights over the valid tokens, and the share that a bound changed.

    Args:
        weights: [T] float64, 0 outside the valid tokens.
        out_of_bounds: [T] bool, where a bound acted.
        ratios: of the tokens.
    """
    count, total, squares = ratios.valid_tokens, weights.sum(), torch.dot(weights, weights)
    return {
        "weight_mean": (m.Mean, (total, count)),
        "weight_std": (m.Std, (total, squares, count)),
        "ess": (m.EffectiveSampleSize, (total, squares, count)),
        "weight_out_of_bounds": (m.Mean, (out_of_bounds.sum(dtype=torch.float64), count)),
        "weight_max": (m.MaxOfPresent, (_largest(weights), count)),
        "weight_min": (m.Min, (_smallest(weights, ratios.valid),)),
    }


def rejection_metrics(ratios: TokenRatios, rejection: Rejection) -> Parts:
    """The share of the mask's tokens that is kept, and of the valid ones that each rule rejects.

    A token without a finite log-prob is rejected by no rule, and yet it is not kept.
    """
    count = ratios.valid_tokens
    return {"kept_fraction": (m.Mean, (rejection.kept_tokens, ratios.tokens_in_mask))} | {
        f"rejected_fraction/{name}": (m.LeftOut, (keep.sum(dtype=torch.float64), count))
        for name, keep in rejection.kept_by.items()
    }


# Per sequence, x = factor * source, clamped; the metric is the mean of e^x, or of e^x - 1 (chi2). Sources:
# the mean of D or of a log-prob over the sequence, and the sum of D.
_EXPONENTS = {
    "training_ppl": ("train", -1.0, -math.inf, 2 * LOG_CLAMP),
    "training_ppl_clamped": ("train", -1.0, -math.inf, LONGEST_LOG_PPL),
    "rollout_ppl": ("rollout", -1.0, -math.inf, 2 * LOG_CLAMP),
    "rollout_ppl_clamped": ("rollout", -1.0, -math.inf, LONGEST_LOG_PPL),
    "ppl_ratio": ("mean", -1.0, -LOG_CLAMP, LOG_CLAMP),
    "ppl_ratio_clamped": ("mean", -1.0, -OUTLIER, OUTLIER),
    "chi2_seq": ("sum", 2.0, -2 * LOG_CLAMP, 2 * LOG_CLAMP),
    "chi2_seq_clamped": ("sum", 2.0, -2 * OUTLIER, 2 * OUTLIER),
    "chi2_geo": ("mean", 2.0, -2 * LOG_CLAMP, 2 * LOG_CLAMP),
    "chi2_geo_clamped": ("mean", 2.0, -2 * OUTLIER, 2 * OUTLIER),
}


def sequence_metrics(sums: SpanSums, kept_sequences: Tensor, *, owner: bool) -> Parts:
    """Perplexities, their gap, chi-square and effective sample size, over the sequences that
    have valid tokens.

    Args:
        sums: over whole sequences, the same on every context-parallel rank.
        kept_sequences: [S] bool.
        owner: this rank counts them; the other context-parallel ranks add 0.
    """
    # 0 where a sequence has no valid token, and so is all that is made of them.
    means, present = sums.sequence_means, sums.present
    mean, train, rollout = means["log_ratio"], means["train_logprobs"], means["rollout_logprobs"]
    sources = {"mean": mean, "train": train, "rollout": rollout, "sum": sums.by_sequence["log_ratio"]}
    factor, low, high = (
        constant(tuple((row[i],) for row in _EXPONENTS.values()), torch.float64, mean.device)
        for i in (1, 2, 3)
    )
    exponents = torch.stack([sources[row[0]] for row in _EXPONENTS.values()]).mul_(factor).clamp_(low, high)
    clamped = dict(zip(_EXPONENTS, exponents.unbind(), strict=True))
    columns = {
        name: (m.Mean if "chi2" in name else m.MeanPlusOne, column)
        for name, column in zip(_EXPONENTS, exponents.expm1().unbind(), strict=True)
    } | {
        "training_log_ppl": (m.NegativeMean, train),
        "training_log_ppl_clamped": (m.Mean, clamped["training_ppl_clamped"]),
        "rollout_log_ppl": (m.NegativeMean, rollout),
        "rollout_log_ppl_clamped": (m.Mean, clamped["rollout_ppl_clamped"]),
        "log_ppl_diff": (m.NegativeMean, mean),
        "log_ppl_diff_clamped": (m.Mean, clamped["ppl_ratio_clamped"]),
        "log_ppl_diff_abs": (m.Mean, mean.abs()),
        "log_ppl_diff_abs_clamped": (m.Mean, clamped["ppl_ratio_clamped"].abs()),
        "kept_sequence_fraction": (m.Mean, kept_sequences),
    }
    # No sums of e^x - 1 here: weights that are all near e^-20 would drown in the 1.
    products = sums.products
    totals = torch.stack(
        [*(column for _, column in columns.values()), products, products.square(), present]
    ).sum(dim=1)
    *totals, weight, squares, count = (totals if owner else torch.zeros_like(totals)).unbind()
    parts: Parts = {
        name: (kind, (total, count)) for (name, (kind, _)), total in zip(columns.items(), totals, strict=True)
    }
    absent = constant(-math.inf, torch.float64, mean.device)
    return parts | {
        "ess_sequences": (m.EffectiveSampleSize, (weight, squares, count)),
        "sequences": (m.Sum, (count,)),
        "log_ppl_diff_max": (m.NegativeMin, (_smallest(mean, present),)),
        "log_ppl_diff_min": (m.NegativeMax, (_largest(torch.where(present, mean, absent)),)),
    }


def _largest(values: Tensor) -> Tensor:
    """The maximum [] of values [N]; -inf where there are none."""
    return values.amax() if values.numel() else values.new_full((), -math.inf)


def _smallest(values: Tensor, present: Tensor) -> Tensor:
    """The minimum [] of the values [N] that are present; inf where none is."""
    found = torch.where(present, values, constant(math.inf, torch.float64, values.device))
    return found.amin() if found.numel() else found.new_full((), math.inf)

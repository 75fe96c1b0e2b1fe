"""The mismatch measured per sequence: perplexities, their gap, and chi-square of products and geometric means.

S sequences; sums of log-probs and of D over a sequence's valid tokens.
"""

from __future__ import annotations

import torch

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.moments import constant
from megatron_rl_corr.core.sequence_table import SUMMED, SequenceTable

# Made of the last rows by one matrix product: five that go through expm1, then two to find extremes with. A sequence
# that is not there has 0 everywhere, so the lift of those that are makes them larger than it.
_MADE: dict[str, dict[str, float]] = {
    "training_ppl": {"train": -1.0}, "rollout_ppl": {"rollout": -1.0}, "ppl_ratio": {"exact": -1.0},
    "chi2_geo": {"d": 2.0}, "chi2_seq": {"log_product": 2.0},
    "highest": {"exact": -1.0, "one": m.LIFT}, "lowest": {"exact": 1.0, "one": m.LIFT},
}  # fmt: skip
_EXPONENTIALS = 5
_GIVEN = ("log_product", *SUMMED)
_MATRIX = tuple(tuple(row.get(name, 0.0) for name in _GIVEN) for row in _MADE.values())
_ROWS = ("kept", "abs", *_MADE, *_GIVEN)

_MEANS: dict[str, tuple[type[m.Metric], str]] = {
    "kept_sequence_fraction": (m.Mean, "kept"),
    "training_log_ppl": (m.NegativeMean, "train"),
    "rollout_log_ppl": (m.NegativeMean, "rollout"),
    "training_ppl": (m.MeanPlusOne, "training_ppl"),
    "rollout_ppl": (m.MeanPlusOne, "rollout_ppl"),
    "ppl_ratio": (m.MeanPlusOne, "ppl_ratio"),
    "log_ppl_diff": (m.NegativeMean, "exact"),
    "log_ppl_diff_abs": (m.Mean, "abs"),
    "chi2_geo": (m.Mean, "chi2_geo"),
    "chi2_seq": (m.Mean, "chi2_seq"),
}


def sequence_metrics(sequences: SequenceTable, *, has_kept: bool, owner: bool) -> dict[str, m.Metric]:
    """Means over sequences with at least one valid token.

    has_kept: rules filled `kept`; without them all are. Every context-parallel rank holds all of it: only their owner
    counts it.
    """
    table = sequences.rows[0 if has_kept else 1 :]
    names = _ROWS[0 if has_kept else 1 :]
    at = {name: i for i, name in enumerate(names)}
    made = table[at["abs"] + 1 : at["log_product"]]
    torch.matmul(constant(_MATRIX, torch.float64, table.device), table[at["log_product"] :], out=made)
    made[:_EXPONENTIALS].expm1_()
    torch.abs(table[at["exact"]], out=table[at["abs"]])
    totals = table.sum(dim=1)
    highest = made[_EXPONENTIALS:].amax(dim=1) if sequences.num_sequences else totals.new_zeros(2)
    if not owner:
        totals = torch.zeros_like(totals)  # not a product: a perplexity may be infinite
    present = at["one"]
    metrics: dict[str, m.Metric] = {}
    for name, (kind, row) in _MEANS.items():
        # [total, number of sequences], as a view.
        values = totals[at[row] :: present - at[row]] if row in at else totals[present:].expand(2)
        metrics[name] = kind(values)
    return metrics | {
        "sequences": m.Sum(totals[present:]),
        "log_ppl_diff_max": m.LiftedMax(highest[0:1]),
        "log_ppl_diff_min": m.LiftedMin(highest[1:2]),
    }

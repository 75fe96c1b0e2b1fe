"""The mismatch measured per sequence: perplexities, their gap, and chi-square of products and geometric means.

S sequences; sums of log-probs and of D over a sequence's valid tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.moments import constant
from megatron_rl_corr.core.sequence_table import SequenceTable
from megatron_rl_corr.core.weights import LOG_CLAMP

_ROWS = ("exact", "abs", "train", "rollout", "d", "sum_d", "present")
# Made of the ones above by one matrix product: five that go through expm1, then two to find extremes with. A sequence
# that is not there has 0 everywhere, so the lift of those that are makes them larger than it.
_COMBINATIONS = (
    {"train": -1.0}, {"rollout": -1.0}, {"exact": -1.0}, {"d": 2.0}, {"sum_d": 2.0},
    {"exact": -1.0, "present": m.LIFT}, {"exact": 1.0, "present": m.LIFT},
)  # fmt: skip
_MATRIX = tuple(tuple(row.get(name, 0.0) for name in _ROWS) for row in _COMBINATIONS)
_PRESENT, _MADE, _ABS_EXACT, _KEPT = 6, 7, 14, 15

_MEANS: dict[str, tuple[type[m.Metric], int]] = {
    "kept_sequence_fraction": (m.Mean, _KEPT),
    "training_log_ppl": (m.NegativeMean, 2),
    "rollout_log_ppl": (m.NegativeMean, 3),
    "training_ppl": (m.MeanPlusOne, _MADE),
    "rollout_ppl": (m.MeanPlusOne, _MADE + 1),
    "ppl_ratio": (m.MeanPlusOne, _MADE + 2),
    "log_ppl_diff": (m.NegativeMean, 0),
    "log_ppl_diff_abs": (m.Mean, _ABS_EXACT),
    "chi2_geo": (m.Mean, _MADE + 3),
    "chi2_seq": (m.Mean, _MADE + 4),
}


def sequence_metrics(sequences: SequenceTable, kept: Tensor | None, *, owner: bool) -> dict[str, m.Metric]:
    """Means over sequences with at least one valid token.

    kept [S] bool: None where no rule takes sequences. Every context-parallel rank holds all of it: only their owner
    counts it.
    """
    size = sequences.num_sequences
    table = sequences.base[: _KEPT + (kept is not None)]
    torch.clamp(sequences.sums["d"], -LOG_CLAMP, LOG_CLAMP, out=table[5])
    torch.gt(sequences.sums["count"], 0, out=table[_PRESENT])
    made = table[_MADE:_ABS_EXACT]
    torch.matmul(constant(_MATRIX, torch.float64, table.device), table[:_MADE], out=made)
    made[:5].expm1_()
    torch.abs(table[0], out=table[_ABS_EXACT])
    if kept is not None:
        table[_KEPT].copy_(kept)
    totals = table.sum(dim=1)
    highest = made[5:].amax(dim=1) if size else totals.new_zeros(2)
    if not owner:
        totals = torch.zeros_like(totals)  # not a product: a perplexity may be infinite
    rows = [_PRESENT if kept is None and row == _KEPT else row for _, row in _MEANS.values()]
    index = tuple(i for row in rows for i in (row, _PRESENT))
    values = totals.index_select(0, constant(index, torch.int64, table.device))
    metrics: dict[str, m.Metric] = {
        name: kind(values[2 * i : 2 * i + 2]) for i, (name, (kind, _)) in enumerate(_MEANS.items())
    }
    return metrics | {
        "sequences": m.Sum(totals[_PRESENT : _PRESENT + 1]),
        "log_ppl_diff_max": m.LiftedMax(highest[0:1]),
        "log_ppl_diff_min": m.LiftedMin(highest[1:2]),
    }

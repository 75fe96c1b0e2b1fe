"""The mismatch measured per sequence: perplexities, their gap, and chi-square of products and geometric means.

S sequences; sums and means of log-probs and of D over a sequence's valid tokens.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl_corr.core import metrics as m
from megatron_rl_corr.core.moments import constant
from megatron_rl_corr.core.sequence_table import SequenceTable
from megatron_rl_corr.core.weights import LOG_CLAMP, OUTLIER

LONGEST_LOG_PPL = math.log(100)
"""In the clamped perplexities no sequence counts for more than 100: a token in a hundred is a guess."""


class _Made(NamedTuple):
    """A row of the table: a sum of others, by (kind, name), clamped."""

    of: dict[tuple[str, str], float]
    low: float = -math.inf
    high: float = math.inf


def _mean(name: str, factor: float = 1.0) -> dict[tuple[str, str], float]:
    return {("mean", name): factor}


_TWICE = 2 * LOG_CLAMP
_PRODUCT, _GAP = ("sum", "exact"), _mean("exact", -1.0)
# Those of which e^x - 1 is taken come first; log-products and geometric means are the weights' too.
_EXPONENTIALS: dict[str, _Made] = {
    "product": _Made({_PRODUCT: 1.0}, -LOG_CLAMP, LOG_CLAMP),
    "geometric": _Made(_mean("exact"), -LOG_CLAMP, LOG_CLAMP),
    "chi2_seq": _Made({_PRODUCT: 2.0}, -_TWICE, _TWICE),
    "chi2_seq_clamped": _Made({_PRODUCT: 2.0}, -2 * OUTLIER, 2 * OUTLIER),
    "chi2_geo": _Made(_mean("exact", 2.0), -_TWICE, _TWICE),
    "chi2_geo_clamped": _Made(_mean("exact", 2.0), -2 * OUTLIER, 2 * OUTLIER),
    "ppl_ratio": _Made(_GAP, -LOG_CLAMP, LOG_CLAMP),
    "ppl_ratio_clamped": _Made(_GAP, -OUTLIER, OUTLIER),
    "training_ppl": _Made(_mean("train", -1.0), high=_TWICE),
    "training_ppl_clamped": _Made(_mean("train", -1.0), high=LONGEST_LOG_PPL),
    "rollout_ppl": _Made(_mean("rollout", -1.0), high=_TWICE),
    "rollout_ppl_clamped": _Made(_mean("rollout", -1.0), high=LONGEST_LOG_PPL),
}
# A sequence that is not there has 0 everywhere, so the lift of those that are makes them larger than it.
_LIFTED = {
    "highest": _Made(_GAP | _mean("one", m.LIFT)), "lowest": _Made(_mean("exact") | _mean("one", m.LIFT)),
}
_PERPLEXITIES = [name for name in _EXPONENTIALS if "ppl" in name]
_SIZES: dict[str, _Made] = {
    "log_ppl_diff_abs": _Made(_GAP), "log_ppl_diff_abs_clamped": _Made(_GAP, -OUTLIER, OUTLIER),
}
_LINEAR: dict[str, _Made] = {
    "log_ppl_diff": _Made(_GAP),
    "log_ppl_diff_clamped": _Made(_GAP, -OUTLIER, OUTLIER),
    "training_log_ppl": _Made(_mean("train", -1.0)),
    "training_log_ppl_clamped": _Made(_mean("train", -1.0), high=LONGEST_LOG_PPL),
    "rollout_log_ppl": _Made(_mean("rollout", -1.0)),
    "rollout_log_ppl_clamped": _Made(_mean("rollout", -1.0), high=LONGEST_LOG_PPL),
}
_MADE = _EXPONENTIALS | _SIZES | _LIFTED | _LINEAR
SPARE_ROWS = len(_MADE)
"""What a SequenceTable must leave room for."""


@lru_cache(maxsize=64)
def _matrix(names: tuple[str, ...]) -> tuple[tuple[float, ...], ...]:
    """The rows of _MADE as sums of a table's sums and means."""
    given = [(kind, name) for kind in ("sum", "mean") for name in names]
    return tuple(tuple(made.of.get(row, 0.0) for row in given) for made in _MADE.values())


_LOW, _HIGH = (tuple((getattr(made, side),) for made in _MADE.values()) for side in ("low", "high"))


def make_rows(sequences: SequenceTable) -> dict[str, Tensor]:
    """The spare rows, filled from the others, [S] by name; `product` and `geometric` are the weights less 1."""
    made, device = sequences.rows[1 : 1 + SPARE_ROWS], sequences.rows.device
    torch.matmul(constant(_matrix(sequences.names), torch.float64, device), sequences.rows[1 + SPARE_ROWS :], out=made)
    made.clamp_(constant(_LOW, torch.float64, device), constant(_HIGH, torch.float64, device))
    made[: len(_EXPONENTIALS)].expm1_()
    made[len(_EXPONENTIALS) : len(_EXPONENTIALS) + len(_SIZES)].abs_()
    return dict(zip(_MADE, made.unbind(), strict=True))


def sequence_metrics(sequences: SequenceTable, *, has_kept: bool, owner: bool) -> dict[str, m.Metric]:
    """Means over sequences with at least one valid token, of what `make_rows` left in the table.

    has_kept: rules filled `kept`; without them all are. Every context-parallel rank holds all of it: only their owner
    counts it.
    """
    present = 1 + SPARE_ROWS + len(sequences.names) + sequences.names.index("one")
    at = {name: 1 + i for i, name in enumerate(_MADE)}
    highest = sequences.rows[at["highest"] : at["lowest"] + 1]
    highest = highest.amax(dim=1) if sequences.num_sequences else highest.new_zeros(2)
    totals = sequences.rows.sum(dim=1)
    if not owner:
        totals = torch.zeros_like(totals)

    def pair(row: int) -> Tensor:
        """[total, number of sequences], as a view."""
        return totals[row : present + 1 : present - row]

    metrics: dict[str, m.Metric] = {
        name: (m.MeanPlusOne if name in _PERPLEXITIES else m.Mean)(pair(at[name]))
        for name in (_EXPONENTIALS | _SIZES | _LINEAR) if name not in ("product", "geometric")
    }  # fmt: skip
    return metrics | {
        "sequences": m.Sum(totals[present : present + 1]),
        "kept_sequence_fraction": m.Mean(pair(0) if has_kept else totals[present : present + 1].expand(2)),
        "log_ppl_diff_max": m.LiftedMax(highest[0:1]),
        "log_ppl_diff_min": m.LiftedMin(highest[1:2]),
    }

"""How the sizes of log-ratios are distributed: tokens per bin of |D|, and percentiles to a bin's resolution.

T tokens, B bins; D = log pi_train - log pi_rollout.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.core.moments import constant
from megatron_rl_corr.core.rejection import as_float32_meets

_DECADES = [float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)]
EDGES = tuple(sorted([*_DECADES, math.log(2), 100.0]))
"""Upper ends of all bins but the last, which is open: 1, 2 and 5 of each decade, and ln 2. A bin holds its end."""
LABELS = tuple(f"upto_{edge:.3g}" for edge in EDGES) + (f"above_{EDGES[-1]:.3g}",)
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
_DEVICE_EDGES = tuple(as_float32_meets(edge, 1) for edge in EDGES)


class LogRatioHistogram(Metric):
    """Tokens in each bin of |D|; values = [B] counts, which add up exactly over ranks and microbatches."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        """The median."""
        return percentile(values, 0.5)

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        """Percentiles, the share above ln 2 (one side more than twice as sure), and each bin's share."""
        total = sum(values)
        shares = [count / total if total else math.nan for count in values]
        found = {f"{name}_abs_{label}": percentile(values, share) for label, share in PERCENTILES.items()}
        found[f"{name}_large_fraction"] = sum(shares[EDGES.index(math.log(2)) + 1 :])
        return found | {f"{name}_abs_bin/{label}": share for label, share in zip(LABELS, shares, strict=True)}


def percentile(counts: Sequence[float], share: float) -> float:
    """The least upper end that at least this share of the tokens is at or below; 100 if none is; nan without tokens."""
    total = sum(counts)
    if not total:
        return math.nan
    at = bisect_left(list(accumulate(counts)), share * total)
    return EDGES[min(at, len(EDGES) - 1)]


def log_ratio_histogram(size: Tensor, one: Tensor) -> Tensor:
    """Tokens in each bin [B], of |D| [T] float64, counted where one [T] float64 is 1.

    No bincount: on a GPU that reads its own result.
    """
    bins = torch.bucketize(size, constant(_DEVICE_EDGES, torch.float64, size.device))
    return size.new_zeros(len(LABELS)).index_add_(0, bins, one)

"""Sums and means of the moment table's rows over sequences, whole over context-parallel ranks.

S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BASE = ("count", "exact", "abs", "train", "rollout", "d")
EXPONENTIALS = ("q_train", "q_rollout", "e", "e_abs", "e_clamped")
"""Summed as well where a rule looks at e^D: they stand before the base rows in the moment table."""


class SequenceTable:
    """float64 [S] by name: `sums` over a sequence's valid tokens, `means` (0 for a sequence without any)."""

    SPARE = 11

    def __init__(self, sums: Tensor):
        names = (*EXPONENTIALS, *BASE)[-len(sums) :]
        self.sums: Mapping[str, Tensor] = dict(zip(names, sums.unbind(), strict=True))
        self.num_sequences = sums.shape[1]
        rows = sums.new_empty(len(names) + self.SPARE, self.num_sequences)
        torch.div(sums, self.sums["count"].clamp(min=1), out=rows[: len(names)])
        self.means: Mapping[str, Tensor] = dict(zip(names, rows.unbind(), strict=False))
        self.base = rows[len(names) - len(BASE) + 1 :]
        """The means from `exact` to `d`, then SPARE rows for what the sequence metrics make of them."""

"""Sums and means of the moment table's rows over sequences, whole over context-parallel ranks.

S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl_corr.core.weights import LOG_CLAMP

SUMMED = ("train", "rollout", "d", "exact", "one")
"""Rows that are always summed; what rules look at follows them."""


class SequenceTable:
    """float64 [S] by name: `sums` over a sequence's valid tokens, `means` (0 for a sequence without any)."""

    SPARE = 9

    def __init__(self, sums: Tensor, names: Sequence[str]):
        self.sums: Mapping[str, Tensor] = dict(zip(names, sums.unbind(), strict=True))
        self.num_sequences = sums.shape[1]
        rows = sums.new_empty(self.SPARE + 1 + len(names), self.num_sequences)
        means = rows[self.SPARE + 1 :]
        torch.div(sums, self.sums["one"].clamp(min=1), out=means)
        self.means: Mapping[str, Tensor] = dict(zip(names, means.unbind(), strict=True))
        self.log_product = torch.clamp(self.sums["d"], -LOG_CLAMP, LOG_CLAMP, out=rows[self.SPARE])
        """The sum of D, clamped again."""
        self.present = self.means["one"]
        """1 for a sequence with valid tokens, else 0."""
        self.kept = rows[0]
        """For the rules: 1 for a present sequence that they keep, else 0; unset where there are none."""
        self.rows = rows[: self.SPARE + 1 + len(SUMMED)]
        """`kept`, SPARE - 1 rows for what the sequence metrics make of the others, log_product, means of SUMMED."""

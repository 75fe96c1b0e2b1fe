"""Sums and means of the moment table's rows over sequences, whole over context-parallel ranks.

S sequences, K rows summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SUMMED = ("one", "exact", "abs", "rollout", "train")
"""Rows that are always summed; what rules look at stands before them."""


class SequenceTable:
    """float64 [S] by name: `sums` over a sequence's valid tokens, `means` (0 for a sequence without any).

    One block of rows, so that one kernel serves all: `kept`, `spare` rows for what the sequence metrics make of the
    others, the sums [K, S], which the caller adds into, and the means, which `average` then fills.
    """

    def __init__(self, names: Sequence[str], num_sequences: int, spare: int, device: torch.device):
        self.names, self.num_sequences = tuple(names), num_sequences
        self.rows = torch.zeros(1 + spare + 2 * len(names), num_sequences, dtype=torch.float64, device=device)
        self.kept = self.rows[0]
        """For the rules: 1 for a present sequence that they keep, else 0; unset where there are none."""
        self.summed, self._averaged = self.rows[1 + spare :].chunk(2)
        self.sums: Mapping[str, Tensor] = dict(zip(names, self.summed.unbind(), strict=True))
        self.means: Mapping[str, Tensor] = dict(zip(names, self._averaged.unbind(), strict=True))
        self.present = self.means["one"]
        """1 for a sequence with valid tokens, else 0."""

    def average(self) -> None:
        torch.div(self.summed, self.sums["one"].clamp(min=1), out=self._averaged)

"""Sums of many token quantities and of their products in one pass: a table of rows and its Gram matrix.

T tokens, K rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class MomentTable:
    """float64 rows [K, T] that callers fill in place; `sums` then gives any sum of y_i y_j over tokens.

    A quantity costs the kernel that writes its row, and nothing where it is a product of two: sums, squares and
    correlations are all entries of one matrix product. float64, because a spread of 1e-4 around 1 drowns in a
    float32 square's rounding.
    """

    def __init__(self, names: Sequence[str], num_tokens: int, device: torch.device):
        self._at = {name: i for i, name in enumerate(names)}
        self._rows = torch.empty(len(names), num_tokens, dtype=torch.float64, device=device)

    def row(self, name: str) -> Tensor:
        """The row [T], to write into or to read."""
        return self._rows[self._at[name]]

    def rows(self, first: str, last: str) -> Tensor:
        """The adjacent rows from `first` to `last`: one kernel fills or reduces all of them."""
        return self._rows[self._at[first] : self._at[last] + 1]

    def sums(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Sum over all T of the product of each pair of rows, float64 [pairs].

        Where one row of a pair is 0 outside the valid tokens, that is the sum over valid tokens.
        """
        gram = self._rows @ self._rows.T
        index = tuple(self._at[a] * len(self._at) + self._at[b] for a, b in pairs)
        return gram.view(-1).index_select(0, constant(index, torch.int64, gram.device))

    def extrema(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest entry of each row, [K] each; inf and 0 where there are no tokens."""
        if self._rows.shape[1] == 0:
            return self._rows.new_full((len(self._at),), torch.inf), self._rows.new_zeros(len(self._at))
        return self._rows.aminmax(dim=1)

    def has(self, name: str) -> bool:
        return name in self._at


@lru_cache(maxsize=256)
def constant(values: float | tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small constant tensor, copied to the device once: a copy a step would make the host wait."""
    return torch.tensor(values, dtype=dtype, device=device)

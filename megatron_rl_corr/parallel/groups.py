"""The process groups that a correction is sharded over, and its two collectives.

K columns, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.parallel.gather import all_gather_stacked


@dataclass(frozen=True)
class ParallelGroups:
    """Groups of one pipeline stage; None means this rank alone.

    Tensor-parallel ranks hold the same tokens, expert-parallel ranks lie in dp_cp: neither is summed over.
    """

    cp: ProcessGroup | None = None
    """Ranks that hold slices of the same sequences."""

    dp_cp: ProcessGroup | None = None
    """Ranks that together hold each token of the global batch once."""

    @property
    def cp_size(self) -> int:
        return 1 if self.cp is None else self.cp.size()

    @property
    def cp_rank(self) -> int:
        return 0 if self.cp is None else self.cp.rank()

    def all_gather_cp_partials(self, sums: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Per-sequence partials [K, S] made whole over cp: one collective for both reductions.

        A gather, not two all-reduces: cp is small, and all ranks add in the same order, so all decide alike.
        """
        if self.cp is None or self.cp.size() == 1:
            return sums, maxima
        gathered = all_gather_stacked(torch.cat([sums, maxima]), self.cp)
        return gathered[:, : len(sums)].sum(dim=0), gathered[:, len(sums):].amax(dim=0)

    def all_reduce_dp_cp(self, totals: Tensor) -> Tensor:
        """Sum of a small vector over the global batch: one collective."""
        if self.dp_cp is not None and self.dp_cp.size() > 1:
            dist.all_reduce(totals, group=self.dp_cp)
        return totals

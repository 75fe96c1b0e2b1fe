"""Which tokens the policy sampled: the last layer works on their rows alone.

T tokens, N of which were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampledRows:
    """The rows of sampled tokens, and of the others, where N is known on the host: nobody
    waits for the device.

    Example: mask [0, 1, 1, 0, 1]: order [1, 2, 4, 0, 3], host_counts [0, 0, 1, 2, 2, 3].
    """

    order: Tensor
    """[T] int64, on the device: the N sampled rows, then the others, both ascending."""
    host_counts: np.ndarray
    """[T + 1] int64: how many of the first t tokens are sampled."""

    @classmethod
    def of(cls, mask: np.ndarray, device: torch.device | str = "cpu") -> SampledRows:
        """The rows of a mask [T] that is on the host, as it is where a batch is made; `order`
        is on the device.
        """
        on_host = np.asarray(mask, dtype=bool)
        counts = np.zeros(len(on_host) + 1, dtype=np.int64)
        np.cumsum(on_host, out=counts[1:])
        order = np.concatenate([np.flatnonzero(on_host), np.flatnonzero(~on_host)])
        return cls(torch.from_numpy(order).to(device, non_blocking=True), counts)

    def __len__(self) -> int:
        """N."""
        return int(self.host_counts[-1])

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.host_counts) - 1

    @property
    def rows(self) -> Tensor:
        """[N] int64, the sampled rows."""
        return self.order[: len(self)]

    @property
    def others(self) -> Tensor:
        """[T - N] int64, the other rows."""
        return self.order[len(self) :]

    def column_major(self, height: int) -> SampledRows:
        """The same tokens where those of [height, T / height] lie column after column; no
        longer ascending.
        """
        if height == 1:
            return self
        width = self.num_tokens // height
        # Counts of a part would need the new order on the host; nobody cuts after this.
        return SampledRows(self.order % width * height + self.order // width, self.host_counts)

    def spread(self, values: Tensor) -> Tensor:
        """A value a sampled token [..., N] -> a value a token [..., T], 0 for the others."""
        out = values.new_zeros(*values.shape[:-1], self.num_tokens)
        return out.index_copy_(-1, self.rows, values)

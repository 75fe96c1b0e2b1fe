"""Padded rows of a few texts: as short as these are, because all other positions are computed for nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

RANK_TOKENS = 64
"""What a row's tokens on each rank are a multiple of, which all number types and kernels take."""


def keeps_shape(args: argparse.Namespace) -> bool:
    """True if Megatron keeps graphs or buffers of the shape of a run's microbatches, and
    takes no other one.
    """
    values = vars(args)  # not every release has every flag
    return values.get("cuda_graph_impl") not in (None, "none") or any(
        values.get(name) for name in ("enable_cuda_graph", "external_cuda_graph", "tp_comm_overlap")
    )


@dataclass(frozen=True)
class TextRows:
    """Texts of about the same length, in rows of one forward pass."""

    places: tuple[int, ...]
    """Which texts they are; the first ones again behind them, as a pass takes whole microbatches."""
    length: int
    """Tokens of a row."""
    micro_batch_size: int
    """Rows of a microbatch."""


@dataclass(frozen=True)
class RowShapes:
    """Which rows a run's model takes."""

    seq_length: int
    micro_batch_size: int
    multiple: int
    """A pass takes a multiple of so many microbatches."""
    unit: int
    """A row's tokens are a multiple of it; 0: only rows of seq_length, micro_batch_size a microbatch."""

    def rows(self, counts: Sequence[int]) -> list[TextRows]:
        """The texts in as few microbatches as hold no more tokens than one of the run's.

        Args:
            counts: ids of each text.
        """
        by_length: dict[int, list[int]] = {}
        for place, count in enumerate(counts):
            length = (
                min(-(-count // self.unit) * self.unit, self.seq_length) if self.unit else self.seq_length
            )
            by_length.setdefault(length, []).append(place)
        made = []
        for length, places in by_length.items():
            size = self.micro_batch_size
            if self.unit:
                size = min(max(size * self.seq_length // length, 1), -(-len(places) // self.multiple))
            whole = -(-len(places) // (size * self.multiple)) * size * self.multiple
            made.append(TextRows(tuple(places[row % len(places)] for row in range(whole)), length, size))
        return made

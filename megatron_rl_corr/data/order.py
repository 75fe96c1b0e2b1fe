"""The order in which rows are drawn: a function of the seed, the number of the draw and the
sources' sizes alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

SHARE_PERIOD = 1000
"""Weights are shares of so many draws in a row."""
WINDOW_BYTES = 1 << 26
"""Row groups are shuffled together up to this size, as their files give it."""
_OF_SHARES = 2**32 - 1
"""In the seed of the order of sources, where that of rows has the source's number."""


class SourceOrder:
    """One source's rows in an endless sequence of epochs; each epoch has every row once, in an
    order of its own.

    Where any row can be read alone, an epoch is a permutation of all rows. Where row groups are read as a
    whole, they are shuffled, put together in windows of at most WINDOW_BYTES, and the rows are shuffled
    within each window: so a window's groups are read once an epoch. With one window it is a permutation
    of all rows too.

    Args:
        size: rows.
        groups: (rows, bytes) of each row group; empty: any row is read alone.
        seed: in [0, 2**32).
        source: number of the source.
    """

    def __init__(self, size: int, groups: Sequence[tuple[int, int]], *, seed: int, source: int = 0):
        self.size = size
        self._groups = groups if sum(size for _, size in groups) > WINDOW_BYTES else []
        # A single file's order is that of earlier versions, so that their checkpoints go on in it.
        self._seed = [seed] if source == 0 else [seed, source]
        self._orders: dict[int, np.ndarray] = {}

    @property
    def layout(self) -> str:
        """What the order depends on beside size and seed: row groups that do not fit one window."""
        if not self._groups:
            return ""
        return f" in {len(self._groups)} row groups {zlib.crc32(repr(list(self._groups)).encode()):08x}"

    def row(self, draw: int) -> int:
        """The row of the source's draw of this number, from 0."""
        epoch, place = divmod(draw, self.size)
        if epoch not in self._orders:
            self._orders = dict(list(self._orders.items())[-1:])  # groups of two epochs may be under way
            self._orders[epoch] = self._order(epoch)
        return int(self._orders[epoch][place])

    def _order(self, epoch: int) -> np.ndarray:
        # RandomState because its stream is frozen (NEP 19): the order outlives an upgrade of numpy.
        random = np.random.RandomState([self._seed[0], epoch, *self._seed[1:]])
        dtype = np.uint32 if self.size < 2**32 else np.uint64
        if not self._groups:
            return random.permutation(self.size).astype(dtype)
        ends = np.cumsum([rows for rows, _ in self._groups])
        windows, window, held = [], [], 0
        for group in random.permutation(len(self._groups)):
            rows, size = self._groups[group]
            if window and held + size > WINDOW_BYTES:
                windows.append(random.permutation(np.concatenate(window)))
                window, held = [], 0
            window.append(np.arange(ends[group] - rows, ends[group], dtype=dtype))
            held += size
        return np.concatenate([*windows, random.permutation(np.concatenate(window))])


class MixedOrder:
    """The sequence of all sources: which row, of which of them, each number draws.

    Without weights every row comes once an epoch, so that a source comes as often as it has rows.
    With weights, of each SHARE_PERIOD numbers every source has its share, in a random order; it
    begins anew when its rows are used up, and so may have an epoch of its own behind it many times
    before another has its first.

    Example: sources of 30 and 10 rows. Without weights, numbers 0 to 39 are all rows; with weights 1 and 1,
    of numbers 0 to 999 each source has 500: the second has had each row 50 times then.

    Args:
        sizes: rows of each source.
        groups: as `SourceOrder`, of each source.
        seed: in [0, 2**32).
        weights: of each source, in any unit; empty: as many as it has rows.

    Raises:
        ValueError: a seed out of its range, another number of weights than of sources, or one that is no
            positive number or whose share is below one in SHARE_PERIOD.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[Sequence[tuple[int, int]]],
        *,
        seed: int,
        weights: Sequence[float] = (),
    ):
        if not 0 <= seed < 2**32:
            raise ValueError(f"the prompt seed must be in [0, 2**32), got {seed}")
        self.seed, self.shares = seed, _shares(weights, len(sizes)) if len(weights) else []
        self.sources = [
            SourceOrder(size, parts, seed=seed, source=number)
            for number, (size, parts) in enumerate(zip(sizes, groups, strict=True))
        ]
        self._firsts = np.cumsum([0, *sizes])
        self._counts = self.shares or list(sizes)
        self._period = sum(self._counts)
        self._mixed: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def identity(self) -> str:
        """What the order depends on, beside the seed and the count of all rows; "" for one source
        read row by row.
        """
        if len(self.sources) == 1:
            return self.sources[0].layout
        rows = " + ".join(f"{source.size}{source.layout}" for source in self.sources)
        return rows + (f", shares {':'.join(map(str, self.shares))}" if self.shares else "")

    @property
    def ends(self) -> list[int]:
        """The first and the last row of each source."""
        return sorted({int(row) for row in (*self._firsts[:-1], *(self._firsts[1:] - 1))})

    def row(self, number: int) -> int:
        """The row that this number draws, counted over all sources."""
        if len(self.sources) == 1:
            return self.sources[0].row(number)
        period, place = divmod(number, self._period)
        if period not in self._mixed:
            self._mixed = dict(list(self._mixed.items())[-1:])
            self._mixed[period] = self._mix(period)
        of_number, drawn_before = self._mixed[period]
        source = int(of_number[place])
        draw = period * self._counts[source] + int(drawn_before[place])
        return int(self._firsts[source]) + self.sources[source].row(draw)

    def _mix(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """For each number of a period its source, and how many before it in the period are of the same."""
        numbers = np.repeat(np.arange(len(self._counts), dtype=np.uint16), self._counts)
        of_number = np.random.RandomState([self.seed, period, _OF_SHARES]).permutation(numbers)
        drawn_before = np.empty(self._period, np.uint32)
        for source, count in enumerate(self._counts):
            drawn_before[of_number == source] = np.arange(count, dtype=np.uint32)
        return of_number, drawn_before


def _shares(weights: Sequence[float], sources: int) -> list[int]:
    """Draws of each source in SHARE_PERIOD draws: its part of the weights, rounded, so that they add up.

    Example: weights 1 and 2 are 333 and 667 of 1000; what rounding down leaves goes to the
    largest remainders.
    """
    if len(weights) != sources:
        raise ValueError(
            f"`prompts_weights`: {len(weights)} weights for {sources} of `prompts`; give one for each"
        )
    exact = np.array(weights, np.float64) / sum(weights) * SHARE_PERIOD
    shares = np.floor(exact).astype(int)
    for source in np.argsort(shares - exact, kind="stable")[: SHARE_PERIOD - shares.sum()]:
        shares[source] += 1
    if shares.min() < 1:
        raise ValueError(
            f"`prompts_weights` {weights[int(shares.argmin())]:g} is less than 1 in {SHARE_PERIOD} of all; "
            "leave its source out, or give a larger weight"
        )
    return shares.tolist()

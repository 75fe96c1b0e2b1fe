"""Which groups a replica draws, and what a later run must know to go on: R replicas share one endless sequence.

Group n is the n-th prompt of `PromptDataset.at` since the run's beginning. Replica r of R draws first + r,
first + r + R, ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Drawn:
    """Where a replica stands: of its numbers none from `base` + rank on was drawn, and those of `open` must be trained.

    open holds what was drawn and is not trained yet, and what an earlier run left and was not drawn again.
    """

    base: int
    open: tuple[int, ...]


@dataclass(frozen=True)
class Cursor:
    """Where all replicas stand: no number from `next` on was drawn; of those before, `again` are not trained.

    Example: three replicas have drawn 0, 3 and 1, 4, 7 (the group 1 was replaced) and 2, 5, and 4 is being sampled:
    Cursor(next=9, again=(4, 6, 8)), whose 6 and 8 the first and the last replica have still to draw.
    """

    next: int
    again: tuple[int, ...] = ()

    @classmethod
    def merged(cls, replicas: Sequence[Drawn]) -> Cursor:
        """Of each replica, by rank."""
        size, top = len(replicas), max(replica.base for replica in replicas)
        again = {number for replica in replicas for number in replica.open}
        for rank, replica in enumerate(replicas):
            again.update(range(replica.base + rank, top + rank, size))
        return cls(top, tuple(sorted(again)))


class GroupNumbers:
    """The numbers that replica `rank` of `size` draws, in order: its share of cursor.again, then those from next on."""

    def __init__(self, cursor: Cursor, rank: int, size: int):
        self._again = deque(cursor.again[rank::size])
        self._base, self._rank, self._size = cursor.next, rank, size

    def draw(self) -> int:
        if self._again:
            return self._again.popleft()
        self._base += self._size
        return self._base - self._size + self._rank

    def drawn(self, running: Iterable[int]) -> Drawn:
        """Where the replica stands, while `running` were drawn and are not trained."""
        return Drawn(self._base, tuple(sorted([*self._again, *running])))

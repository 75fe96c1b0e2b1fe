"""What was made of a list's items, for the next list: a request brings the last one's conversation again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Again:
    """Makes something of each item, but where the list before had the same item at that place.

    Args:
        same: (an item of the list before, one of this) -> what was made of the first serves for the second.
    """

    def __init__(self, same: Callable[[Any, Any], bool]):
        self._same = same
        self._kept: list[tuple[Any, Any]] = []

    def made(self, items: Sequence[Any], make: Callable[[Any, int], Any]) -> list[Any]:
        """make(item, index) of each, or what it gave before. Where make raises, the list before stays."""
        kept, same = self._kept, self._same
        self._kept = [
            kept[at] if at < len(kept) and same(kept[at][0], item) else (item, make(item, at))
            for at, item in enumerate(items)
        ]
        return [value for _, value in self._kept]

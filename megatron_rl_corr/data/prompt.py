"""A prompt. A reward worker imports it, so it imports little."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One row of the data set."""

    index: int
    """Row number in the data, from 0, not counting blank lines; with several sources, one behind another."""
    input_ids: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row, for the reward function; where its prompt is ids, without them."""
    text: str | None = None
    """The prompt as text, where the row had text or messages; None: the row had ids."""
    label: Any = None
    """What the reward compares with, where the row has it."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The row's own settings, which `data.row_sampling` has checked."""

    def copied(self) -> Prompt:
        """A copy for the user's code, which may change its lists and dicts: other samples use
        the row as well.
        """
        return replace(
            self, input_ids=list(self.input_ids), metadata=_copied(self.metadata), label=_copied(self.label)
        )


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value

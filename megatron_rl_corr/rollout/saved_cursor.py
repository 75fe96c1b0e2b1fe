"""What a checkpoint keeps of the prompts, so that a later run draws none twice and loses none."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.rollout.failures import FailedPrompts
from megatron_rl_corr.rollout.group_numbers import Cursor


@dataclass(frozen=True)
class SavedCursor:
    """Where all replicas stood, of which prompts, and which of these had failed."""

    seed: int
    """Of the order of the prompts."""
    prompts: int
    """Rows of the data set."""
    next: int
    """As `Cursor`'s."""
    again: tuple[int, ...]
    failed: dict[int, int] = field(default_factory=dict)
    """Row of the data set -> dropped groups, as `FailedPrompts` counts them."""
    left_out: dict[int, int] = field(default_factory=dict)
    """Row -> the last epoch without it."""

    @classmethod
    def of(cls, cursor: Cursor, prompts: PromptDataset, failed: FailedPrompts) -> SavedCursor:
        """Now."""
        return cls(prompts.seed, len(prompts), cursor.next, cursor.again, dict(failed.counts), dict(failed.left_out))

    @classmethod
    def parse(cls, text: str) -> SavedCursor:
        """ValueError for what is no such file."""
        try:
            values = json.loads(text)
            again = tuple(int(number) for number in values.pop("again"))
            maps = {name: {int(row): int(n) for row, n in values.pop(name).items()} for name in ("failed", "left_out")}
            return cls(again=again, **maps, **{name: int(value) for name, value in values.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no data cursor ({type(error).__name__}: {error})") from None

    def cursor_of(self, prompts: PromptDataset) -> Cursor:
        """Where to go on. With other prompts what was under way means something else, and is not asked for again."""
        if self._is_of(prompts):
            return Cursor(self.next, self.again)
        return Cursor(self.next)

    def failed_of(self, prompts: PromptDataset) -> FailedPrompts:
        """The prompts that failed so far; none of other prompts."""
        if self._is_of(prompts):
            return FailedPrompts(len(prompts), self.failed, self.left_out)
        return FailedPrompts(len(prompts))

    def _is_of(self, prompts: PromptDataset) -> bool:
        return (self.seed, self.prompts) == (prompts.seed, len(prompts))

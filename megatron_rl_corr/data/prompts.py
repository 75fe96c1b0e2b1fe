"""The endless sequence of prompts that a run draws: it depends on the data and the seed alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl_corr.data.order import MixedOrder
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.rows import BadRow, LongPrompt, UnreadLabel
from megatron_rl_corr.data.skipped import SkippedRows

KEPT_PROMPTS = 512
"""Prompts that are kept after they were made: one that is drawn is asked for again soon."""


class PromptDataset:
    """Prompts in an endless sequence of shuffled epochs.

    Args:
        rows: the prompts of the data, in their order; a list, or what makes each when it is asked for, and
            then raises BadRow for one that can't be made.
        seed: of the order, in [0, 2**32).
        order: of the draws; None: that of one source.
        digest: what tells the data from others with as many rows, also from the same after an
            edit; "": unknown.
        warn: takes a line about a row that is left out.
        labels: the label of a row, without making its prompt; None: `rows` have them.
        check: raises ChangedFile where a row's file is no longer as it was, for a prompt that is kept.

    Raises:
        ValueError: no prompts, or a seed out of its range.
    """

    def __init__(
        self,
        rows: Sequence[Prompt],
        *,
        seed: int = 0,
        order: MixedOrder | None = None,
        digest: str = "",
        warn: Callable[[str], None] | None = None,
        labels: Callable[[int], Any] | None = None,
        check: Callable[[int], None] | None = None,
    ):
        if not len(rows):
            raise ValueError("a prompt data set needs at least one prompt")
        self.rows = rows
        """Prompts by their index."""
        self.seed, self.digest = seed, digest
        self._order = MixedOrder([len(rows)], [[]], seed=seed) if order is None else order
        self._labels, self._check = labels, check
        self._unread: Mapping[int, str] = {}
        self._kept: OrderedDict[int, Prompt] = OrderedDict()
        self._lock = threading.Lock()
        """Groups are drawn on the event loop; the trainer's thread asks for the prompts of a
        batch that is done.
        """
        self.skipped = SkippedRows(len(rows), warn)
        """Rows that were left out when they were drawn."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def identity(self) -> str:
        """What the order depends on beside seed and rows, such as the sources' sizes; "" for
        one plain source.
        """
        return self._order.identity

    @property
    def ends(self) -> list[int]:
        """The first and the last row of each source."""
        return self._order.ends

    def index_at(self, number: int) -> int:
        """The row at this place of the sequence, from 0."""
        with self._lock:
            return self._order.row(number)

    def label(self, index: int) -> Any:
        """The label of a row; its prompt is not made, where the data can do without. Raises
        BadRow, ChangedFile.
        """
        return self.rows[index].label if self._labels is None else self._labels(index)

    def leave_out(self, problems: Mapping[int, str]) -> None:
        """Leave rows out whenever they are drawn.

        Args:
            problems: why their label can't be read, by the row's index.
        """
        self._unread = problems

    def at(self, number: int) -> Prompt:
        """The prompt at this place of the sequence, from 0: the same for the same data, seed and weights.

        Raises:
            BadRow: its row has no prompt that can be used, or is one of `leave_out`'s.
            ChangedFile: a file of the data is not as it was.
            TooManyBadRows: `can_be_drawn` has found nearly all rows bad.
        """
        self.skipped.check()
        with self._lock:
            index = self._order.row(number)
            if index in self._unread:
                raise UnreadLabel(f"row {index}: {self._unread[index]}")
            if index in self._kept:
                if self._check is not None:
                    self._check(index)
                self._kept.move_to_end(index)
                return self._kept[index]
            prompt = self._kept[index] = self.rows[index]
            if len(self._kept) > KEPT_PROMPTS:
                self._kept.popitem(last=False)
            return prompt

    def can_be_drawn(self, number: int) -> bool:
        """True if the row of this number has a prompt that can be used; one that has not is
        counted and named.

        True also where the run is to end, for nearly all rows are bad or a file was changed:
        `at` then says why.
        """
        try:
            self.at(number)
        except LongPrompt as error:
            return not self.skipped.add(self.index_at(number), error, "long")
        except UnreadLabel as error:
            return not self.skipped.add(self.index_at(number), error, "label")
        except BadRow as error:
            return not self.skipped.add(self.index_at(number), error, "bad")
        except (OSError, RuntimeError, ValueError):
            return True
        self.skipped.drawn()
        return True

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Prompts [step * n, step * n + n) of the sequence: the same for the same data, seed, step and n.

        No state is kept between calls, so a run that resumes at a step gets the prompts that it would have
        had. Within an epoch every prompt comes once; a batch may run over into the next epoch.

        Raises:
            ValueError: step below 0, or n below 1.
        """
        if step < 0 or n < 1:
            raise ValueError(f"step must be at least 0 and n at least 1, got {step} and {n}")
        return [self.at(number) for number in range(step * n, step * n + n)]

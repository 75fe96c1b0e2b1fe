"""The prompts of the user's files: each row is read and tokenised when it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_rl_corr.data.order import MixedOrder
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import Rows
from megatron_rl_corr.data.sources import open_rows


class PromptRows(Sequence):
    """The prompts of several sources, one behind another; `[index]` raises BadRow for a row that has none.

    Args:
        sources: the rows of each.
        form: how a row becomes a prompt.
    """

    def __init__(self, sources: Sequence[Rows], form: PromptFormat):
        self._sources, self._format = list(sources), form
        self._ends = np.cumsum([len(source) for source in self._sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Prompt:
        source, row = self._place(index)
        how = {"fills_nulls": source.fills_nulls, "left_out": source.left_out}
        return self._format.prompt(source.read(row), index, source.where(row), **how)

    def label(self, index: int) -> Any:
        """The label of a row, of which no prompt is made. Raises BadRow, ChangedFile."""
        source, row = self._place(index)
        return self._format.label(source.read(row), source.where(row))

    def check(self, index: int) -> None:
        """Raises ChangedFile where the file of a row is no longer as it was."""
        source, row = self._place(index)
        source.check(row)

    def _place(self, index: int) -> tuple[Rows, int]:
        """The source of a row, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        source = self._sources[number]
        return source, index - int(self._ends[number]) + len(source)


def open_prompts(
    paths: Sequence[str],
    form: PromptFormat,
    *,
    seed: int = 0,
    weights: Sequence[float] = (),
    warn: Callable[[str], None] | None = None,
) -> PromptDataset:
    """The data set of some files and folders; no row is made a prompt yet.

    Args:
        paths: files of JSON lines or Parquet, folders of Parquet or of `datasets`.
        form: how a row becomes a prompt.
        seed: of the order, in [0, 2**32).
        weights: how often each path is drawn, see `MixedOrder`; empty: every row once an epoch.
        warn: takes a line about columns, and later rows, that are left out.

    Raises:
        ValueError: a path is none of these, or has no rows; the seed or a weight is out of its range.
    """
    sources = [open_rows(path) for path in paths]
    for source in sources:
        for note in source.notes if warn is not None else []:
            warn(note)
    order = MixedOrder(
        [len(source) for source in sources], [source.groups for source in sources], seed=seed, weights=weights
    )
    digest = " ".join(source.digest() for source in sources)
    rows = PromptRows(sources, form)
    return PromptDataset(
        rows, seed=seed, order=order, digest=digest, warn=warn, labels=rows.label, check=rows.check
    )

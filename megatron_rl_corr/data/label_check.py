"""Looks at the labels of the data before the first sample: which of them a built-in reward can't read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_rl_corr.data.labels import math_texts
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import BadRow

LABELS_READ = 50_000
"""Rows whose labels are looked at; of larger data those that are drawn first."""
AT_ONCE = 32
"""Labels that a worker is asked for at once."""
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?", re.ASCII)


async def unread_labels(
    prompts: PromptDataset, problems_of: Callable[[Sequence[list[str]]], Awaitable[list[str | None]]]
) -> tuple[int, dict[int, tuple[Any, str]]]:
    """Read the labels of all rows, or of the LABELS_READ that are drawn first.

    Args:
        prompts: the data. Rows without a prompt, or the key of the label, are not this function's to judge.
        problems_of: why each of some labels can't be read, None where it can; a label is one
            or several texts.

    Returns:
        (rows that were looked at, {row: (its label, why it can't be read)}).
    """
    chosen = range(len(prompts))
    if len(prompts) > LABELS_READ:
        chosen = sorted({prompts.index_at(number) for number in range(LABELS_READ)})
    found: dict[int, tuple[Any, str]] = {}
    rows: dict[tuple[str, ...], list[int]] = {}
    labels, read = {}, 0
    for row in chosen:
        try:
            label = prompts.label(row)
        except BadRow:  # counted and named when it is drawn
            continue
        read, labels[row] = read + 1, label
        try:
            texts = math_texts(label, row)
        except ValueError as error:
            found[row] = (label, str(error))
            continue
        if not all(_NUMBER.fullmatch(text) for text in texts):
            rows.setdefault(tuple(texts), []).append(row)
    different = list(rows)
    chunks = [different[start : start + AT_ONCE] for start in range(0, len(different), AT_ONCE)]
    answers = await asyncio.gather(*[problems_of([list(texts) for texts in chunk]) for chunk in chunks])
    for chunk, problems in zip(chunks, answers, strict=True):
        for texts, problem in zip(chunk, problems, strict=True):
            found |= {row: (labels[row], problem) for row in rows[texts] if problem is not None}
    return read, dict(sorted(found.items()))

"""Reads prompts from JSON lines and deals them out in batches that depend only on the seed and the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson


@dataclass(frozen=True)
class Prompt:
    """One row of the data set."""

    index: int
    """Row number in the file, from 0, not counting blank lines."""
    input_ids: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other keys, for the reward function; with "prompt", the text, where the row had text."""


class PromptDataset:
    """Prompts in an endless sequence of shuffled epochs."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0):
        if not prompts:
            raise ValueError("a prompt data set needs at least one prompt")
        if not 0 <= seed < 2**32:
            raise ValueError(f"the prompt seed must be in [0, 2**32), got {seed}")
        self.prompts = list(prompts)
        self.seed = seed

    @classmethod
    def from_jsonl(
        cls, path: str | Path, tokenizer_encode: Callable[[str], list[int]] | None = None, *, seed: int = 0
    ) -> "PromptDataset":
        """Rows are {"input_ids": [...]} or {"prompt": "text"}, with any further keys.

        Text is tokenised here, once, by tokenizer_encode(text). Raises ValueError naming file and line.
        """
        prompts = []
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    prompts.append(_parse_row(line, len(prompts), tokenizer_encode))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
        if not prompts:
            raise ValueError(f"{path}: no prompts in it; expected one JSON object a line")
        return cls(prompts, seed=seed)

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Prompts [step * n, step * n + n) of the sequence: the same for the same file, seed, step and n.

        Nothing is remembered between calls, so a run that resumes at a step sees the prompts it would have
        seen. Within an epoch every prompt comes once; a batch may run over into the next epoch.
        """
        if step < 0 or n < 1:
            raise ValueError(f"step must be at least 0 and n at least 1, got {step} and {n}")
        chosen: list[Prompt] = []
        while len(chosen) < n:
            epoch, offset = divmod(step * n + len(chosen), len(self.prompts))
            order = self._order(epoch)[offset : offset + n - len(chosen)]
            chosen += [self.prompts[row] for row in order]
        return chosen

    def _order(self, epoch: int) -> np.ndarray:
        # RandomState because its stream is frozen (NEP 19): the order outlives an upgrade of numpy.
        return np.random.RandomState([self.seed, epoch]).permutation(len(self.prompts))


def _parse_row(line: bytes, index: int, tokenizer_encode: Callable[[str], list[int]] | None) -> Prompt:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    if ("input_ids" in row) == ("prompt" in row):
        raise ValueError(f'expected one of "input_ids" and "prompt", got the keys {sorted(row)}')
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise ValueError(f'"prompt" must be text, got {type(row["prompt"]).__name__}')
        if tokenizer_encode is None:
            raise ValueError('"prompt" is text and there is no tokenizer; give one, or rows with "input_ids"')
        return Prompt(index, _checked(tokenizer_encode(row["prompt"]), "the tokenizer's output"), row)
    return Prompt(index, _checked(row.pop("input_ids"), '"input_ids"'), row)


def _checked(ids: Any, what: str) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{what} must be a non-empty list of integers of at least 0, got {str(ids)[:100]}")
    return ids

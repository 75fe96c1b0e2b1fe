"""Reads prompts from JSON lines and deals them out in batches that depend only on the seed and the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    text: str | None = None
    """The prompt as text, where the row had text or messages; None: the row had ids."""
    label: Any = None
    """What the reward compares with, where the row has it."""

    def copied(self) -> "Prompt":
        """A copy for the user's code, which may change its lists and dicts: other samples use the row as well."""
        return replace(self, input_ids=list(self.input_ids), metadata=_copied(self.metadata), label=_copied(self.label))


class PromptDataset:
    """Prompts in an endless sequence of shuffled epochs.

    Args:
        prompts: the rows of the data set.
        seed: of the order, in [0, 2**32).

    Raises:
        ValueError: no prompts, or a seed out of its range.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0):
        if not prompts:
            raise ValueError("a prompt data set needs at least one prompt")
        if not 0 <= seed < 2**32:
            raise ValueError(f"the prompt seed must be in [0, 2**32), got {seed}")
        self.prompts = list(prompts)
        self.seed = seed
        self._orders: dict[int, np.ndarray] = {}

    @classmethod
    def from_jsonl(
        cls, path: str | Path, tokenizer_encode: Callable[[str], list[int]] | None = None, *, seed: int = 0
    ) -> "PromptDataset":
        """The data set in a file of JSON lines: {"input_ids": [...]} or {"prompt": "text"}, with any further keys.

        Args:
            path: of the file; blank lines are skipped.
            tokenizer_encode: tokenizer_encode(text) -> token ids, called once for each row with text; None: rows have
                no text.
            seed: of the order, in [0, 2**32).

        Raises:
            ValueError: a row is wrong (the message names file and line), the file has none, or the seed is out of its
                range.
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

    def at(self, number: int) -> Prompt:
        """The prompt at this place of the sequence, from 0: the same for the same file and seed."""
        epoch, place = divmod(number, len(self.prompts))
        return self.prompts[self._order(epoch)[place]]

    def batch(self, step: int, n: int) -> list[Prompt]:
        """Prompts [step * n, step * n + n) of the sequence: the same for the same file, seed, step and n.

        No state is kept between calls, so a run that resumes at a step gets the prompts that it would have had. Within
        an epoch every prompt comes once; a batch may run over into the next epoch.

        Raises:
            ValueError: step below 0, or n below 1.
        """
        if step < 0 or n < 1:
            raise ValueError(f"step must be at least 0 and n at least 1, got {step} and {n}")
        return [self.at(number) for number in range(step * n, step * n + n)]

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders = dict(list(self._orders.items())[-1:])  # groups of two epochs may be under way
            self._orders[epoch] = self._permutation(epoch)
        return self._orders[epoch]

    def _permutation(self, epoch: int) -> np.ndarray:
        # RandomState because its stream is frozen (NEP 19): the order outlives an upgrade of numpy.
        return np.random.RandomState([self.seed, epoch]).permutation(len(self.prompts))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


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
        ids = _checked(tokenizer_encode(row["prompt"]), "the tokenizer's output")
        return Prompt(index, ids, row, row["prompt"], row.get("label"))
    return Prompt(index, _checked(row.pop("input_ids"), '"input_ids"'), row, label=row.get("label"))


def _checked(ids: Any, what: str) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{what} must be a non-empty list of integers of at least 0, got {str(ids)[:100]}")
    return ids

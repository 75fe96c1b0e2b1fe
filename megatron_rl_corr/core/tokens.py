"""The inputs of a correction, token by token.

T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """What is known of each token, [T] each; None where nothing looks at it."""

    train: Tensor
    """float32 log-probs under pi_train."""
    rollout: Tensor
    """float32, under pi_rollout."""
    difference: Tensor
    """float32 D = log pi_train - log pi_rollout, subtracted before masking: anything outside the valid tokens."""
    size: Tensor
    """float32 |D|."""
    in_mask: Tensor
    """bool: in the loss mask."""
    valid: Tensor
    """bool: in the loss mask, and D is finite."""
    seq_ids: Tensor
    """int64."""
    unit_ids: Tensor
    """int64: the sequence, or its turn where something is decided by turns."""
    turn_ids: Tensor | None = None
    advantages: Tensor | None = None
    routing: Tensor | None = None

    def spans(self, chunk_tokens: int) -> Iterator[slice]:
        """Adjacent slices of at most chunk_tokens that cover all T; one, empty, where there are none."""
        for start in range(0, max(len(self.train), 1), chunk_tokens):
            yield slice(start, start + chunk_tokens)

    def part(self, rows: slice) -> Tokens:
        """The tokens of a slice, as views."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: values[rows] for name, values in given.items() if values is not None})

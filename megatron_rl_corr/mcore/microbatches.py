"""The microbatches of padded rows.

N rows of L positions on this rank, b = --micro-batch-size of them a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_rl_corr.mcore.batch import RolloutBatch
from megatron_rl_corr.mcore.microbatch import LossInputs, Microbatch


def microbatches(
    batch: RolloutBatch, size: int, loss_inputs: LossInputs | None = None
) -> Iterator[Microbatch]:
    """Rows in order, `size` at a time; N must be a multiple of it."""
    rows, length = batch.tokens.shape
    positions, padding, sampled = batch.position_ids.expand(size, length), batch.padding, batch.sampled_rows
    places = torch.arange(rows * length, device=batch.tokens.device).view(rows, length)
    for start in range(0, rows, size):
        part, first, last = slice(start, start + size), start * length, (start + size) * length
        yield Microbatch(
            start // size,
            batch.tokens[part],
            batch.labels[part],
            positions,
            None if loss_inputs is None else loss_inputs.tokens(first, last),
            padding[part],
            None if batch.sampling_masks is None else batch.sampling_masks.tokens(first, last),
            sampled.tokens(first, last),
            places[part].t(),
        )

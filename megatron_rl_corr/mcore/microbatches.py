"""The microbatches of padded rows: the model's inputs and the loss's of some rows.

N rows of L positions on this rank, b = --micro-batch-size of them a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks
from megatron_rl_corr.mcore.batch import RolloutBatch

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.loss import LossInputs


@dataclass(frozen=True)
class Microbatch:
    """b rows: the model's inputs and, in training on the last stage, the loss's."""

    index: int
    """Its number in the step."""
    tokens: Tensor
    """[b, L] int64."""
    labels: Tensor
    """[b, L] int64."""
    position_ids: Tensor
    """[b, L] int64."""
    loss_inputs: LossInputs | None = None
    """The loss inputs of the b * L tokens, flat."""
    padding: Tensor | None = None
    """[b, L] bool: no token, as in `RolloutBatch.padding`."""
    sampling_masks: SamplingMasks | None = None
    """The ids that each of the b * L labels was drawn from."""
    sampled: SampledRows | None = None
    """Which of the b * L labels were sampled; None: all get a log-prob."""

    places: Tensor | None = None
    """[L, b] int64: each token's place among the batch's T; T in a pack's padding. As routers see
    tokens, L first.
    """
    packed_seq_params: PackedSeqParams | None = None
    """Where each sequence begins, in a pack of several; None: sequences are rows."""

    @property
    def num_sequences(self) -> int:
        """b."""
        return len(self.tokens)

    @property
    def counted(self) -> int:
        """What it counts in the sum that --calculate-per-token-loss divides the gradient by: its
        b * L positions.
        """
        return self.tokens.numel()

    @property
    def seq_ids(self) -> Tensor:
        """[b * L] int64: the sequence of each token, from 0."""
        return row_ids(*self.tokens.shape, self.tokens.device)


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

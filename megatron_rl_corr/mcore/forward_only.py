"""Runs microbatches through the model by Megatron's forward-only schedule, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_corr.mcore.batch import RolloutBatch
from megatron_rl_corr.mcore.microbatches import microbatches
from megatron_rl_corr.mcore.packed_batch import PackedBatch
from megatron_rl_corr.mcore.packs import Packs


@torch.no_grad()
def run_forward_only(
    forward_step: Callable,
    model: list,
    batch: RolloutBatch | PackedBatch,
    packs: Packs | None = None,
    *,
    micro_batch_size: int,
    seq_length: int,
    count: int | None = None,
) -> list:
    """Megatron's forward-only schedule; what forward_step's loss made of each microbatch, on the
    last stage, else [].

    The model is in evaluation mode meanwhile (no dropout), and back in training mode after.

    Args:
        forward_step: of `make_forward_step`.
        model: this rank's chunks.
        batch: this rank's tokens.
        packs: the microbatches of a packed batch, in place of rows of micro_batch_size; None: rows.
        micro_batch_size: rows of a microbatch.
        seq_length: tokens of a whole row.
        count: the batch's first microbatches, so many; None: all.
    """
    if count is None:
        count = batch.num_sequences // micro_batch_size if packs is None else packs.count
    iterators = [
        microbatches(batch, micro_batch_size) if packs is None else packs.microbatches() for _ in model
    ]
    for chunk in model:
        chunk.eval()
    try:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=count,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        for chunk in model:
            chunk.train()

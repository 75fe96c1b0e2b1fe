"""Runs microbatches through the model by Megatron's forward-only schedule, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_corr.mcore.batch.packs import Packs


@torch.no_grad()
def run_forward_only(forward_step: Callable, model: list, packs: Packs, *, count: int | None = None) -> list:
    """Megatron's forward-only schedule; what forward_step's loss made of each microbatch, on the
    last stage, else [].

    The model is in evaluation mode meanwhile (no dropout), and back in training mode after.

    Args:
        forward_step: of `make_forward_step`.
        model: this rank's chunks.
        packs: the microbatches.
        count: the first so many of them; None: all.
    """
    iterators = [packs.microbatches() for _ in model]
    for chunk in model:
        chunk.eval()
    try:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=packs.count if count is None else count,
            seq_length=packs.seq_length,
            micro_batch_size=packs.height,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        for chunk in model:
            chunk.train()

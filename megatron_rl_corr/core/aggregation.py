"""How token losses become one number: a coefficient for each token, so that the loss is their weighted sum.

T tokens (this context-parallel rank's), S sequences (this replica's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


@torch.no_grad()
def token_coefficients(
    correction: Correction, seq_ids: Tensor, num_sequences: int, config: RolloutCorrectionConfig,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """c [T] float32 such that the sum of c * loss over the global batch is config.aggregation of the losses.

    With n the tokens of a sequence, N those of the global batch, G its sequences of n > 0, and L the constant
    loss_scale_length: token-mean 1 / N; seq-mean-token-mean 1 / (n G); seq-mean-token-sum 1 / G;
    seq-mean-token-sum-norm 1 / (L G). n, N and G count valid tokens or kept ones (loss_denominator); c is 0 outside
    correction.mask. Means over sequences take one collective over cp and one over dp_cp. Sources: DAPO,
    arXiv:2503.14476 (token mean); Dr.GRPO, arXiv:2503.20783 (constant length).
    """
    kind = config.aggregation
    if kind == "token-mean":
        share = correction.denominator(config.loss_denominator).reciprocal().float()
        return torch.where(correction.mask, share, 0.0)
    counted = correction.valid if config.loss_denominator == "valid" else correction.mask
    lengths = counted.new_zeros(1, num_sequences, dtype=torch.float64).index_add_(1, seq_ids, counted.double()[None])
    if groups is not None:
        lengths, _ = groups.all_gather_cp_partials(lengths, lengths.new_empty(0, num_sequences))
    sequences = (lengths > 0).sum(dtype=torch.float64)
    if groups is not None:
        # Every cp rank holds whole sequences by now: only their owner counts them.
        sequences = groups.all_reduce_dp_cp(sequences if groups.cp_rank == 0 else torch.zeros_like(sequences))
    sequences = sequences.clamp(min=1)
    if kind == "seq-mean-token-mean":
        per_sequence = 1.0 / (lengths[0].clamp(min=1) * sequences)
        share = per_sequence.float().index_select(0, seq_ids)
    elif kind == "seq-mean-token-sum":
        share = sequences.reciprocal().float()
    else:
        share = (sequences * config.loss_scale_length).reciprocal().float()
    return torch.where(correction.mask, share, 0.0)

"""How token losses become one number: a coefficient for each token, so that the loss is their weighted sum.

T tokens (this context-parallel rank's), S sequences (this replica's).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.ratio import inside


@torch.no_grad()
def token_coefficients(correction: Correction, seq_ids: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """c [T] float32 such that the sum of c * loss over the global batch is config.aggregation of the losses.

    With n the tokens of a sequence (of its episode, where the correction's lengths are of episodes), N those
    of the global batch, G its sequences (episodes) of n > 0, and L the constant loss_scale_length: token-mean
    1 / N; seq-mean-token-mean 1 / (n G); seq-mean-token-sum 1 / G; seq-mean-token-sum-norm 1 / (L G). n, N
    and G count valid tokens or kept ones (loss_denominator); c is 0 outside correction.mask. The correction
    knows whole sequences, so no collective is needed.

    Sources: DAPO, arXiv:2503.14476 (token mean); Dr.GRPO, arXiv:2503.20783 (constant length).

    Args:
        correction: of these T tokens, with the lengths of their sequences.
        seq_ids: [T] int64 in [0, S), as the correction was computed with.
        config: aggregation, loss_denominator, loss_scale_length.

    Raises:
        ValueError: the correction's lengths are of another loss_denominator.
    """
    kind = config.aggregation
    if kind == "token-mean":
        share = correction.denominator(config.loss_denominator).reciprocal()
        return inside(correction.mask, share)
    lengths = correction.lengths
    if lengths.kind != config.loss_denominator:
        raise ValueError(
            f"`loss_denominator` {config.loss_denominator} with `loss_aggregation` {kind}: the "
            f"correction counted {lengths.kind} tokens; make it with the loss's own settings"
        )
    sequences = lengths.sequences.clamp(min=1)
    if kind == "seq-mean-token-mean":
        per_sequence = 1.0 / (lengths.tokens.clamp(min=1) * sequences)
        share = per_sequence.index_select(0, seq_ids)
    elif kind == "seq-mean-token-sum":
        share = sequences.reciprocal()
    else:
        share = (sequences * config.loss_scale_length).reciprocal()
    return inside(correction.mask, share)

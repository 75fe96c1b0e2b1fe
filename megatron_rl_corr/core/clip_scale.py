"""SAT's scale of PPO's clip: how near to 1 the bound of a token's ratio moves, for its mismatch.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.ratios import LOG_CLAMP, TokenRatios
from megatron_rl_corr.core.segments import constant


def distances(ratios: TokenRatios) -> Tensor:
    """|D| of each token, at most 20, so that no absurd one makes the mean: float64 [T]."""
    return ratios.log_ratio.abs().clamp_(max=LOG_CLAMP)


def sat_scale(ratios: TokenRatios, tail: float, mean: Tensor) -> Tensor:
    """kappa = min(1, tail mean / |D|): [T] float32 in [0, 1], 1 where |D| is at most tail x mean.

    Public text says that the mismatch is the size of the detached log-ratio of the sampled token, that the
    tail is one of the batch, and that a kernel of it scales. Which tail and which kernel it leaves open;
    these are the simplest: the tail begins at a multiple of the batch's mean, and in it |D| kappa is
    constant. So kappa has no step, is unchanged by a factor of all D, and is 1 where the policies agree.

    Source: SAT, arXiv:2607.18722 (its abstract).

    Args:
        ratios: of the tokens.
        tail: where the tail begins, in means.
        mean: of `distances` over the valid tokens of the global batch, float64 scalar.
    """
    sizes, begin = distances(ratios), tail * mean
    one = constant(1.0, torch.float64, sizes.device)
    # Where |D| and the mean are 0 the quotient is NaN, and not selected.
    return torch.where(sizes > begin, begin / sizes, one).float()

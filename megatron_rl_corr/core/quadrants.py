"""Whether an update widens the mismatch: tokens and gradient by the signs of A and D.

T tokens. The policy loss moves log pi_theta of a token with the sign of A. With that of D = log pi_theta -
log pi_rollout it moves it away from the servers' (amplifies the mismatch), against it back to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.catalogue import QUADRANTS
from megatron_rl_corr.core.losses.ratio import inside
from megatron_rl_corr.core.segments import segment_sums
from megatron_rl_corr.reduce.metrics import Mean, Metric


@torch.no_grad()
def quadrant_metrics(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, pulls: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Shares of each quadrant in the tokens of the mask, and in their sum of |pull|.

    A token of A = 0 or D = 0 is in none, and counts in what the shares are of.

    Source: TRIAGE, arXiv:2610.07043 (its abstract).

    Args:
        logprobs, rollout_logprobs: [T] log pi_theta and log pi_rollout.
        advantages: [T], A.
        pulls: [T], the gradient of the loss in log pi_theta before a clip: coefficient x weight x A.
        mask: [T] bool, kept tokens.
    """
    gaps = inside(mask, logprobs.float() - rollout_logprobs.float())
    signs = inside(mask, advantages).sign() * 3 + gaps.sign() + 4
    columns = {"tokens": lambda: mask, "mass": lambda: inside(mask, pulls).abs()}
    sums = segment_sums(columns, signs.long(), 9)
    shares = torch.stack([sums, sums.sum(dim=1, keepdim=True).expand_as(sums)], dim=2)
    return {
        f"quadrant/{name}{suffix}": Mean(pairs[a * 3 + d + 4])
        for suffix, pairs in zip(("", "_mass"), shares.unbind(), strict=True)
        for name, (a, d) in QUADRANTS.items()
    }

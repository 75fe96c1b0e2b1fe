"""GSPO: PPO's clip on the geometric mean of a sequence's ratios.

T tokens, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.ppo_clip import clipped_surrogate
from megatron_rl_corr.core.losses.ratio import as_exponent, inside, moved_log_ratio
from megatron_rl_corr.core.metrics import Metric

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, correction: Correction,
    config: RolloutCorrectionConfig, *, seq_ids: Tensor, num_sequences: int, groups: ParallelGroups | None = None,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w min(s A, clip(s, 1 - low, 1 + high) A) per token, s = (prod of pi_theta / pi_old over the sequence)^(1/n).

    [T], 0 outside correction.mask; n counts the sequence's kept tokens. In the gradient a token stands for itself:
    s_t = sg(s) pi_t / sg(pi_t), so that nothing is differentiated through a sum over the sequence, nor through the
    collective that completes it over cp. seq_ids [T] int64 in [0, num_sequences). Source: GSPO, arXiv:2507.18071,
    eqs. 5 and 14 (its token form).
    """
    mask = correction.mask
    moved = moved_log_ratio(logprobs.detach(), old_logprobs, mask)
    columns = torch.stack([moved, mask.float()]).double()
    sums = columns.new_zeros(2, num_sequences).index_add_(1, seq_ids, columns)
    if groups is not None:
        sums, _ = groups.all_gather_cp_partials(sums, sums.new_empty(0, num_sequences))
    mean = as_exponent(sums[0] / sums[1].clamp(min=1)).float().index_select(0, seq_ids)
    own = inside(mask, logprobs)
    ratio = (own - own.detach() + mean).exp()
    return clipped_surrogate(ratio, moved, advantages, correction, config, metrics=metrics)

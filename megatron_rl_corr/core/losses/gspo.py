"""GSPO: PPO's clip on the geometric mean of a sequence's ratios.

T tokens, S sequences.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ppo_clip import clipped_surrogate
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio
from megatron_rl_corr.core.segments import segment_sums
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.metrics import Metric


@collective
def gspo(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w min(s A, clip(s, 1 - low, 1 + high) A) per token, s = (prod of pi_theta / pi_old over the
    sequence)^(1/n).

    [T], 0 outside correction.mask; n counts the sequence's kept tokens. In the gradient a token stands for
    itself: s_t = sg(s) pi_t / sg(pi_t), so that nothing is differentiated through a sum over the sequence,
    nor through the collective that completes it over cp. seq_ids [T] int64 in [0, num_sequences). Source:
    GSPO, arXiv:2507.18071, eqs. 5 and 14 (its token form).
    """
    mask, seq_ids = inputs.mask, inputs.seq_ids
    moved = moved_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs, mask)
    sums = segment_sums({"moved": lambda: moved, "tokens": lambda: mask}, seq_ids, inputs.num_sequences)
    if inputs.groups is not None:
        sums = inputs.groups.all_reduce_cp(sums)
    mean = as_exponent(sums[0] / sums[1].clamp(min=1)).float().index_select(0, seq_ids)
    own = inside(mask, inputs.logprobs)
    ratio = (own - own.detach() + mean).exp()
    return clipped_surrogate(ratio, moved, inputs, config, metrics=metrics)

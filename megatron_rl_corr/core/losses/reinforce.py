"""REINFORCE, weighted by the rollout correction; RLOO's loss too, whose baseline is in the advantage.

T tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, inside, moved_log_ratio, record
from megatron_rl_corr.reduce.metrics import Metric


def reinforce(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w A log pi_theta per token; [T], 0 outside correction.mask.

    With two policies (bypass) w is of the current policy against pi_rollout, and constant. Sources:
    Williams 1992; RLOO, arXiv:2402.14740.
    """
    mask = inputs.mask
    factor = inside(mask, inputs.correction.weights * inputs.advantages.float())
    loss = -factor * inside(mask, inputs.logprobs)
    if metrics is not None:
        record(metrics, mask, loss, moved_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs, mask))
    return loss

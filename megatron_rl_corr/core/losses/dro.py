"""DRO: the log-prob times the advantage, and a squared pull to the old policy in place of a clip.

T tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import (
    PolicyLossInputs,
    bounded_log_ratio,
    inside,
    moved_log_ratio,
    record,
)
from megatron_rl_corr.reduce.metrics import Metric


def dro(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w (A log pi_theta - dro_beta / 2 (log pi_theta - log pi_old)^2) per token.

    [T], 0 outside correction.mask. The weight is on both terms, as in verl: both are means over samples of
    pi_old. The gradient in log pi_theta is -w (A - dro_beta log r), which is 0 where r = e^(A / dro_beta).
    log r is clamped to +-20 in the square, beyond which there is no pull: that of an absurd log-prob would
    be infinite. Sources: DRO, arXiv:2405.19107; Kimi k1.5, arXiv:2501.12599.
    """
    mask, weights = inputs.mask, inside(inputs.mask, inputs.correction.weights)
    moved = moved_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    gain = inside(mask, inputs.advantages) * inside(mask, inputs.logprobs)
    loss = -weights * (gain - 0.5 * config.dro_beta * bounded_log_ratio(moved).square())
    record(metrics, mask, loss, moved)
    return loss

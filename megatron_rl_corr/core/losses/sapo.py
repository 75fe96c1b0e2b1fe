"""SAPO: the ratio behind a soft gate, whose gradient fades as the policy moves away, in place of a clip.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, as_exponent, inside, moved_log_ratio, record
from megatron_rl_corr.core.segments import constant
from megatron_rl_corr.reduce.metrics import Metric


def sapo(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w f(r) A per token, f(r) = (4 / t) sigmoid(t (r - 1)), r = pi_theta / pi_old, with the temperature t =
    sapo_temperature_pos where A > 0, else sapo_temperature_neg.

    [T], 0 outside correction.mask. f'(r) = 4 s (1 - s) with s the sigmoid: 1 at r = 1 for any temperature,
    and smaller on either side. Source: SAPO, arXiv:2511.20347.
    """
    mask = inputs.mask
    moved = moved_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    advantages = inside(mask, inputs.advantages)
    positive, negative = (
        constant(temperature, torch.float32, mask.device)
        for temperature in (config.sapo_temperature_pos, config.sapo_temperature_neg)
    )
    temperature = torch.where(advantages > 0, positive, negative)
    # expm1, as r - 1 is 0 to the last digit where nothing has moved. 1 - sigmoid(-x) is sigmoid(x), with a
    # gradient that keeps its digits where r is large; x is at least -t, so the difference keeps its own.
    gate = (1.0 - (-temperature * as_exponent(moved).expm1()).sigmoid()) * 4.0 / temperature
    loss = -inside(mask, inputs.correction.weights) * gate * advantages
    record(metrics, mask, loss, moved)
    return loss

"""DPPO with the binary KL trust region: a token that has moved outwards by more than the bound is left out.

T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.dppo_tv import inside_region
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs
from megatron_rl_corr.core.ratios import binary_kl
from megatron_rl_corr.core.segments import constant
from megatron_rl_corr.reduce.metrics import Metric


def dppo_kl(
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """-w sg(min(r, 20)) A log pi_theta per token inside the region, else 0; r = pi_theta / pi_old; outside
    is a token whose binary KL, pi_old to pi_theta, is above high where A > 0 and r > 1, or above low where
    A < 0 and r < 1.

    [T]. A token on the inner side stays, however far it is: its update brings it back. Source: DPPO,
    arXiv:2602.04879 (binary KL).
    """

    def outside(now: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        low, high = (constant(bound, torch.float64, now.device) for bound in config.clip)
        too_far = binary_kl(old, now) > torch.where(advantages > 0, high, low)
        return too_far & ((now - old).sign() * advantages > 0)

    return inside_region(outside, inputs, metrics=metrics)

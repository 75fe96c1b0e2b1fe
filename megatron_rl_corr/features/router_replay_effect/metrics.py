"""How much of the mismatch replayed routes remove, from log-probs of the same tokens with them and without.

N tokens of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.core.ratios import TokenRatios
from megatron_rl_corr.reduce.metrics import LeftOut, Mean, Metric


def effect_metrics(
    replayed: Tensor, chosen: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, Metric]:
    """The mismatch of both passes, and the share of it that replay removes: 1 - k3_with / k3_without.

    k3 = mean over tokens of e^D - D - 1 with D = log pi_train - log pi_rollout, clamped to +-20 in the
    exponent. Tokens that are not finite in either pass are in neither.

    Args:
        replayed: [N] float32, log pi_train with the servers' experts.
        chosen: [N] float32, with Megatron's own.
        rollout_logprobs: [N] float32.
        loss_mask: [N] bool.
    """
    ratios = [TokenRatios.of(logprobs, rollout_logprobs, loss_mask, {}) for logprobs in (replayed, chosen)]
    valid = ratios[0].valid & ratios[1].valid
    count = valid.sum(dtype=torch.float64)
    with_replay, without = (torch.where(valid, one.rho_less_one - one.log_ratio, 0.0).sum() for one in ratios)
    return {
        "router_replay/k3_with": Mean(torch.stack([with_replay, count])),
        "router_replay/k3_without": Mean(torch.stack([without, count])),
        "router_replay/share_removed": LeftOut(torch.stack([with_replay, without])),
    }


EVERY = "--router-replay-effect-every"
METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "router_replay/k3_with",
        "mismatch of the first microbatches' tokens, trained through the servers' experts",
        "mean(e^D - D - 1)",
        only_with=EVERY,
    ),
    MetricSpec(
        "router_replay/k3_without",
        "the same tokens through the experts that Megatron's routers choose",
        "mean(e^D - D - 1)",
        only_with=EVERY,
    ),
    MetricSpec(
        "router_replay/share_removed",
        "share of that mismatch that replaying the servers' experts removes; below 0 it adds some",
        "1 - k3_with / k3_without",
        only_with=EVERY,
    ),
)

"""Rejection rules: which tokens stay in the loss.

T tokens, S sequences; D = log pi_train - log pi_rollout; k2 = D^2 / 2; k3 = e^D - 1 - D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl_corr.config import RejectionRule


def divergence(name: str, log_ratio: Tensor) -> Tensor:
    """The divergence that a rule bounds, per token [T]; `ratio` is bounded in log space: it is D itself."""
    if name == "ratio":
        return log_ratio
    if name == "k2":
        return 0.5 * log_ratio.square()
    if name == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"unknown divergence {name!r}")


def within(rule: RejectionRule, value: Tensor) -> Tensor:
    """Whether the divergence lies in the rule's closed interval; ratio bounds are taken to log space.

    Compared in float32 at every level: log-probs are no finer, so a value on the bound is kept whether it is
    a float32 token's or a float64 sum's.
    """
    to_bound = math.log if rule.divergence == "ratio" else float
    value = value.float()
    keep = torch.ones_like(value, dtype=torch.bool)
    if rule.lower is not None:
        keep = value >= to_bound(rule.lower)
    if rule.upper is not None:
        keep = keep & (value <= to_bound(rule.upper))
    return keep


def decisions(
    rules: Sequence[RejectionRule], log_ratio: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor],
    seq_count: Tensor,
) -> list[Tensor]:
    """What each rule keeps: bool [T] of a token-level rule, bool [S] of a sequence-level one.

    sums and maxima hold, per divergence name, the float64 [S] reductions over valid tokens. An empty sequence
    is kept: there is nothing to reject.
    """
    keep = []
    for rule in rules:
        if rule.level == "token":
            keep.append(within(rule, divergence(rule.divergence, log_ratio)))
        elif rule.level == "seq_max":
            keep.append(within(rule, maxima[rule.divergence]))
        elif rule.level == "seq_sum":
            keep.append(within(rule, sums[rule.divergence]) | (seq_count == 0))
        else:
            mean = sums[rule.divergence] / seq_count.clamp(min=1)
            keep.append(within(rule, mean) | (seq_count == 0))
    return keep

"""Rejection rules: which tokens, turns and sequences stay in the loss.

T tokens, S sequences or turns; D = log pi_train - log pi_rollout, clamped to +-20 in exponents only; k2 = D^2 / 2;
k3 = e^D - 1 - D.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RejectionRule

ROW = {
    "ratio": "exact", "opsm": "exact", "k2": "square", "k3": "k3", "exp_abs": "e_abs", "abs_diff": "abs_diff",
    "rollout_prob": "rollout", "routing": "routing",
}  # fmt: skip
"""The row of the moment table that holds a divergence, as `row_bounds` bounds it."""


@lru_cache(maxsize=64)
def row_bounds(rule: RejectionRule) -> tuple[float | None, float | None]:
    """The rule's bounds on its row: on D, log pi_rollout, D^2 or e^|D| - 1, as float32 values would meet them."""
    lower, upper = rule.lower, rule.upper
    if rule.divergence in ("ratio", "rollout_prob"):
        lower, upper = (None if bound is None else math.log(bound) for bound in (lower, upper))
    elif rule.divergence == "k2":
        upper = 2 * upper
    elif rule.divergence == "exp_abs":
        upper = upper - 1
    elif rule.divergence == "opsm":
        lower, upper = -upper, None  # mean(-D) at most the upper bound
    return as_float32_meets(lower, -1), as_float32_meets(upper, 1)


def as_float32_meets(bound: float | None, side: int) -> float | None:
    """A bound that a float64 value passes if, rounded to float32, it passes the rounded bound; side -1 is lower.

    Log-probs are no finer than float32, so a value on the bound is kept whether it is one token's or a long sum's.
    """
    if not bound:
        return bound
    step = math.ldexp(1.0, math.frexp(bound)[1] - 24)
    return (round(bound / step) + 0.499 * side) * step


def within(rule: RejectionRule, value: Tensor, out: Tensor | None = None) -> Tensor:
    """1 where the row's value lies in the rule's closed interval, else 0 (and for NaN): float64."""
    out = torch.empty_like(value, dtype=torch.float64) if out is None else out
    lower, upper = row_bounds(rule)
    if lower is None:
        return torch.le(value, upper, out=out)
    if upper is None:
        return torch.ge(value, lower, out=out)
    return torch.eq(value.clamp(lower, upper), value, out=out)

"""Rejection rules: which tokens, turns and sequences stay in the loss.

T tokens, S sequences or turns; D = log pi_train - log pi_rollout; k2 = D^2 / 2; k3 = e^D - 1 - D.
"""

from __future__ import annotations

import math

from torch import Tensor

from megatron_rl_corr.config import RejectionRule
from megatron_rl_corr.core.moments import MomentTable

_ROWS = {"ratio": "d", "opsm": "d", "exp_abs": "e_abs", "abs_diff": "abs_diff", "rollout_prob": "rollout"}


def divergence(name: str, table: MomentTable) -> Tensor:
    """The divergence that a rule bounds, float64 [T], 0 where the policies agree and outside the valid tokens.

    ratio is bounded in log space, so it is D itself; exp_abs is e^|D| - 1; abs_diff |pi_train - pi_rollout|;
    rollout_prob log pi_rollout.
    """
    if name == "k2":
        return 0.5 * table.row("d").square()
    if name == "k3":
        return table.row("e") - table.row("d")
    return table.row(_ROWS[name])


def log_bounds(rule: RejectionRule) -> tuple[float | None, float | None]:
    """The rule's bounds on what `divergence` gives."""
    if rule.divergence in ("ratio", "rollout_prob"):
        to = math.log
    elif rule.divergence == "exp_abs":
        to = lambda bound: bound - 1  # noqa: E731
    else:
        to = float
    return tuple(None if bound is None else to(bound) for bound in (rule.lower, rule.upper))


def within(rule: RejectionRule, value: Tensor) -> Tensor:
    """Whether the divergence lies in the rule's closed interval, bool.

    Compared in float32 at every level: log-probs are no finer, so a value on the bound is kept whether it is a float32
    token's or a float64 sum's.
    """
    value = value.float()
    return value.clamp(*log_bounds(rule)) == value

"""How far two distributions are apart of which the same list of ids is known: bounds, exact where it is the
whole vocabulary.

N tokens, K listed ids of each, q the rollout server's distribution and p the trainer's. Outside of the list
only the masses are known, q_o = 1 - sum q and p_o = 1 - sum p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.core.ratios import LOG_CLAMP

LEAST_OUTSIDE = 1e-5
"""A smaller mass outside of the list may be rounding of the sums: it counts as this much in lower bounds."""


@dataclass(frozen=True)
class ListedDistances:
    """Distances of each token, [N] float64.

    Example: q = (0.5, 0.2), p = (0.4, 0.2) on the list, so 0.3 and 0.4 outside: TV is 0.1 if these are as
    alike as they can be, and 0.4 if they have no id in common.
    """

    kl: Tensor
    """KL(q || p), at least."""
    reverse_kl: Tensor
    """KL(p || q), at least."""
    least_tv: Tensor
    """The total variation, sum |q - p| / 2, at least."""
    most_tv: Tensor
    """And at most."""
    mass: Tensor
    """sum q: what the list has of the server's distribution."""
    by_id: Tensor
    """[N, K]: |q - p| / 2 of each listed id, its part of the total variation."""


def listed_distances(rollout: Tensor, train: Tensor) -> ListedDistances:
    """Bounds of KL and total variation from the log-probs of a list of ids.

    With f(x, y) = x log(x / y) - x + y, which is never negative and 0 where x = y,

        KL(q || p) >= sum_K f(q, p) + f(q_o, p_o)          sum_K |q - p| / 2 + |q_o - p_o| / 2 <= TV
        KL(p || q) >= sum_K f(p, q) + f(p_o, q_o)          TV <= sum_K |q - p| / 2 + (q_o + p_o) / 2

    as ids that are taken together are no further apart than one by one (the data-processing inequality). In
    the lower bounds masses outside are at least LEAST_OUTSIDE and log-ratios within +-20, which makes them
    smaller. Where the list is the whole vocabulary all are equalities.

    Args:
        rollout: [N, K] log q of any float type; -inf where the server gives an id no mass.
        train: [N, K] log p of the same ids.
    """
    log_q, log_p = rollout.double(), train.double()
    q, p = log_q.exp(), log_p.exp()
    by_id = (q - p).abs() / 2
    q_o, p_o = (1 - one.sum(dim=1).clamp(max=1.0) for one in (q, p))
    q_least, p_least = q_o.clamp(min=LEAST_OUTSIDE), p_o.clamp(min=LEAST_OUTSIDE)
    ratio = torch.where(log_q == log_p, 0.0, log_p - log_q)  # of two -inf, too
    outside, listed = p_least.log() - q_least.log(), by_id.sum(dim=1)
    return ListedDistances(
        kl=(q * _excess(ratio)).sum(dim=1) + q_least * _excess(outside),
        reverse_kl=(p * _excess(-ratio)).sum(dim=1) + p_least * _excess(-outside),
        least_tv=listed + (q_least - p_least).abs() / 2,
        most_tv=(listed + (q_o + p_o) / 2).clamp(max=1.0),
        mass=1 - q_o,
        by_id=by_id,
    )


def _excess(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d with d clamped: f(x, y) / x where d = log(y / x)."""
    d = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)
    return torch.expm1(d) - d

"""The mismatch measured: KL, perplexities, chi-square, ESS, correlation and weight statistics as Metrics.

T tokens, S sequences; D = log pi_train - log pi_rollout (subtracted in float32), rho = e^D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.core.metrics import (
    Chi2,
    EffectiveSampleSize,
    Max,
    Mean,
    Metric,
    Min,
    Pearson,
    Std,
    Sum,
)


@dataclass(frozen=True)
class TokenView:
    """What the diagnostics look at; every [T] float is 0 outside `valid`."""

    train: Tensor
    """log pi_train [T]."""
    rollout: Tensor
    """log pi_rollout [T]."""
    log_ratio: Tensor
    """D [T], not clamped."""
    clamped: Tensor
    """D [T], clamped to +-20 before any exp."""
    weights: Tensor
    """The weights that the loss uses [T]."""
    valid: Tensor
    """In the loss mask, with finite log-probs on both sides [T] bool."""
    kept: Tensor
    """valid and not rejected [T] bool."""
    nonfinite: Tensor
    """In the loss mask, dropped for a non-finite log-prob [T] bool."""
    out_of_bounds: Tensor | None
    """valid, and the weight was out of bounds before they were applied [T] bool; None without weights."""


def token_metrics(view: TokenView, rule_masks: dict[str, Tensor]) -> dict[str, Metric]:
    """Metrics that are sums or extrema over tokens; one stacked reduction for all sums, two for extrema."""
    # Squares in float64: a spread of 1e-4 around 1 drowns in a float32 square's rounding.
    clamped, weights = view.clamped.double(), view.weights.double()
    p_train, p_rollout = (
        torch.where(view.valid, side.double().exp(), 0.0) for side in (view.train, view.rollout)
    )
    columns = {
        "valid": view.valid,
        "kept": view.kept,
        "nonfinite": view.nonfinite,
        "k1": -view.log_ratio,
        "abs_d": view.log_ratio.abs(),
        "k3": torch.expm1(clamped) - clamped,
        "rho2": torch.where(view.valid, (2 * clamped).exp(), 0.0),
        "w": weights,
        "w2": weights.square(),
        "pt": p_train,
        "pr": p_rollout,
        "pt2": p_train.square(),
        "pr2": p_rollout.square(),
        "ptpr": p_train * p_rollout,
    }
    if view.out_of_bounds is not None:
        columns["out_of_bounds"] = view.out_of_bounds
    for name, keep in rule_masks.items():
        columns[f"rejected/{name}"] = view.valid & ~keep
    sums = torch.stack([column.double() for column in columns.values()]).sum(dim=1)
    at = {name: i for i, name in enumerate(columns)}

    def pick(*names: str) -> Tensor:
        return torch.stack([sums[at[name]] for name in names])

    highest = _extreme(torch.stack([view.log_ratio.abs(), view.weights]), view.valid, "amax")
    lowest = _extreme(view.weights[None], view.valid, "amin")
    metrics: dict[str, Metric] = {
        "valid_tokens": Sum(pick("valid")),
        "nonfinite_tokens": Sum(pick("nonfinite")),
        "kept_fraction": Mean(pick("kept", "valid")),
        "kl": Mean(pick("k1", "valid")),
        "k3_kl": Mean(pick("k3", "valid")),
        "log_ratio_abs_mean": Mean(pick("abs_d", "valid")),
        "log_ratio_abs_max": Max(highest[0:1]),
        "chi2_token": Chi2(pick("rho2", "valid")),
        "pearson": Pearson(pick("pt", "pr", "pt2", "pr2", "ptpr", "valid")),
        "weight_mean": Mean(pick("w", "valid")),
        "weight_std": Std(pick("w", "w2", "valid")),
        "weight_max": Max(highest[1:2]),
        "weight_min": Min(lowest[0:1]),
        "ess": EffectiveSampleSize(pick("w", "w2", "valid")),
    }
    if view.out_of_bounds is not None:
        metrics["weight_out_of_bounds"] = Mean(pick("out_of_bounds", "valid"))
    for name in rule_masks:
        metrics[f"rejected_fraction/{name}"] = Mean(pick(f"rejected/{name}", "valid"))
    return metrics


def _extreme(columns: Tensor, valid: Tensor, op: str) -> Tensor:
    """amax or amin of [K, T] over valid tokens, float64 [K]; the reduction's identity where there is none."""
    identity = -torch.inf if op == "amax" else torch.inf
    if columns.shape[1] == 0:
        return columns.new_full((columns.shape[0],), identity, dtype=torch.float64)
    return getattr(torch.where(valid, columns, identity), op)(dim=1).double()


def sequence_metrics(
    *, train_sum: Tensor, rollout_sum: Tensor, count: Tensor, kept: Tensor, owner: bool
) -> dict[str, Metric]:
    """Metrics that are means over sequences with at least one valid token.

    train_sum, rollout_sum [S] are sums of log-probs over a sequence's valid tokens, count [S] their number,
    kept [S] bool. Every context-parallel rank holds them whole: only their owner counts them.
    """
    present = (count > 0) & owner
    safe = count.clamp(min=1)
    rows = torch.stack([
        present.double(),
        (kept & present).double(),
        torch.where(present, (-train_sum / safe).exp(), 0.0),
        torch.where(present, (-rollout_sum / safe).exp(), 0.0),
        torch.where(present, (rollout_sum - train_sum) / safe, 0.0),
    ])
    n, kept_n, train_ppl, rollout_ppl, log_ppl_diff = rows.sum(dim=1).unbind()
    return {
        "sequences": Sum(n[None]),
        "kept_sequence_fraction": Mean(torch.stack([kept_n, n])),
        "training_ppl": Mean(torch.stack([train_ppl, n])),
        "rollout_ppl": Mean(torch.stack([rollout_ppl, n])),
        "log_ppl_diff": Mean(torch.stack([log_ppl_diff, n])),
    }

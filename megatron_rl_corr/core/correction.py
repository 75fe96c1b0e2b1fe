"""From two policies' log-probs to importance weights, a keep mask and the metrics that explain them.

T tokens of packed sequences (this context-parallel rank's), S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.diagnostics import TokenView, sequence_metrics, token_metrics
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.core.rejection import decisions, divergence
from megatron_rl_corr.core.segments import sequence_maxima, sequence_sums, to_tokens
from megatron_rl_corr.core.weights import LOG_CLAMP, bound_weights, out_of_bounds, raw_weights

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Correction:
    """What the loss needs of the mismatch; nothing in it requires grad."""

    weights: Tensor
    """[T] float32 importance weights; 0 outside the valid tokens."""

    mask: Tensor
    """[T] bool: valid and not rejected (a zero weight of IcePop is no rejection)."""

    valid: Tensor
    """[T] bool: in the loss mask and finite on both sides, before rejection."""

    kept_sequences: Tensor
    """[S] bool: has valid tokens, and no sequence-level rule rejected it."""

    valid_tokens: Tensor
    """float64 scalar: valid tokens of the global batch (over dp_cp, if the groups have it)."""

    kept_tokens: Tensor
    """float64 scalar: kept tokens of the global batch."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    """Device-side partials of this rank's share, by name."""

    def rows(self, start: int, stop: int) -> Correction:
        """Weights and masks of tokens [start, stop), for a microbatch; global counts stay, metrics do not."""
        part = slice(start, stop)
        return replace(
            self, weights=self.weights[part], mask=self.mask[part], valid=self.valid[part], metrics={}
        )

    def denominator(self, kind: str) -> Tensor:
        """Tokens the loss is divided by (config.loss_denominator), at least 1: float64 scalar."""
        if kind not in ("valid", "kept"):
            raise ValueError(f"loss_denominator must be valid or kept, got {kind!r}")
        return (self.valid_tokens if kind == "valid" else self.kept_tokens).clamp(min=1)


@torch.no_grad()
def compute_correction(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    seq_ids: Tensor,
    *,
    num_sequences: int,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups | None = None,
) -> Correction:
    """Weights w = bounded(rho), keep mask and metrics, with rho = pi_train / pi_rollout.

    train_logprobs, rollout_logprobs [T] float (subtracted in float32); loss_mask [T]; seq_ids [T] int64 in
    [0, num_sequences), the same numbering on every context-parallel rank. Without `groups` this rank stands
    alone; with them, one collective over cp and one over dp_cp, whatever the number of rules. A token whose
    log-prob is not finite on either side is dropped and counted; what stands outside the loss mask never
    matters.

    Raises ValueError for inputs of unlike lengths.
    """
    _check_shapes(train_logprobs, rollout_logprobs, loss_mask, seq_ids)
    in_mask = loss_mask.bool()
    train, rollout = train_logprobs.float(), rollout_logprobs.float()
    valid = in_mask & train.isfinite() & rollout.isfinite()
    train, rollout = torch.where(valid, train, 0.0), torch.where(valid, rollout, 0.0)
    log_ratio = train - rollout
    clamped = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)

    sums, maxima = _sequence_partials(config, train, rollout, clamped, valid, seq_ids, num_sequences, groups)
    count = sums["count"]
    weights, outside = _weights(config, clamped, sums["ratio"], count, valid, seq_ids)
    rule_masks, kept, kept_sequences = {}, valid, count > 0
    kept_by = decisions(config.rollout_rs, clamped, sums, maxima, count)
    for rule, keep in zip(config.rollout_rs, kept_by, strict=True):
        if rule.level != "token":
            kept_sequences = kept_sequences & keep
            keep = to_tokens(keep, seq_ids)
        rule_masks[rule.name] = keep
        kept = kept & keep

    totals = torch.stack([valid.sum(), kept.sum(), weights.sum(dtype=torch.float64)]).double()
    if groups is not None:
        totals = groups.all_reduce_dp_cp(totals)
    if config.rollout_is_batch_normalize:
        # With every weight 0 (all masked by IcePop) there is no scale to remove: they stay 0.
        mean = totals[2] / totals[0].clamp(min=1)
        weights = weights / torch.where(mean > 0, mean, 1.0).float()

    view = TokenView(train, rollout, log_ratio, clamped, weights, valid, kept, in_mask & ~valid, outside)
    metrics = token_metrics(view, rule_masks)
    metrics |= sequence_metrics(
        train_sum=sums["train"], rollout_sum=sums["rollout"], count=count, kept=kept_sequences,
        owner=groups is None or groups.cp_rank == 0,
    )
    return Correction(weights, kept, valid, kept_sequences, totals[0], totals[1], metrics)


def _weights(config, clamped, seq_ratio_sum, count, valid, seq_ids) -> tuple[Tensor, Tensor | None]:
    """Bounded weights [T], 0 outside valid, and where the raw ones were out of bounds (None: no weights)."""
    if config.rollout_is is None:
        return valid.float(), None
    raw = raw_weights(config.rollout_is, clamped, seq_ratio_sum, count, seq_ids)
    lower, upper = config.rollout_is_lower, config.rollout_is_upper
    weights = bound_weights(config.rollout_is_mode, raw, lower, upper)
    return torch.where(valid, weights, 0.0), valid & out_of_bounds(raw, lower, upper)


def _sequence_partials(
    config, train, rollout, clamped, valid, seq_ids, num_sequences, groups
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Float64 [S] sums (count, train, rollout, ratio and what the rules need) and maxima, whole over cp."""
    columns = {"count": valid.float(), "train": train, "rollout": rollout, "ratio": clamped}
    max_columns: dict[str, Tensor] = {}
    for rule in config.rollout_rs:
        into = max_columns if rule.level == "seq_max" else columns
        if rule.level != "token" and rule.divergence not in into:
            into[rule.divergence] = divergence(rule.divergence, clamped)
    sums = sequence_sums(torch.stack(list(columns.values())), seq_ids, num_sequences)
    if not max_columns:
        maxima = sums.new_empty(0, num_sequences)
    else:
        maxima = sequence_maxima(torch.stack(list(max_columns.values())), seq_ids, num_sequences)
    if groups is not None:
        sums, maxima = groups.all_gather_cp_partials(sums, maxima)
    return (
        dict(zip(columns, sums.unbind(), strict=True)),
        dict(zip(max_columns, maxima.unbind(), strict=True)),
    )


def _check_shapes(train_logprobs, rollout_logprobs, loss_mask, seq_ids) -> None:
    shapes = [tuple(t.shape) for t in (train_logprobs, rollout_logprobs, loss_mask, seq_ids)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "compute_correction takes train_logprobs, rollout_logprobs, loss_mask and seq_ids of one shape "
            f"[T], got {', '.join(map(str, shapes))}; flatten_padded turns padded rows [B, L] into [T]"
        )

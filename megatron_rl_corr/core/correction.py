"""Computes importance weights, a keep mask and the metrics that explain them from two policies' log-probs.

T tokens of packed sequences (this context-parallel rank's), S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RULE_INPUTS
from megatron_rl_corr.core.clip_scale import distances, sat_scale
from megatron_rl_corr.core.mismatch import (
    engine_metrics,
    pack,
    rejection_metrics,
    sequence_metrics,
    token_metrics,
    weight_metrics,
)
from megatron_rl_corr.core.ratios import Spans, SpanSums, TokenRatios
from megatron_rl_corr.core.rejection import (
    Rejection,
    passed_columns,
    reject,
    second_moment_mask,
    span_columns,
    token_verdicts,
)
from megatron_rl_corr.core.segments import Columns, constant, padded_at, sums_of_episodes
from megatron_rl_corr.core.weights import ImportanceWeights, importance_weights
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective
from megatron_rl_corr.reduce.metrics import Max, Metric


@dataclass(frozen=True)
class Lengths:
    """Whole sequences as a mean over sequences counts them: by valid tokens, or by kept ones."""

    kind: str
    """valid or kept."""

    tokens: Tensor
    """float64 [S]: tokens of this kind in each sequence, over all of cp; where means take an episode as one,
    those of the sequence's episode.
    """

    sequences: Tensor
    """float64 scalar: sequences of the global batch that have any; or such episodes."""


@dataclass(frozen=True)
class Correction:
    """Weights, masks and metrics of a batch, for the loss; no tensor in it requires a gradient."""

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
    """float64 scalar: kept tokens of the global batch; 0 if the batch filter takes the whole batch."""

    lengths: Lengths
    """Lengths for means over sequences: of kept tokens where the loss_denominator is kept and the
    aggregation takes such means, else of valid ones.
    """

    sequence_ratios: Tensor
    """[S] float64: the product of rho over each sequence (`SpanSums.products`), before
    bounds and rejection.
    """

    metrics: dict[str, Metric] = field(default_factory=dict)
    """Device-side partials of this rank's share, by name."""

    valid_lengths: Tensor | None = None
    """float64 [S]: valid tokens of each whole sequence, which whitened advantages weigh it by, whatever
    `lengths` counts; `compute_correction` always gives them.
    """

    clip_scale: Tensor | None = None
    """[T] float32 in [0, 1], SAT's factor of the clip's bounds; None without clip_sat_tail."""

    def at(self, places: Tensor, padding: int) -> Correction:
        """Weights and masks of the tokens at these places [T'], then `padding` masked entries.

        For a microbatch: what is by sequence, counts and lengths stay those of the batch, whose numbers of
        sequences are not the microbatch's; metrics are left out.
        """
        by_token = ("weights", "mask", "valid", "clip_scale")
        given = {name: getattr(self, name) for name in by_token if getattr(self, name) is not None}
        part = {name: padded_at(values, places, padding) for name, values in given.items()}
        return replace(self, **part, metrics={})

    def denominator(self, kind: str) -> Tensor:
        """Tokens the loss is divided by (config.loss_denominator), at least 1: float64 scalar.

        Raises:
            ValueError: kind is neither valid nor kept.
        """
        if kind not in ("valid", "kept"):
            raise ValueError(f"loss_denominator must be valid or kept, got {kind!r}")
        return (self.valid_tokens if kind == "valid" else self.kept_tokens).clamp(min=1)


@torch.no_grad()
@collective
def compute_correction(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    seq_ids: Tensor,
    *,
    num_sequences: int,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups | None = None,
    turn_ids: Tensor | None = None,
    num_turns: int | None = None,
    engine_ids: Tensor | None = None,
    engines: Sequence[str] = (),
    token_lags: Tensor | None = None,
    episode_ids: Tensor | None = None,
    **inputs: Tensor | None,
) -> Correction:
    """Weights w = bounded(rho), keep mask and metrics, with rho = pi_train / pi_rollout.

    With groups, this takes one collective over cp and one over dp_cp, whatever the rules. M2PO takes one more
    over dp_cp, before the others: its cut decides what they count. A token whose log-prob is not finite on
    either side is dropped and counted; values outside the loss mask never matter.

    Args:
        train_logprobs, rollout_logprobs: [T] float, subtracted in float32.
        loss_mask: [T], nonzero for the tokens that are trained.
        seq_ids: [T] int64 in [0, num_sequences), the same numbering on every context-parallel rank.
        groups: the ranks that the batch is sharded over; None: this rank has all of it.
        turn_ids: [T] int64, 0 for a sequence's first turn, below num_turns where turns decide something.
        engine_ids: [T] int64, which of `engines` sampled it; None: no metrics by engine.
        token_lags: [T] int64, pushes since the weights that sampled it; None: no metrics by lag.
        episode_ids: [S] int64 in [0, S), the episode of each sequence, where the loss's means over sequences
            take an episode as one; None: they take each sequence. Weights and rules are of sequences.
        inputs: [T] each, by their names in config/rules.RULE_INPUTS: advantages, routing.

    Raises:
        ValueError: inputs of unlike lengths, an unknown input, or a rule or weight that lacks its input.
    """
    inputs = {name: values for name, values in inputs.items() if values is not None}
    _check_inputs(config, (train_logprobs, rollout_logprobs, loss_mask, seq_ids), turn_ids, num_turns, inputs)
    needed = {name: inputs[name] for name in config.needed_inputs}
    ratios = TokenRatios.of(train_logprobs, rollout_logprobs, loss_mask, needed)
    spans = Spans(seq_ids, num_sequences, turn_ids, num_turns if config.decided_by_turn else 1)

    by_engine = {} if engine_ids is None else engine_metrics(ratios, engine_ids, engines)
    # First, while nothing else is held: its rows are the largest.
    parts = by_engine | token_metrics(ratios, turn_ids, token_lags)

    verdicts = token_verdicts(config, ratios)
    if config.rollout_m2_threshold is not None:
        verdicts["m2"] = second_moment_mask(ratios, config.rollout_m2_threshold, groups)
    sums = spans.whole_unit_sums(_columns(config, ratios, verdicts), groups)
    weights = importance_weights(config, ratios, spans, sums)
    rejection = reject(config, ratios, spans, sums, verdicts)
    ratios.free_rows()

    # all ranks of cp hold whole sequences: one of them counts them
    owner = groups is None or groups.cp_rank == 0
    lengths = _sequence_lengths(sums, rejection)
    if episode_ids is not None:
        lengths = sums_of_episodes(lengths, episode_ids)
    batch = _totals_of_batch(config, ratios, sums, weights, rejection, lengths, groups, owner)
    final = None if weights is None else weights.tokens
    if batch.weight_scale is not None:
        final = final * batch.weight_scale
    parts |= rejection_metrics(ratios, rejection) | sequence_metrics(
        sums, rejection.kept_sequences, owner=owner
    )
    if final is not None:
        parts |= weight_metrics(final, weights.out_of_bounds, ratios)
    lengths = lengths if episode_ids is None else lengths[episode_ids]
    return _finish(config, final, ratios, sums, rejection, lengths, batch, pack(parts))


def _columns(config: RolloutCorrectionConfig, ratios: TokenRatios, verdicts: dict[str, Tensor]) -> Columns:
    """The columns that are summed over each sequence and turn."""
    columns: dict = {
        "tokens": lambda: ratios.one,
        "log_ratio": lambda: ratios.log_ratio,
        "train_logprobs": lambda: ratios.train_logprobs,
        "rollout_logprobs": lambda: ratios.rollout_logprobs,
    }
    if _lengths_kind(config) == "kept" and not config.diagnostics_only:
        columns |= passed_columns(config, ratios, verdicts)
    if config.rollout_is_mode == "gamma":
        columns["input/advantages"] = partial(ratios.inputs.__getitem__, "advantages")
    return columns | span_columns(config, ratios)


@dataclass(frozen=True)
class BatchTotals:
    """Sums over the global batch, float64 scalars."""

    valid_tokens: Tensor
    kept_tokens: Tensor
    sequences: Tensor
    """Sequences that a mean over sequences counts."""
    k3: Tensor | None
    """Sum of e^D - 1 - D over the valid tokens; None without a batch filter."""
    weight_scale: Tensor | None
    """Factor that makes the mean weight of a unit 1; None without batch normalisation."""
    distance: Tensor | None
    """Mean |D| over the valid tokens, at most 20 each; None without clip_sat_tail."""


@collective
def _totals_of_batch(
    config: RolloutCorrectionConfig,
    ratios: TokenRatios,
    sums: SpanSums,
    weights: ImportanceWeights | None,
    rejection: Rejection,
    lengths: Tensor,
    groups: ParallelGroups | None,
    owner: bool,
) -> BatchTotals:
    """One all-reduce over dp_cp. lengths: [S], of the sequences or episodes that means count.

    The mean weight counts each unit of the weights' level that has a valid token once, before
    rejection (as verl does).
    """
    shared = weights is not None and weights.shared
    # All context-parallel ranks hold these sums; only `owner` contributes them.
    counted = (lengths > 0).sum(dtype=torch.float64)
    parts = {
        "valid": ratios.valid_tokens,
        "kept": rejection.kept_tokens,
        "sequences": counted if owner else torch.zeros_like(counted),
    }
    if config.rollout_batch_filter_kl is not None:
        parts["k3"] = ratios.k3.sum()
    if config.clip_sat_tail is not None:
        parts["distance"] = distances(ratios).sum()
    if config.rollout_is_batch_normalize:
        of_units = {"weight": weights.units.sum(), "units": _units_present(config, ratios, sums)}
        counts = owner or not shared
        parts |= {name: one if counts else torch.zeros_like(one) for name, one in of_units.items()}
    stacked = torch.stack([*parts.values()])
    if groups is not None:
        stacked = groups.all_reduce_dp_cp(stacked)
    totals = dict(zip(parts, stacked.unbind(), strict=True))
    scale = distance = None
    if config.rollout_is_batch_normalize:
        # With every weight 0 (all masked by IcePop) there is no scale to remove: they stay 0.
        weight, units = totals["weight"], totals["units"]
        scale = torch.where(weight > 0, units / weight, constant(1.0, torch.float64, weight.device))
    if config.clip_sat_tail is not None:
        distance = totals["distance"] / totals["valid"].clamp(min=1)
    return BatchTotals(
        totals["valid"],
        totals["kept"],
        totals["sequences"],
        k3=totals.get("k3"),
        weight_scale=scale,
        distance=distance,
    )


def _units_present(config: RolloutCorrectionConfig, ratios: TokenRatios, sums: SpanSums) -> Tensor:
    """How many units of the weights' level have a valid token: float64 scalar."""
    if config.rollout_is == "token":
        return ratios.valid_tokens
    present = sums.units_present if config.rollout_is == "turn" else sums.present
    return present.sum(dtype=torch.float64)


def _sequence_lengths(sums: SpanSums, rejection: Rejection) -> Tensor:
    """Tokens of each whole sequence [S] as a mean over sequences counts them."""
    return sums.by_sequence["tokens"] if rejection.kept_lengths is None else rejection.kept_lengths


def _lengths_kind(config: RolloutCorrectionConfig) -> str:
    """Which tokens a mean over sequences counts; a mean over tokens needs no kept lengths, so none
    are made for it.
    """
    return "valid" if config.aggregation == "token-mean" else config.loss_denominator


def _finish(
    config: RolloutCorrectionConfig,
    weights: Tensor | None,
    ratios: TokenRatios,
    sums: SpanSums,
    rejection: Rejection,
    lengths: Tensor,
    batch: BatchTotals,
    metrics: dict[str, Metric],
) -> Correction:
    """Apply what acts on the whole batch: the filter, and the promise of diagnostics_only
    to change nothing.
    """
    valid_tokens, kept_tokens, most_kl = batch.valid_tokens, batch.kept_tokens, config.rollout_batch_filter_kl
    if most_kl is not None:
        filtered = batch.k3 > most_kl * valid_tokens
        metrics["batch_filtered"] = Max(filtered.double()[None])
        kept_tokens = torch.where(filtered, constant(0.0, torch.float64, filtered.device), kept_tokens)
    lengths = Lengths(_lengths_kind(config), lengths, batch.sequences)
    valid, mask, kept = ratios.valid, rejection.mask, rejection.kept_sequences
    if config.diagnostics_only:
        weights, mask, kept, kept_tokens = None, valid, sums.present, valid_tokens
    weights = valid.float() if weights is None else weights.float()
    scales_clip = config.clip_sat_tail is not None and not config.diagnostics_only
    return Correction(
        weights=weights,
        mask=mask,
        valid=valid,
        kept_sequences=kept,
        valid_tokens=valid_tokens,
        kept_tokens=kept_tokens,
        lengths=lengths,
        sequence_ratios=sums.products,
        metrics=metrics,
        valid_lengths=sums.by_sequence["tokens"],
        clip_scale=sat_scale(ratios, config.clip_sat_tail, batch.distance) if scales_clip else None,
    )


def _check_inputs(
    config: RolloutCorrectionConfig,
    required: tuple[Tensor, ...],
    turn_ids: Tensor | None,
    num_turns: int | None,
    inputs: dict[str, Tensor],
) -> None:
    given = [*required, *([] if turn_ids is None else [turn_ids]), *inputs.values()]
    shapes = [tuple(tensor.shape) for tensor in given]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "compute_correction takes train_logprobs, rollout_logprobs, loss_mask and seq_ids (turn_ids, "
            f"{', '.join(RULE_INPUTS)}) of one shape [T], got {', '.join(map(str, shapes))}; flatten_padded "
            "turns rows [B, L] into [T]"
        )
    for name in inputs:
        if name not in RULE_INPUTS:
            raise ValueError(
                f"compute_correction takes no {name!r}; the inputs of rules are {', '.join(RULE_INPUTS)}"
            )
    by_turn = config.decided_by_turn
    if by_turn and (turn_ids is None or num_turns is None):
        raise ValueError(
            f"{by_turn[0]} needs turn_ids and num_turns, above every one of them; pass both, or use another "
            "level"
        )
    for name, asker in config.needed_inputs.items():
        if name not in inputs:
            what = "mode" if " " in asker else "rule"
            raise ValueError(
                f"{asker} needs {name}, {RULE_INPUTS[name].doc}; pass {name}, or use another {what}"
            )

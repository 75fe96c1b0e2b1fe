"""Rejection rules evaluated: which tokens, turns and sequences stay in the loss. The rules are in config/rules.py.

T tokens, S sequences, U units: sequences, or their turns where turns decide something.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial, reduce

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.core.ratios import Spans, SpanSums, TokenRatios
from megatron_rl_corr.core.segments import Columns


@dataclass(frozen=True)
class Rejection:
    """What all rules together keep, and what each one keeps."""

    mask: Tensor
    """bool [T]: valid and kept by every rule."""
    kept_sequences: Tensor
    """bool [S]: has valid tokens, and every rule about sequences keeps it."""
    kept_by: dict[str, Tensor]
    """By the rule's name: bool [T], True where it keeps a valid token."""
    kept_lengths: Tensor | None
    """float64 [S]: tokens of each whole sequence that all rules keep; None unless the spans summed `passed`."""

    @cached_property
    def kept_tokens(self) -> Tensor:
        """How many the mask keeps: float64 scalar."""
        return self.mask.sum(dtype=torch.float64)


def within(rule: RejectionRule, values: Tensor) -> Tensor:
    """True where a value of any shape lies in the rule's closed interval; False for NaN.

    Compared in float32: log-probs are no finer, so a value on the bound is kept whether it is one token's or the sum
    of a long sequence.
    """
    values = values.float()
    lower, upper = (None if bound is None else rule.row.scale(bound) for bound in (rule.lower, rule.upper))
    if lower is None:
        return values <= upper
    return values >= lower if upper is None else values.clamp(lower, upper) == values


def token_verdicts(config: RolloutCorrectionConfig, ratios: TokenRatios) -> dict[str, Tensor]:
    """By name, bool [T]: the valid tokens that each rule of level token keeps."""
    return {
        rule.name: within(rule, token_values(rule, ratios)) & ratios.valid
        for rule in config.rollout_rs if rule.level == "token"
    }  # fmt: skip


def span_columns(config: RolloutCorrectionConfig, ratios: TokenRatios) -> Columns:
    """What the rules about turns and sequences sum: a rule's value, or for seq_max whether a token is outside."""
    columns: dict = {}
    for rule in config.rollout_rs:
        if rule.level == "seq_max":
            columns[rule.name] = partial(_outside, rule, ratios)
        elif rule.level != "token":
            columns[rule.name] = partial(token_values, rule, ratios)
        if rule.row.spares is not None:
            columns[f"input/{rule.row.spares}"] = partial(ratios.inputs.__getitem__, rule.row.spares)
    return columns


def token_values(rule: RejectionRule, ratios: TokenRatios) -> Tensor:
    """What the rule measures of each token: [T], 0 outside the valid tokens."""
    return rule.row.value(ratios)


def _outside(rule: RejectionRule, ratios: TokenRatios) -> Tensor:
    """bool [T]: outside the interval of a seq_max rule, which holds the 0 of what is no valid token."""
    return ~within(rule, token_values(rule, ratios))


def reject(
    config: RolloutCorrectionConfig, ratios: TokenRatios, spans: Spans, sums: SpanSums, verdicts: dict[str, Tensor]
) -> Rejection:
    """Apply every rule: a token stays in the loss where all rules keep it.

    Args:
        config: its rollout_rs are the rules.
        ratios: of the tokens.
        spans: their sequences and turns.
        sums: over whole units and sequences, of `span_columns`.
        verdicts: bool [T] by name, the valid tokens that rules about tokens keep: `token_verdicts` and M2PO's mask.
    """
    kept_by, kept_sequences, kept_units = dict(verdicts), sums.present, None
    for rule in config.rollout_rs:
        if rule.level == "token":
            continue
        keep, ids = span_verdict(rule, sums), spans.seq_ids
        if rule.level == "turn_mean":
            ids, kept_units = spans.unit_ids, keep if kept_units is None else kept_units & keep
        else:
            kept_sequences = kept_sequences & keep
        kept_by[rule.name] = keep.index_select(0, ids) & ratios.valid
    mask = reduce(torch.logical_and, kept_by.values()) if kept_by else ratios.valid
    return Rejection(mask, kept_sequences, kept_by, _kept_lengths(spans, sums, kept_units, kept_sequences))


def _kept_lengths(
    spans: Spans, sums: SpanSums, kept_units: Tensor | None, kept_sequences: Tensor
) -> Tensor | None:
    """Sums of `passed`, the tokens that rules about tokens keep, where the others keep the unit and the sequence."""
    if "passed" not in sums.by_unit:
        return None
    lengths = sums.by_unit["passed"]
    if kept_units is not None:
        lengths = lengths * kept_units
    return lengths.view(spans.num_sequences, spans.num_turns).sum(dim=1) * kept_sequences


def span_verdict(rule: RejectionRule, sums: SpanSums) -> Tensor:
    """bool [U] (turn_mean) or [S]: the units that the rule keeps; one without valid tokens may come out either way."""
    if rule.level == "seq_max":
        return sums.by_sequence[rule.name] == 0
    values = {"turn_mean": sums.unit_means, "seq_mean": sums.sequence_means, "seq_sum": sums.by_sequence}[rule.level]
    keep = within(rule, values[rule.name])
    return keep if rule.row.spares is None else keep | (sums.by_sequence[f"input/{rule.row.spares}"] >= 0)


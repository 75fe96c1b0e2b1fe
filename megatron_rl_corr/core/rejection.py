"""Rejection rules evaluated: which tokens, turns and sequences stay in the loss. The rules are in
config/rules.py.

M2PO's mask is here too, as a rule about tokens that depends on the whole batch.

T tokens, S sequences, U units: sequences, or their turns where turns decide something; B bins of D^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.core.ratios import Spans, SpanSums, TokenRatios
from megatron_rl_corr.core.segments import Columns, segment_sums
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective

M2_BINS = 4096
M2_LOWEST, M2_OCTAVES = -40.0, 54.0
"""M2PO's bins are even in log2(D^2) from 2^-40 to 2^14, |D| = 128, 75 an octave: the cut is
exact to 1 % of D^2.
"""


@dataclass(frozen=True)
class Rejection:
    """The tokens and sequences that all rules together keep, and those that each one keeps."""

    mask: Tensor
    """bool [T]: valid and kept by every rule."""
    kept_sequences: Tensor
    """bool [S]: has valid tokens, and every rule about sequences keeps it."""
    kept_by: dict[str, Tensor]
    """The rule's name -> bool [T], True where it keeps a valid token."""
    kept_lengths: Tensor | None
    """float64 [S]: tokens of each whole sequence that all rules keep; None unless the spans
    summed `passed`.
    """

    @cached_property
    def kept_tokens(self) -> Tensor:
        """How many the mask keeps: float64 scalar."""
        return self.mask.sum(dtype=torch.float64)


def within(rule: RejectionRule, values: Tensor) -> Tensor:
    """True where a value of any shape lies in the rule's closed interval; False for NaN.

    Compared in float32: log-probs are no finer, so a value on the bound is kept whether it is one token's
    or the sum of a long sequence.
    """
    values = values.float()
    lower, upper = (None if bound is None else rule.row.scale(bound) for bound in (rule.lower, rule.upper))
    if lower is None:
        return values <= upper
    return values >= lower if upper is None else values.clamp(lower, upper) == values


def token_verdicts(config: RolloutCorrectionConfig, ratios: TokenRatios) -> dict[str, Tensor]:
    """The valid tokens that each rule of level token keeps: the rule's name -> bool [T]."""
    return {
        rule.name: within(rule, token_values(rule, ratios)) & ratios.valid
        for rule in config.rollout_rs
        if rule.level == "token"
    }


def span_columns(config: RolloutCorrectionConfig, ratios: TokenRatios) -> Columns:
    """The columns that rules about turns and sequences sum: a rule's value; for seq_max, if a
    token is outside.
    """
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
    """The rule's value for each token: [T], 0 outside the valid tokens."""
    return rule.row.value(ratios)


def _outside(rule: RejectionRule, ratios: TokenRatios) -> Tensor:
    """bool [T]: outside the interval of a seq_max rule; padding has the value 0, which lies inside."""
    return ~within(rule, token_values(rule, ratios))


def reject(
    config: RolloutCorrectionConfig,
    ratios: TokenRatios,
    spans: Spans,
    sums: SpanSums,
    verdicts: dict[str, Tensor],
) -> Rejection:
    """Apply every rule: a token stays in the loss where all rules keep it.

    Args:
        config: its rollout_rs are the rules.
        ratios: of the tokens.
        spans: their sequences and turns.
        sums: over whole units and sequences, of `span_columns`.
        verdicts: bool [T] by name, the valid tokens that rules about tokens keep: `token_verdicts`
            and M2PO's mask.
    """
    kept_by, kept_sequences, kept_units = dict(verdicts), sums.present, None
    for rule in config.rollout_rs:
        if rule.level == "token":
            continue
        keep, ids = span_verdict(rule, sums), spans.seq_ids
        if rule.level == "turn_mean":
            ids, kept_units = spans.unit_ids, keep if kept_units is None else kept_units & keep
        elif rule.row.drops is None:
            kept_sequences = kept_sequences & keep
        stays = keep.index_select(0, ids)
        if rule.row.drops is not None:  # the sequence stays, without some of its tokens
            stays = stays | ~rule.row.drops(ratios)
        kept_by[rule.name] = stays & ratios.valid
    mask = reduce(torch.logical_and, kept_by.values()) if kept_by else ratios.valid
    return Rejection(
        mask, kept_sequences, kept_by, _kept_lengths(config, spans, sums, kept_units, kept_sequences)
    )


def passed_columns(
    config: RolloutCorrectionConfig, ratios: TokenRatios, verdicts: dict[str, Tensor]
) -> Columns:
    """The columns that kept lengths are made of.

    `passed`: the tokens that rules about tokens keep. For a rule that drops some tokens of a sequence,
    `passed/NAME`: those of them that it would leave.
    """
    columns: dict = {"passed": partial(reduce, torch.logical_and, verdicts.values(), ratios.valid)}
    for rule in config.rollout_rs:
        if rule.row.drops is not None:
            columns[f"passed/{rule.name}"] = lambda rule=rule: columns["passed"]() & ~rule.row.drops(ratios)
    return columns


def _kept_lengths(
    config: RolloutCorrectionConfig,
    spans: Spans,
    sums: SpanSums,
    kept_units: Tensor | None,
    kept_sequences: Tensor,
) -> Tensor | None:
    """Sums of `passed_columns` where the rules about turns and sequences keep the unit and the sequence."""
    if "passed" not in sums.by_unit:
        return None
    lengths = sums.by_unit["passed"]
    for rule in config.rollout_rs:
        if rule.row.drops is not None:
            whole = span_verdict(rule, sums).repeat_interleave(spans.num_turns)
            lengths = torch.where(whole, lengths, sums.by_unit[f"passed/{rule.name}"])
    if kept_units is not None:
        lengths = lengths * kept_units
    return lengths.view(spans.num_sequences, spans.num_turns).sum(dim=1) * kept_sequences


def span_verdict(rule: RejectionRule, sums: SpanSums) -> Tensor:
    """bool [U] (turn_mean) or [S]: the units that the rule keeps; one without valid tokens may
    come out either way.
    """
    if rule.level == "seq_max":
        return sums.by_sequence[rule.name] == 0
    values = {"turn_mean": sums.unit_means, "seq_mean": sums.sequence_means, "seq_sum": sums.by_sequence}[
        rule.level
    ]
    keep = within(rule, values[rule.name])
    return keep if rule.row.spares is None else keep | (sums.by_sequence[f"input/{rule.row.spares}"] >= 0)


@lru_cache(maxsize=8)
def _square_bin_edges(device: torch.device) -> Tensor:
    """The upper edges of all bins but the last, float64 [B - 1]."""
    edges = [2.0 ** (M2_LOWEST + i * M2_OCTAVES / M2_BINS) for i in range(1, M2_BINS)]
    return torch.tensor(edges, dtype=torch.float64, device=device)


@collective
def second_moment_mask(ratios: TokenRatios, bound: float, groups: ParallelGroups | None) -> Tensor:
    """M2PO's mask, bool [T]: drop the tokens of largest D^2 until the mean of D^2 over the others is
    within the bound.

    Kept are the valid tokens in the bins of D^2 up to the last whose running mean over the batch is
    within bound. A histogram instead of a sort: it adds up over ranks in one all-reduce, and every rank
    cuts at the same place.

    Source: M2PO, arXiv:2510.01161.

    Args:
        ratios: of the tokens.
        bound: largest mean of D^2 over the kept tokens, `rollout_m2_threshold`.
        groups: the ranks that the batch is sharded over; None: this rank has all of it.
    """
    squares = ratios.log_ratio.square()
    bins = torch.bucketize(squares, _square_bin_edges(squares.device), right=True, out_int32=True)
    histogram = segment_sums({"squares": lambda: squares, "tokens": lambda: ratios.valid}, bins, M2_BINS)
    if groups is not None:
        histogram = groups.all_reduce_dp_cp(histogram)
    total, count = histogram.cumsum(dim=1).unbind()
    # The running mean grows with the bins, so the bins within the bound come first.
    return (total <= bound * count).index_select(0, bins) & ratios.valid

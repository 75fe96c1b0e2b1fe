"""All rules of a configuration applied: one keep mask, and what each rule keeps, in the moment table.

T tokens, S sequences; one decision per sequence or turn, where a rule is of that level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.moments import MomentTable
from megatron_rl_corr.core.rejection import divergence, log_bounds, within
from megatron_rl_corr.core.second_moment import keep_within_second_moment
from megatron_rl_corr.core.segments import segment_maxima, segment_sums
from megatron_rl_corr.core.sequence_table import SequenceTable

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


_FROM_SUMS = {"ratio": "d", "opsm": "d", "exp_abs": "e_abs", "k3": "e"}
"""Divergences whose sum over a sequence the sequence table has already."""


@dataclass(frozen=True)
class KeepMasks:
    """What the rules decided, and the per-sequence sums they decided by."""

    mask: Tensor
    """[T] bool: valid and kept by all."""
    kept_sequences: Tensor
    """[S] bool: has valid tokens, and kept by every sequence-level rule."""
    takes_sequences: bool
    """Whether there is such a rule."""
    sequences: SequenceTable
    """Sums and means per sequence."""


def decide(
    config: RolloutCorrectionConfig, table: MomentTable, valid: Tensor, seq_ids: Tensor, num_sequences: int,
    groups: ParallelGroups | None, turns: Tensor | None, advantages: Tensor | None,
) -> KeepMasks:
    """Run every rule; the rows `rule/NAME` of the table, and `kept` of several, get 1 where a valid token is kept."""
    by_sequence = [rule for rule in config.rollout_rs if rule.level.startswith("seq_")]
    sequences, extra, maxima = _sequence_partials(by_sequence, table, seq_ids, num_sequences, groups, advantages)
    kept_sequences = sequences.sums["count"] > 0
    names = [f"rule/{rule.name}" for rule in config.rollout_rs]
    for rule, name in zip(config.rollout_rs, names, strict=True):
        if rule.level == "token":
            keep = within(rule, divergence(rule.divergence, table))
            torch.mul(keep, table.row("one"), out=table.row(name))
        elif rule.level == "turn_mean":
            keep = _turn_decision(rule, table, turns)
            torch.mul(keep.index_select(0, turns), table.row("one"), out=table.row(name))
        else:
            keep = _sequence_decision(rule, sequences, extra, maxima)
            kept_sequences = kept_sequences & keep
            torch.mul(keep.index_select(0, seq_ids), table.row("one"), out=table.row(name))
    if config.rollout_m2_threshold is not None:
        names.append("rule/m2")
        keep = keep_within_second_moment(table.row("d"), valid, config.rollout_m2_threshold, groups)
        torch.mul(keep, table.row("one"), out=table.row(names[-1]))
    mask = valid
    if names:
        kept = table.row(names[0])
        if len(names) > 1:
            kept = torch.mul(kept, table.row(names[1]), out=table.row("kept"))
        for name in names[2:]:
            kept.mul_(table.row(name))
        mask = kept > 0
    return KeepMasks(mask, kept_sequences, bool(by_sequence), sequences)


def _sequence_partials(
    rules: list[RejectionRule], table: MomentTable, seq_ids: Tensor, num_sequences: int,
    groups: ParallelGroups | None, advantages: Tensor | None,
) -> tuple[SequenceTable, dict[str, Tensor], dict[str, Tensor]]:
    """Sums of the table's rows, and by name what else the rules look at; whole over cp in one collective."""
    columns, max_columns = {}, {}
    for rule in rules:
        if rule.level == "seq_max":
            value = divergence(rule.divergence, table)
            if rule.divergence == "ratio":
                max_columns |= {"above": value.clamp(min=0), "below": -value.clamp(max=0)}
            else:
                max_columns[rule.divergence] = value
        elif rule.divergence not in _FROM_SUMS:
            columns[rule.divergence] = divergence(rule.divergence, table)
        if rule.divergence == "opsm":
            columns["advantage"] = torch.where(table.row("one") > 0, advantages.double(), 0.0)
    exponentials = any(rule.divergence in ("k3", "exp_abs") for rule in rules)
    sums = segment_sums(table.rows("q_train" if exponentials else "one", "d"), seq_ids, num_sequences)
    own = len(sums)
    if columns:
        more = segment_sums(torch.stack(list(columns.values())), seq_ids, num_sequences)
        sums = torch.cat([sums, more])
    maxima = sums.new_empty(0, num_sequences)
    if max_columns:
        maxima = segment_maxima(torch.stack(list(max_columns.values())), seq_ids, num_sequences)
    if groups is not None:
        sums, maxima = groups.all_gather_cp_partials(sums, maxima)
    extra = dict(zip(columns, sums[own:].unbind(), strict=True))
    return SequenceTable(sums[:own]), extra, dict(zip(max_columns, maxima.unbind(), strict=True))


def _sequence_decision(
    rule: RejectionRule, sequences: SequenceTable, extra: dict[str, Tensor], maxima: dict[str, Tensor]
) -> Tensor:
    """bool [S]. A sequence without valid tokens may come out either way: nothing of it is kept."""
    if rule.level == "seq_max" and rule.divergence == "ratio":
        lower, upper = log_bounds(rule)
        keep = [] if upper is None else [maxima["above"].float() <= upper]
        keep += [] if lower is None else [-maxima["below"].float() >= lower]
        return keep[0] & keep[-1]
    if rule.level == "seq_max":
        return within(rule, maxima[rule.divergence])
    found = sequences.means if rule.level == "seq_mean" else sequences.sums
    if rule.divergence in extra:
        value = extra[rule.divergence]
        value = value / sequences.sums["count"].clamp(min=1) if rule.level == "seq_mean" else value
    else:
        value = found["e"] - found["d"] if rule.divergence == "k3" else found[_FROM_SUMS[rule.divergence]]
    if rule.divergence == "opsm":
        # mean(-D) above the bound, and bad on average: only then is pushing the sequence down further unsafe.
        return within(rule, -value) | (extra["advantage"] >= 0)
    return within(rule, value)


def _turn_decision(rule: RejectionRule, table: MomentTable, turns: Tensor) -> Tensor:
    """bool per turn, by the mean over its valid tokens."""
    columns = torch.stack([table.row("one"), divergence(rule.divergence, table)])
    count, total = segment_sums(columns, turns, len(turns))
    return within(rule, total / count.clamp(min=1))

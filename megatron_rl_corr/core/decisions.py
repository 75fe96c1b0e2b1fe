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
from megatron_rl_corr.core.rejection import ROW, row_bounds, within
from megatron_rl_corr.core.second_moment import keep_within_second_moment
from megatron_rl_corr.core.segments import segment_maxima, segment_sums
from megatron_rl_corr.core.sequence_table import SUMMED, SequenceTable

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


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
    turn_log_products: Tensor | None
    """[T] float64: the sum of D over each turn, where something is decided by turns."""


def decide(
    config: RolloutCorrectionConfig, table: MomentTable, valid: Tensor, seq_ids: Tensor, num_sequences: int,
    groups: ParallelGroups | None, turns: Tensor | None,
) -> KeepMasks:
    """Run every rule; the rows `rule/NAME` of the table, and `kept` of several, get 1 where a token passes, else 0.

    What stands there outside the valid tokens is of no meaning.
    """
    by_sequence = [rule for rule in config.rollout_rs if rule.level.startswith("seq_")]
    sequences, maxima = _sequence_partials(by_sequence, table, seq_ids, num_sequences, groups)
    turn_sums, turn_means = ({}, {}) if turns is None else _turn_partials(config, table, turns)
    kept_sequences = sequences.present
    verdicts = []
    for rule in config.rollout_rs:
        verdict = table.row(f"rule/{rule.name}")
        verdicts.append(verdict)
        if rule.level == "token":
            within(rule, table.row(ROW[rule.divergence]), out=verdict)
        elif rule.level == "turn_mean":
            torch.index_select(within(rule, turn_means[ROW[rule.divergence]]), 0, turns, out=verdict)
        else:
            keep = _sequence_decision(rule, sequences, maxima)
            kept_sequences = torch.mul(kept_sequences, keep, out=sequences.kept)
            torch.index_select(keep, 0, seq_ids, out=verdict)
    if config.rollout_m2_threshold is not None:
        verdicts.append(table.row("rule/m2"))
        keep_within_second_moment(table.pair("one", "square"), config.rollout_m2_threshold, groups, out=verdicts[-1])
    mask = valid
    if verdicts:
        kept = verdicts[0]
        if len(verdicts) > 1:
            kept = torch.mul(kept, verdicts[1], out=table.row("kept"))
        for verdict in verdicts[2:]:
            kept.mul_(verdict)
        mask = torch.logical_and(kept, valid)
    return KeepMasks(mask, kept_sequences > 0, bool(by_sequence), sequences, turn_sums.get("d"))


def _sequence_partials(
    rules: list[RejectionRule], table: MomentTable, seq_ids: Tensor, num_sequences: int,
    groups: ParallelGroups | None,
) -> tuple[SequenceTable, dict[tuple[str, str], Tensor]]:
    """Sums of SUMMED and of what the rules look at, and maxima by (row, side); whole over cp in one collective."""
    wanted = {SUMMED[-1]}
    columns: dict[tuple[str, str], Tensor] = {}
    for rule in rules:
        row = ROW[rule.divergence]
        if rule.level != "seq_max":
            wanted |= {row, "advantage"} if rule.divergence == "opsm" else {row}
            continue
        if rule.upper is not None:
            columns[row, "above"] = table.row(row)
        if rule.lower is not None:
            columns[row, "below"] = -table.row(row)
    last = max(wanted, key=table.index)
    sums = segment_sums(table.rows(SUMMED[0], last), seq_ids, num_sequences)
    maxima = sums.new_empty(0, num_sequences)
    if columns:
        stacked = torch.stack(list(columns.values())) if len(columns) > 1 else next(iter(columns.values()))[None]
        maxima = segment_maxima(stacked, seq_ids, num_sequences)
    if groups is not None:
        sums, maxima = groups.all_gather_cp_partials(sums, maxima)
    return SequenceTable(sums, table.names(SUMMED[0], last)), dict(zip(columns, maxima.unbind(), strict=True))


def _turn_partials(
    config: RolloutCorrectionConfig, table: MomentTable, turns: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and means over each turn's valid tokens, by row, as far as the furthest that a rule looks at."""
    looked_at = {"one"} | {ROW[rule.divergence] for rule in config.rollout_rs if rule.level == "turn_mean"}
    last = max(looked_at, key=table.index)
    names = table.names("d", last)
    sums = segment_sums(table.rows("d", last), turns, len(turns))
    by_row = dict(zip(names, sums.unbind(), strict=True))
    means = sums / by_row["one"].clamp(min=1)
    return by_row, dict(zip(names, means.unbind(), strict=True))


def _sequence_decision(
    rule: RejectionRule, sequences: SequenceTable, maxima: dict[tuple[str, str], Tensor]
) -> Tensor:
    """float64 [S]: 1 for keep. A sequence without valid tokens may come out either way: nothing of it is kept."""
    row = ROW[rule.divergence]
    if rule.level == "seq_max":
        lower, upper = row_bounds(rule)
        verdict = torch.empty_like(sequences.present)
        if upper is None:
            return torch.le(maxima[row, "below"], -lower, out=verdict)
        torch.le(maxima[row, "above"], upper, out=verdict)
        return verdict if lower is None else verdict.mul_(maxima[row, "below"] <= -lower)
    value = (sequences.means if rule.level == "seq_mean" else sequences.sums)[row]
    keep = within(rule, value)
    if rule.divergence == "opsm":
        # Only where the sequence is bad on average as well is pushing it down further unsafe.
        return torch.logical_or(keep, sequences.sums["advantage"] >= 0, out=keep)
    return keep

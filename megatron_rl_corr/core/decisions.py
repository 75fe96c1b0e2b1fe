"""All rules of a configuration applied: one keep mask, and what each rule keeps, in the moment table.

T tokens, S sequences, U units: sequences, or their turns where something is decided by turns.
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
from megatron_rl_corr.core.segments import add_segment_sums, segment_maxima
from megatron_rl_corr.core.sequence_diagnostics import SPARE_ROWS
from megatron_rl_corr.core.sequence_table import SUMMED, SequenceTable

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Units:
    """What sums are taken over before they are whole over cp."""

    ids: Tensor
    """[T] int64: the unit of each token; seq_id * turns + turn_id."""
    sequences: int
    turns: int
    """Turns of a sequence; 1 where nothing is decided by turns."""


@dataclass(frozen=True)
class KeepMasks:
    """What the rules decided, and the sums they decided by."""

    mask: Tensor
    """[T] bool: valid and kept by all."""
    kept_sequences: Tensor
    """[S] bool: has valid tokens, and kept by every sequence-level rule."""
    takes_sequences: bool
    """Whether there is such a rule."""
    sequences: SequenceTable
    """Sums and means per sequence."""
    log_products: Tensor
    """[U] float64: the sum of D over each unit."""
    kept_lengths: Tensor | None
    """[S] float64: tokens of each whole sequence that all rules keep, where the table has the row `passed`."""


def decide(
    config: RolloutCorrectionConfig, table: MomentTable, valid: Tensor, seq_ids: Tensor, units: Units,
    groups: ParallelGroups | None,
) -> KeepMasks:
    """Run every rule; the rows `rule/NAME` of the table, and `kept` of several, get 1 where a token passes, else 0.

    What stands there outside the valid tokens is of no meaning. Token rules come first: what they leave of each unit
    then travels with the unit's other sums, in the one collective over cp.
    """
    verdicts = _token_verdicts(config, table, groups)
    by_sequence = [rule for rule in config.rollout_rs if rule.level.startswith("seq_")]
    by_turn = [rule for rule in config.rollout_rs if rule.level == "turn_mean"]
    sequences, sums, maxima = _partials(config, table, units, groups)
    kept_sequences, kept_units = sequences.present, None
    for rule in by_sequence:
        keep = _sequence_decision(rule, sequences, maxima)
        kept_sequences = torch.mul(kept_sequences, keep, out=sequences.kept)
        verdicts.append(torch.index_select(keep, 0, seq_ids, out=table.row(f"rule/{rule.name}")))
    if by_turn:
        means = sums / sums[sequences.names.index("one")].clamp(min=1)
    for rule in by_turn:
        keep = within(rule, means[sequences.names.index(ROW[rule.divergence])])
        kept_units = keep if kept_units is None else kept_units * keep
        verdicts.append(torch.index_select(keep, 0, units.ids, out=table.row(f"rule/{rule.name}")))
    lengths = None
    if table.has("passed"):
        lengths = sums[sequences.names.index("passed")]
        lengths = lengths if kept_units is None else lengths * kept_units
        lengths = lengths.view(units.sequences, units.turns).sum(dim=1)
        lengths = lengths * kept_sequences if by_sequence else lengths
    mask = torch.logical_and(_product(verdicts, table), valid) if verdicts else valid
    log_products = sums[sequences.names.index("exact")]
    return KeepMasks(mask, kept_sequences > 0, bool(by_sequence), sequences, log_products, lengths)


def _token_verdicts(
    config: RolloutCorrectionConfig, table: MomentTable, groups: ParallelGroups | None
) -> list[Tensor]:
    """What needs no sum over a sequence; the row `passed`, if there, is left 1 where all of them keep a valid token."""
    verdicts = [
        within(rule, table.row(ROW[rule.divergence]), out=table.row(f"rule/{rule.name}"))
        for rule in config.rollout_rs if rule.level == "token"
    ]  # fmt: skip
    if config.rollout_m2_threshold is not None:
        verdicts.append(table.row("rule/m2"))
        keep_within_second_moment(table.pair("square", "one"), config.rollout_m2_threshold, groups, out=verdicts[-1])
    if table.has("passed"):
        for verdict in verdicts:
            table.row("passed").mul_(verdict)
    return verdicts


def _product(verdicts: list[Tensor], table: MomentTable) -> Tensor:
    """1 where all keep: the verdict itself, or the row `kept` of several."""
    if len(verdicts) == 1:
        return verdicts[0]
    kept = torch.mul(verdicts[0], verdicts[1], out=table.row("kept"))
    for verdict in verdicts[2:]:
        kept.mul_(verdict)
    return kept


def _partials(
    config: RolloutCorrectionConfig, table: MomentTable, units: Units, groups: ParallelGroups | None
) -> tuple[SequenceTable, Tensor, dict[tuple[str, str], Tensor]]:
    """Per sequence, and per unit [K, U], the sums of SUMMED and of what the rules look at; maxima by (row, side).

    Whole over cp in one collective.
    """
    wanted = {SUMMED[0]} | ({"passed"} if table.has("passed") else set())
    columns: dict[tuple[str, str], Tensor] = {}
    for rule in config.rollout_rs:
        row = ROW[rule.divergence]
        if rule.level == "seq_max":
            if rule.upper is not None:
                columns[row, "above"] = table.row(row)
            if rule.lower is not None:
                columns[row, "below"] = -table.row(row)
        elif rule.level != "token":
            wanted |= {row, "advantage"} if rule.divergence == "opsm" else {row}
    first = min(wanted, key=table.index)
    sequences = SequenceTable(table.names(first, SUMMED[-1]), units.sequences, SPARE_ROWS, table.row("one").device)
    sums = sequences.summed
    if units.turns > 1:
        sums = sums.new_zeros(len(sums), units.sequences * units.turns)
    add_segment_sums(table.rows(first, SUMMED[-1]), units.ids, out=sums)
    maxima = sums.new_empty(0, sums.shape[1])
    if columns:
        stacked = torch.stack(list(columns.values())) if len(columns) > 1 else next(iter(columns.values()))[None]
        maxima = segment_maxima(stacked, units.ids, sums.shape[1])
    if groups is not None:
        sums, maxima = groups.all_gather_cp_partials(sums, maxima)
    if units.turns > 1:
        torch.sum(sums.view(len(sums), units.sequences, units.turns), dim=2, out=sequences.summed)
        maxima = maxima.view(len(maxima), units.sequences, units.turns).amax(dim=2)
    elif sums is not sequences.summed:
        sequences.summed.copy_(sums)
    sequences.average()
    return sequences, sums, dict(zip(columns, maxima.unbind(), strict=True))


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

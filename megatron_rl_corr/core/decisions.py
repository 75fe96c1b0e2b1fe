"""All rules of a configuration applied: one keep mask, and what each rule keeps, in the moment table.

T tokens, S sequences, U units: sequences, or their turns where something is decided by turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.moments import MomentTable
from megatron_rl_corr.core.rejection import ROW, row_bounds, within
from megatron_rl_corr.core.second_moment import bins_of
from megatron_rl_corr.core.segments import add_segment_sums, take_segment_maxima
from megatron_rl_corr.core.sequence_diagnostics import SPARE_ROWS
from megatron_rl_corr.core.sequence_table import SUMMED, SequenceTable
from megatron_rl_corr.core.tokens import Tokens

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Units:
    """What sums are taken over before they are whole over cp."""

    sequences: int
    turns: int
    """Turns of a sequence; 1 where nothing is decided by turns."""


def fill_token_verdicts(config: RolloutCorrectionConfig, table: MomentTable, m2_bins: Tensor | None) -> None:
    """What needs no sum over a sequence: the rows `rule/NAME`, 1 where a token passes, else 0.

    What stands there outside the valid tokens is of no meaning. m2_bins: the bins that M2PO keeps. The row `passed`, if
    there, is left 1 where all of them keep a valid token.
    """
    verdicts = [
        within(rule, table.row(ROW[rule.divergence]), out=table.row(f"rule/{rule.name}"))
        for rule in config.rollout_rs if rule.level == "token"
    ]  # fmt: skip
    if m2_bins is not None:
        verdicts.append(torch.index_select(m2_bins, 0, bins_of(table.row("square")), out=table.row("rule/m2")))
    if table.has("passed"):
        for verdict in verdicts:
            table.row("passed").mul_(verdict)


class UnitPartials:
    """Per unit, over the tokens added so far: sums of SUMMED and of what the rules look at; maxima by (row, side).

    `sums` [K, U] of the rows `names`, and `maxima` [M, U], where -minima stand for minima; float64.
    """

    def __init__(self, config: RolloutCorrectionConfig, row_names: tuple[str, ...], units: Units, device: torch.device):
        self.units, self.sides = units, []
        wanted = {SUMMED[0]} | ({"passed"} if "passed" in row_names else set())
        for rule in config.rollout_rs:
            row = ROW[rule.divergence]
            if rule.level == "seq_max":
                self.sides += [(row, "above")] if rule.upper is not None else []
                self.sides += [(row, "below")] if rule.lower is not None else []
            elif rule.level != "token":
                wanted |= {row, "advantage"} if rule.divergence == "opsm" else {row}
        first = min(row_names.index(name) for name in wanted)
        self.names = row_names[first : row_names.index(SUMMED[-1]) + 1]
        self.sides = list(dict.fromkeys(self.sides))
        self.sequences = SequenceTable(self.names, units.sequences, SPARE_ROWS, device)
        self.sums, count = self.sequences.summed, units.sequences * units.turns
        if units.turns > 1:
            self.sums = self.sums.new_zeros(len(self.names), count)
        make = self.sums.new_zeros if self.sides else self.sums.new_empty
        self.maxima = make(len(self.sides), count)

    def add(self, table: MomentTable, unit_ids: Tensor) -> None:
        """Count a chunk of tokens in; unit_ids [T]."""
        add_segment_sums(table.rows(self.names[0], self.names[-1]), unit_ids, out=self.sums)
        if self.sides:
            columns = [table.row(row) if side == "above" else -table.row(row) for row, side in self.sides]
            stacked = torch.stack(columns) if len(columns) > 1 else columns[0][None]
            take_segment_maxima(stacked, unit_ids, out=self.maxima)


@dataclass(frozen=True)
class Decisions:
    """What the rules decided of sequences and turns, and the sums they decided by, whole over cp."""

    verdicts: dict[str, Tensor]
    """By a rule's row: float64, 1 for keep; [S], or [U] of a rule about turns (`by_turn`)."""
    by_turn: frozenset[str]
    """Those rows of `verdicts` that are about turns."""
    kept_sequences: Tensor
    """[S] bool: has valid tokens, and kept by every sequence-level rule."""
    takes_sequences: bool
    """Whether there is such a rule."""
    sequences: SequenceTable
    """Sums and means per sequence."""
    log_products: Tensor
    """[U] float64: the sum of D over each unit."""
    unit_tokens: Tensor
    """[U] float64: valid tokens of each unit."""
    kept_lengths: Tensor | None
    """[S] float64: tokens of each whole sequence that all rules keep, where the table has the row `passed`."""


def decide(config: RolloutCorrectionConfig, partials: UnitPartials, groups: ParallelGroups | None) -> Decisions:
    """Run the rules about sequences and turns, after one collective over cp that makes their sums whole."""
    units, sequences, names = partials.units, partials.sequences, partials.names
    sums, maxima = partials.sums, partials.maxima
    if groups is not None:
        sums, maxima = groups.all_gather_cp_partials(sums, maxima)
    if units.turns > 1:
        torch.sum(sums.view(len(sums), units.sequences, units.turns), dim=2, out=sequences.summed)
        maxima = maxima.view(len(maxima), units.sequences, units.turns).amax(dim=2)
    elif sums is not sequences.summed:
        sequences.summed.copy_(sums)
    sequences.average()
    largest = dict(zip(partials.sides, maxima.unbind(), strict=True))

    verdicts: dict[str, Tensor] = {}
    kept_sequences, kept_units = sequences.present, None
    by_sequence = [rule for rule in config.rollout_rs if rule.level.startswith("seq_")]
    by_turn = [rule for rule in config.rollout_rs if rule.level == "turn_mean"]
    for rule in by_sequence:
        keep = verdicts[f"rule/{rule.name}"] = _sequence_decision(rule, sequences, largest)
        kept_sequences = torch.mul(kept_sequences, keep, out=sequences.kept)
    unit_tokens = sums[names.index("one")]
    if by_turn:
        means = sums / unit_tokens.clamp(min=1)
    for rule in by_turn:
        keep = verdicts[f"rule/{rule.name}"] = within(rule, means[names.index(ROW[rule.divergence])])
        kept_units = keep if kept_units is None else kept_units * keep
    lengths = None
    if "passed" in names:
        lengths = sums[names.index("passed")]
        lengths = lengths if kept_units is None else lengths * kept_units
        lengths = lengths.view(units.sequences, units.turns).sum(dim=1)
        lengths = lengths * kept_sequences if by_sequence else lengths
    return Decisions(
        verdicts, frozenset(f"rule/{rule.name}" for rule in by_turn), kept_sequences > 0, bool(by_sequence), sequences,
        sums[names.index("exact")], unit_tokens, lengths,
    )


def fill_keep_mask(
    table: MomentTable, tokens: Tokens, decisions: Decisions, rules: tuple[str, ...], *, out: Tensor
) -> None:
    """out [T] bool: valid and kept by all `rules`. Fills the rows of rules about sums, and `kept` of several rules."""
    for row, verdict in decisions.verdicts.items():
        ids = tokens.unit_ids if row in decisions.by_turn else tokens.seq_ids
        torch.index_select(verdict, 0, ids, out=table.row(row))
    rows = [table.row(f"rule/{rule}") for rule in rules]
    kept = rows[0]
    if len(rows) > 1:
        kept = torch.mul(rows[0], rows[1], out=table.row("kept"))
        for row in rows[2:]:
            kept.mul_(row)
    torch.logical_and(kept, tokens.valid, out=out)


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

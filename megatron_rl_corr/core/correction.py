"""From two policies' log-probs to importance weights, a keep mask and the metrics that explain them.

T tokens of packed sequences (this context-parallel rank's), S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core import diagnostics
from megatron_rl_corr.core.chunks import FilledChunks
from megatron_rl_corr.core.decisions import (
    Decisions,
    UnitPartials,
    Units,
    decide,
    fill_keep_mask,
)
from megatron_rl_corr.core.diagnostics import TokenStatistics
from megatron_rl_corr.core.metrics import Max, Metric
from megatron_rl_corr.core.moments import MomentTable, constant
from megatron_rl_corr.core.rejection import ROW
from megatron_rl_corr.core.segments import turn_segments
from megatron_rl_corr.core.sequence_diagnostics import make_rows, sequence_metrics
from megatron_rl_corr.core.tokens import Tokens
from megatron_rl_corr.core.weights import LOG_CLAMP, bound_weights, unit_weights

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Lengths:
    """Whole sequences as a mean over sequences counts them: by valid tokens, or by kept ones."""

    kind: str
    """valid or kept."""

    tokens: Tensor
    """float64 [S]: tokens of this kind in each sequence, over all of cp."""

    sequences: Tensor
    """float64 scalar: sequences of the global batch that have any."""


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
    """float64 scalar: kept tokens of the global batch; 0 if the batch filter takes the whole batch."""

    lengths: Lengths
    """For means over sequences: of kept tokens where the loss_denominator asks for that, else of valid ones."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    """Device-side partials of this rank's share, by name."""

    def rows(self, start: int, stop: int) -> Correction:
        """Weights and masks of tokens [start, stop), for a microbatch; counts and lengths stay, metrics do not."""
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
    turn_ids: Tensor | None = None,
    num_turns: int | None = None,
    advantages: Tensor | None = None,
    routing: Tensor | None = None,
) -> Correction:
    """Weights w = bounded(rho), keep mask and metrics, with rho = pi_train / pi_rollout.

    train_logprobs, rollout_logprobs [T] float (subtracted in float32); loss_mask [T]; seq_ids [T] int64 in
    [0, num_sequences), the same numbering on every context-parallel rank; turn_ids [T] int64, 0 for a sequence's first
    turn, in [0, num_turns) where something is decided by turns; advantages [T], for the rule that looks at their sign;
    routing [T], the share of a token's experts in which servers and Megatron differ, for the rules of that name.
    Without `groups` this rank stands alone; with them, one collective over cp and one over dp_cp, whatever the rules
    and the loss's aggregation (one more over dp_cp for M2PO). A token whose log-prob is not finite on either side is
    dropped and counted; what stands outside the loss mask never matters.

    Raises ValueError for inputs of unlike lengths, or for a turn or advantage rule without its input.
    """
    _check_inputs(
        config, train_logprobs, rollout_logprobs, loss_mask, seq_ids, turn_ids, num_turns, advantages, routing
    )
    rules = tuple(rule.name for rule in config.rollout_rs) + ("m2",) * (config.rollout_m2_threshold is not None)
    units = Units(num_sequences, num_turns if _by_turn(config) else 1)
    tokens = _tokens(
        config, train_logprobs.float(), rollout_logprobs.float(), loss_mask.bool(), seq_ids, units, turn_ids,
        advantages, routing,
    )
    names = _rows(config, rules, turn_ids)
    chunks = FilledChunks(config, tokens, names, groups)
    # First what needs sums over whole sequences; then, with what they decided, each token.
    partials = UnitPartials(config, names, units, tokens.train.device)
    for _, chunk, table in chunks:
        partials.add(table, chunk.unit_ids)
    decisions = decide(config, partials, groups)
    shared = _shared_weights(config, decisions, make_rows(decisions.sequences))

    weighted, valid = config.rollout_is is not None, tokens.valid
    statistics = TokenStatistics(names, weighted=weighted, rules=rules, turns=turn_ids is not None)
    mask = torch.empty_like(valid) if rules else valid
    weights = torch.empty_like(tokens.train) if weighted else valid.float()
    for rows, chunk, table in chunks:
        if rules:
            fill_keep_mask(table, chunk, decisions, rules, out=mask[rows])
        if weighted:
            _fill_weights(config, table, chunk, shared)
            weights[rows].copy_(table.row("weight"))
        statistics.add(table)

    owner = groups is None or groups.cp_rank == 0
    by_sequence = sequence_metrics(decisions.sequences, has_kept=decisions.takes_sequences, owner=owner)
    lengths, counted = _lengths(decisions, by_sequence["sequences"].values, owner)
    totals, counted, scale = _over_the_batch(config, statistics.totals, counted, shared, groups, owner)
    if scale is not None:
        weights.mul_(scale)
    counts = Lengths(_lengths_kind(config), lengths, counted)
    metrics = statistics.metrics(scale) | by_sequence
    return _finish(config, weights, mask, valid, decisions, totals, counts, metrics)


def _tokens(config, train, rollout, in_mask, seq_ids, units: Units, turn_ids, advantages, routing) -> Tokens:
    difference = train - rollout
    size = difference.abs()
    valid = in_mask & (size < torch.inf)  # inf - inf is NaN, which is no smaller
    divergences = {rule.divergence for rule in config.rollout_rs}
    return Tokens(
        train, rollout, difference, size, in_mask, valid, seq_ids,
        seq_ids if units.turns == 1 else turn_segments(seq_ids, turn_ids, units.turns), turn_ids,
        advantages if "opsm" in divergences else None, routing if "routing" in divergences else None,
    )


def _lengths(decisions: Decisions, present: Tensor, owner: bool) -> tuple[Tensor, Tensor]:
    """Tokens of each whole sequence [S], and how many sequences have any [1], which only their owner counts.

    present [1]: the sequences that the metrics count, which are those with valid tokens.
    """
    kept = decisions.kept_lengths
    if kept is None:
        return decisions.sequences.sums["one"], present
    return kept, (kept > 0).sum(dtype=torch.float64)[None] * owner


def _over_the_batch(
    config: RolloutCorrectionConfig, totals: Tensor, sequences: Tensor, shared: Tensor | None,
    groups: ParallelGroups | None, owner: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`TokenStatistics.totals` and the number of sequences over the global batch, and what normalises its weights.

    One collective. The scale is 1 over the mean of the bounded weights, each unit of the weights' level that has a
    valid token counted once, before rejection (as verl does); None where they are left as they are.
    """
    parts, of_units = [totals, sequences], config.rollout_is_batch_normalize and shared is not None
    if of_units:
        # Every context-parallel rank holds all units of its sequences.
        parts.append(shared[::2].sum(dim=1) * owner)
    whole = torch.cat(parts)
    if groups is not None:
        whole = groups.all_reduce_dp_cp(whole)
    totals, counted = whole[: len(totals)], whole[len(totals)]
    if not config.rollout_is_batch_normalize:
        return totals, counted, None
    weight, units = whole[-2:] if of_units else (totals[4], totals[0])
    # With every weight 0 (all masked by IcePop) there is no scale to remove: they stay 0.
    return totals, counted, torch.where(weight > 0, units / weight, constant(1.0, torch.float64, weight.device))


def _rows(config: RolloutCorrectionConfig, rules: tuple[str, ...], turn_ids: Tensor | None) -> tuple[str, ...]:
    """Names of the moment table's rows."""
    optional = {ROW[rule.divergence] for rule in config.rollout_rs}
    optional |= {"advantage"} if any(rule.divergence == "opsm" for rule in config.rollout_rs) else set()
    optional |= set() if config.rollout_m2_threshold is None else {"square"}
    optional |= set() if turn_ids is None else {"turns"}
    if _lengths_kind(config) == "kept" and not config.diagnostics_only:
        optional |= {"passed"}
    names = () if config.rollout_is is None else ("weight", "out_of_bounds", "weight_or_inf")
    names += diagnostics.base_rows(optional)
    names += tuple(f"rule/{rule}" for rule in rules)
    return names + (("kept",) if len(rules) > 1 else ())


def _lengths_kind(config: RolloutCorrectionConfig) -> str:
    """Which tokens a mean over sequences counts; a mean over tokens needs no kept lengths, so none are made for it."""
    return "valid" if config.aggregation == "token-mean" else config.loss_denominator


def _by_turn(config: RolloutCorrectionConfig) -> list[str]:
    """What is decided by turns, by name."""
    rules = [rule.name for rule in config.rollout_rs if rule.level == "turn_mean"]
    return rules + ["turn weights"] * (config.rollout_is == "turn")


def _shared_weights(
    config: RolloutCorrectionConfig, decisions: Decisions, made: dict[str, Tensor]
) -> Tensor | None:
    """`unit_weights` of whole sequences or turns; None where each token has a weight of its own, or none has."""
    if config.rollout_is == "turn":
        less_one = decisions.log_products.clamp(-LOG_CLAMP, LOG_CLAMP).expm1_()
        return unit_weights(config, less_one, decisions.unit_tokens.clamp(max=1))
    if config.rollout_is in ("sequence", "geometric"):
        less_one = made["product" if config.rollout_is == "sequence" else "geometric"]
        return unit_weights(config, less_one, decisions.sequences.present)
    return None


def _fill_weights(
    config: RolloutCorrectionConfig, table: MomentTable, chunk: Tokens, shared: Tensor | None
) -> None:
    """The rows `weight`, bounded, `out_of_bounds`, where the bounds acted, and `weight_or_inf`, for the minimum."""
    weight, one = table.row("weight"), table.row("one")
    if shared is None:
        torch.add(table.row("e"), one, out=weight)
        bound_weights(config, weight, one, table.row("out_of_bounds"))
    else:
        ids = chunk.unit_ids if config.rollout_is == "turn" else chunk.seq_ids
        torch.index_select(shared[:2], 1, ids, out=table.rows("weight", "out_of_bounds")).mul_(one)
    nothing = constant((torch.inf,), torch.float64, weight.device)
    torch.where(chunk.valid, weight, nothing, out=table.row("weight_or_inf"))


def _finish(
    config, weights: Tensor, mask: Tensor, valid: Tensor, decisions: Decisions, totals, lengths: Lengths, metrics
) -> Correction:
    """Apply what acts on the whole batch: the filter, and the promise of diagnostics_only to change nothing."""
    valid_tokens, kept_tokens = totals[0], totals[1]
    if config.rollout_batch_filter_kl is not None:
        # k3 of the batch is (sum of e - sum of D) / n, by the same numbers on every rank.
        filtered = totals[2] - totals[3] > config.rollout_batch_filter_kl * totals[0]
        metrics["batch_filtered"] = Max(filtered.double()[None])
        kept_tokens = torch.where(filtered, constant(0.0, torch.float64, filtered.device), kept_tokens)
    if config.diagnostics_only:
        present = decisions.sequences.present > 0
        return Correction(valid.float(), valid, valid, present, valid_tokens, valid_tokens, lengths, metrics)
    return Correction(weights, mask, valid, decisions.kept_sequences, valid_tokens, kept_tokens, lengths, metrics)


def _check_inputs(config, train, rollout, loss_mask, seq_ids, turn_ids, num_turns, advantages, routing) -> None:
    given = [train, rollout, loss_mask, seq_ids] + [t for t in (turn_ids, advantages, routing) if t is not None]
    shapes = [tuple(tensor.shape) for tensor in given]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "compute_correction takes train_logprobs, rollout_logprobs, loss_mask and seq_ids (turn_ids, advantages, "
            f"routing) of one shape [T], got {', '.join(map(str, shapes))}; flatten_padded turns rows [B, L] into [T]"
        )
    by_turn = _by_turn(config)
    if by_turn and (turn_ids is None or num_turns is None):
        raise ValueError(
            f"{by_turn[0]} needs turn_ids and num_turns, above every one of them; pass both, or use another level"
        )
    if advantages is None and any(rule.divergence == "opsm" for rule in config.rollout_rs):
        raise ValueError("the off-policy sequence mask (opsm) looks at the advantages' sign; pass advantages")
    by_routing = [rule.name for rule in config.rollout_rs if rule.divergence == "routing"]
    if routing is None and by_routing:
        raise ValueError(f"{by_routing[0]} looks at where tokens were routed; pass routing, or use another rule")

"""From two policies' log-probs to importance weights, a keep mask and the metrics that explain them.

T tokens of packed sequences (this context-parallel rank's), S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core import diagnostics
from megatron_rl_corr.core.decisions import KeepMasks, decide
from megatron_rl_corr.core.metrics import Max, Metric
from megatron_rl_corr.core.moments import MomentTable, constant
from megatron_rl_corr.core.rejection import ROW
from megatron_rl_corr.core.segments import turn_segments
from megatron_rl_corr.core.sequence_diagnostics import sequence_metrics
from megatron_rl_corr.core.weights import LOG_CLAMP, bound_weights

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
    """float64 scalar: kept tokens of the global batch; 0 if the batch filter takes the whole batch."""

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
    turn_ids: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Correction:
    """Weights w = bounded(rho), keep mask and metrics, with rho = pi_train / pi_rollout.

    train_logprobs, rollout_logprobs [T] float (subtracted in float32); loss_mask [T]; seq_ids [T] int64 in
    [0, num_sequences), the same numbering on every context-parallel rank; turn_ids [T] int64, 0 for a sequence's first
    turn; advantages [T], for the rule that looks at their sign. Without `groups` this rank stands alone; with them,
    one collective over cp and one over dp_cp, whatever the number of rules (one more for M2PO). A token whose log-prob
    is not finite on either side is dropped and counted; what stands outside the loss mask never matters.

    Raises ValueError for inputs of unlike lengths, or for a turn or advantage rule without its input.
    """
    _check_inputs(config, groups, train_logprobs, rollout_logprobs, loss_mask, seq_ids, turn_ids, advantages)
    train, rollout, in_mask = train_logprobs.float(), rollout_logprobs.float(), loss_mask.bool()
    difference = train - rollout
    size = difference.abs()
    valid = in_mask & (size < torch.inf)  # inf - inf is NaN, which is no smaller

    weighted, rules = config.rollout_is is not None, tuple(rule.name for rule in config.rollout_rs)
    if config.rollout_m2_threshold is not None:
        rules += ("m2",)
    looked_at = advantages if any(rule.divergence == "opsm" for rule in config.rollout_rs) else None
    table = MomentTable(_rows(config, rules, turn_ids), len(train), train.device)
    diagnostics.fill_base_rows(
        table, train, rollout, difference, size, valid, in_mask, turn_ids=turn_ids, advantages=looked_at
    )

    turns = None if turn_ids is None else _turns(config, seq_ids, turn_ids)
    keep: KeepMasks = decide(config, table, valid, seq_ids, num_sequences, groups, turns)
    weights = _weights(config, table, keep, seq_ids, turns) if weighted else valid.float()
    totals = None
    if config.rollout_is_batch_normalize:
        totals = table.totals() if groups is None else groups.all_reduce_dp_cp(table.totals())
        weights = _normalized(table, totals)
    if weighted:
        nothing = constant((torch.inf,), torch.float64, weights.device)
        torch.where(valid, table.row("weight"), nothing, out=table.row("weight_or_inf"))

    metrics, own_totals = diagnostics.token_metrics(table, weighted=weighted, rules=rules, turns=turn_ids is not None)
    if totals is not None:
        totals = [totals[table.index(row)] for row in ("one", diagnostics.kept_row(rules), "e", "d")]
    else:
        totals = own_totals if groups is None else groups.all_reduce_dp_cp(own_totals.clone())
    metrics |= sequence_metrics(
        keep.sequences, has_kept=keep.takes_sequences, owner=groups is None or groups.cp_rank == 0
    )
    return _finish(config, weights, keep, valid, totals, metrics)


def _rows(config: RolloutCorrectionConfig, rules: tuple[str, ...], turn_ids: Tensor | None) -> tuple[str, ...]:
    """Names of the moment table's rows."""
    optional = {ROW[rule.divergence] for rule in config.rollout_rs}
    optional |= {"advantage"} if any(rule.divergence == "opsm" for rule in config.rollout_rs) else set()
    optional |= set() if config.rollout_m2_threshold is None else {"square"}
    optional |= set() if turn_ids is None else {"turns"}
    names = diagnostics.base_rows(optional)
    if config.rollout_is is not None:
        names += ("weight", "out_of_bounds", "weight_or_inf")
    names += tuple(f"rule/{rule}" for rule in rules)
    return names + (("kept",) if len(rules) > 1 else ())


def _turns(config: RolloutCorrectionConfig, seq_ids: Tensor, turn_ids: Tensor) -> Tensor | None:
    """Each token's turn as a segment number, where something is decided by turns."""
    wanted = config.rollout_is == "turn" or any(rule.level == "turn_mean" for rule in config.rollout_rs)
    return turn_segments(seq_ids, turn_ids) if wanted else None


def _weights(
    config: RolloutCorrectionConfig, table: MomentTable, keep: KeepMasks, seq_ids: Tensor, turns: Tensor | None
) -> Tensor:
    """The bounded weights [T] float32; the rows `weight` and `out_of_bounds` hold them, and where the bounds acted."""
    weight = table.row("weight")
    if config.rollout_is == "token":
        torch.add(table.row("e"), table.row("one"), out=weight)
    elif config.rollout_is == "turn":
        torch.index_select(keep.turn_log_products.clamp(-LOG_CLAMP, LOG_CLAMP).exp_(), 0, turns, out=weight)
    else:
        log_weight = keep.sequences.log_product if config.rollout_is == "sequence" else keep.sequences.means["d"]
        torch.index_select(log_weight.exp(), 0, seq_ids, out=weight)
    return bound_weights(config, weight, table.row("one"), table.row("out_of_bounds"))


def _normalized(table: MomentTable, totals: Tensor) -> Tensor:
    """The weights [T] float32 over their mean in the global batch; totals [K] of the table's rows."""
    mean = totals[table.index("weight")] / totals[table.index("one")].clamp(min=1)
    # With every weight 0 (all masked by IcePop) there is no scale to remove: they stay 0.
    return table.row("weight").div_(torch.where(mean > 0, mean, 1.0)).float()


def _finish(config, weights, keep: KeepMasks, valid, totals, metrics) -> Correction:
    """Apply what acts on the whole batch: the filter, and the promise of diagnostics_only to change nothing."""
    valid_tokens, kept_tokens = totals[0], totals[1]
    if config.rollout_batch_filter_kl is not None:
        # k3 of the batch is (sum of e - sum of D) / n, by the same numbers on every rank.
        filtered = totals[2] - totals[3] > config.rollout_batch_filter_kl * totals[0]
        metrics["batch_filtered"] = Max(filtered.double()[None])
        kept_tokens = torch.where(filtered, 0.0, kept_tokens)
    if config.diagnostics_only:
        present = keep.sequences.present > 0
        return Correction(valid.float(), valid, valid, present, valid_tokens, valid_tokens, metrics)
    return Correction(weights, keep.mask, valid, keep.kept_sequences, valid_tokens, kept_tokens, metrics)


def _check_inputs(config, groups, train, rollout, loss_mask, seq_ids, turn_ids, advantages) -> None:
    given = [train, rollout, loss_mask, seq_ids] + [t for t in (turn_ids, advantages) if t is not None]
    shapes = [tuple(tensor.shape) for tensor in given]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(
            "compute_correction takes train_logprobs, rollout_logprobs, loss_mask and seq_ids (turn_ids, advantages) "
            f"of one shape [T], got {', '.join(map(str, shapes))}; flatten_padded turns rows [B, L] into [T]"
        )
    by_turn = [rule.name for rule in config.rollout_rs if rule.level == "turn_mean"]
    by_turn += ["turn weights"] if config.rollout_is == "turn" else []
    if by_turn and turn_ids is None:
        raise ValueError(f"{by_turn[0]} needs turn_ids; pass them, or use a token or sequence level")
    if by_turn and groups is not None and groups.cp_size > 1:
        raise ValueError(
            f"{by_turn[0]} is not supported with --context-parallel-size {groups.cp_size}: a turn may be split over "
            "ranks; use a token or sequence level"
        )
    if advantages is None and any(rule.divergence == "opsm" for rule in config.rollout_rs):
        raise ValueError("the off-policy sequence mask (opsm) looks at the advantages' sign; pass advantages")

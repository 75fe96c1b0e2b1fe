"""The advantages of a batch, whose groups may be parted over replicas, and whose statistics are of all of them.

S sequences of this replica, R data x context parallel ranks, N sequences of the global batch: P prompts of G each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import WHITENED, is_own
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.segments import segment_sums
from megatron_rl_corr.mcore.batch import RolloutBatch, in_baseline, trained_tokens
from megatron_rl_corr.mcore.packed_batch import PackedBatch
from megatron_rl_corr.mcore.user_functions import own_advantages
from megatron_rl_corr.parallel.collectives import ParallelGroups, all_gather_stacked


def all_reduce_advantages(
    batch: RolloutBatch | PackedBatch, config: RolloutCorrectionConfig, groups: ParallelGroups, *, group_size: int,
    correction: Correction | None = None,
) -> Tensor:
    """The advantage of each sequence, [S] float32.

    Over dp x cp: one all-reduce of the groups' sums, where groups are parted; one of three numbers for a kind that is
    whitened; for the user's function one all-gather of five numbers a sequence. Without a correction, one all-reduce
    over cp for the last two.

    Args:
        batch: this rank's tokens.
        config: which advantage.
        groups: the ranks of the batch.
        group_size: G.
        correction: rejected sequences leave the baseline. None: all sequences, before anything is rejected.
    """
    kind = config.advantage_kind
    kept = None if correction is None else in_baseline(batch, correction.kept_sequences)
    tokens = None
    if kind in WHITENED or is_own(kind):
        tokens = _all_reduce_sampled(batch, groups) if correction is None else correction.lengths.tokens
    if is_own(kind):
        kept = torch.ones_like(batch.rewards, dtype=torch.bool) if kept is None else kept
        return _all_gather_own(kind, batch, kept, tokens, groups, group_size)

    def all_reduce_rows(table: Tensor) -> Tensor:
        # Context-parallel ranks share whole sequences: one of them counts.
        return groups.all_reduce_dp_cp(table if groups.cp_rank == 0 else torch.zeros_like(table))

    whole: dict[str, Any] = {"num_groups": batch.num_sequences // group_size}
    if batch.parted_groups:
        whole = {"num_groups": batch.parted_groups, "all_reduce": all_reduce_rows}
    return group_advantages(
        batch.rewards, batch.group_ids, kind=kind, in_baseline=kept, tokens=tokens, all_reduce_batch=all_reduce_rows,
        **whole,
    )


def _all_reduce_sampled(batch: RolloutBatch | PackedBatch, groups: ParallelGroups) -> Tensor:
    """Tokens of each whole sequence that may be trained, [S] float64."""
    mask = trained_tokens(batch)
    [tokens] = groups.all_reduce_cp(segment_sums({"tokens": lambda: mask}, batch.seq_ids, batch.num_sequences))
    return tokens


def _all_gather_own(
    spec: str, batch: RolloutBatch | PackedBatch, kept: Tensor, tokens: Tensor, groups: ParallelGroups, group_size: int,
) -> Tensor:
    """What the user's function makes of all groups of the global batch, of which this rank has some rows: [S]."""
    ranks = 1 if groups.dp_cp is None else groups.dp_cp.size()
    rank = 0 if groups.dp_cp is None else groups.dp_cp.rank()
    numbers = batch.group_ids if batch.parted_groups else batch.group_ids + rank * batch.num_sequences
    # Context-parallel ranks share whole sequences: the first of them has them, those of the others are put last.
    numbers = numbers.double() + (0.0 if groups.cp_rank == 0 else 2.0**52)
    rows = torch.stack([numbers, batch.rewards.double(), kept.double(), tokens])
    numbers, *columns = all_gather_stacked(rows, groups.dp_cp).transpose(0, 1).reshape(len(rows), -1)
    count = len(numbers) // groups.cp_size
    order = numbers.argsort(stable=True)[:count]
    rewards, kept, tokens = (column[order].view(-1, group_size) for column in columns)
    made = torch.zeros_like(numbers)
    made[order] = own_advantages(spec, rewards, kept > 0, tokens).reshape(-1)
    owner = rank if groups.cp_size == 1 else dist.get_group_rank(
        groups.dp_cp, dist.get_process_group_ranks(groups.cp)[0]
    )  # fmt: skip
    return made.view(ranks, -1)[owner].float()

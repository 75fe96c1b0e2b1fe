"""The advantages of a batch, whose groups may be parted over replicas, and whose statistics
are of all of them.

S sequences of this replica, R data x context parallel ranks, N sequences of the global batch: P prompts of
G each. T tokens of this context-parallel rank, L the longest that a sequence may be. A sample is an
episode: E of this replica, of one sequence or several, and then N are those of the global batch.
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
from megatron_rl_corr.core.token_baseline import reward_sums, token_advantages
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch, in_baseline, trained_tokens
from megatron_rl_corr.mcore.user_functions import own_advantages
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_gather_stacked, collective
from megatron_rl_corr.reduce.context import SequenceChunks


@collective
def advantages_of_batch(
    batch: RolloutBatch,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
    *,
    group_size: int,
    correction: Correction | None = None,
) -> Tensor:
    """The advantage of each sequence, [S] float32.

    Over dp x cp: one all-reduce of the groups' sums, where groups are parted; one of three numbers for a kind
    that is whitened, of two for the batch's mean; for the user's function one all-gather of four numbers a
    sample. Without a correction, one all-reduce over cp for those that count tokens.

    Args:
        batch: this rank's tokens.
        config: which advantage.
        groups: the ranks of the batch.
        group_size: G.
        correction: rejected sequences leave the baseline. None: all sequences, before
            anything is rejected.
    """
    kind = config.advantage_kind
    kept = None if correction is None else in_baseline(batch, correction.kept_sequences)
    tokens = None
    if kind in WHITENED or is_own(kind):
        tokens = _sampled_token_counts(batch, groups) if correction is None else correction.valid_lengths
    if is_own(kind):
        kept = torch.ones_like(batch.rewards, dtype=torch.bool) if kept is None else kept
        return _users_advantages(kind, batch, kept, tokens, groups, group_size)

    def all_reduce_rows(table: Tensor) -> Tensor:
        # Context-parallel ranks share whole sequences: one of them counts.
        return groups.all_reduce_dp_cp(table if groups.cp_rank == 0 else torch.zeros_like(table))

    whole: dict[str, Any] = {"num_groups": batch.num_episodes // group_size}
    if batch.parted_groups:
        whole = {"num_groups": batch.parted_groups, "all_reduce": all_reduce_rows}
    return group_advantages(
        batch.rewards,
        batch.group_ids,
        kind=kind,
        in_baseline=kept,
        tokens=tokens,
        all_reduce_batch=all_reduce_rows,
        episode_ids=batch.episode_ids,
        **whole,
    )


@collective
def token_advantages_of_batch(
    batch: RolloutBatch,
    correction: Correction,
    energies: Tensor,
    groups: ParallelGroups,
    *,
    group_size: int,
    seq_length: int,
) -> Tensor:
    """Advantages against the optimal token baseline, [T] float32. A position is a sampled token's
    number in a response.

    A token that was rejected counts nowhere, one of a sample that only baselines count has the weight 1. One
    all-reduce over cp, of the running sums of 2 S x 2 cp chunks. One over dp x cp of 3 P L numbers of 8
    bytes where groups are parted, or over cp of 3 S / G x L where they are whole: 50 MB of 64 prompts and
    32768 positions.

    Args:
        batch: this rank's tokens.
        correction: its weights and mask.
        energies: [T] of `core.token_baseline.gradient_energies`, under pi_old.
        groups: the ranks of the batch.
        group_size: G.
        seq_length: L.
    """
    sampled, counted, weights = batch.loss_mask, correction.mask, correction.weights
    if batch.in_loss is not None:
        for_baseline = sampled & ~batch.spread(batch.in_loss)
        counted = counted | (for_baseline & energies.isfinite())
        weights = torch.where(for_baseline, 1.0, weights)
    own = torch.where(counted, weights.double().square() * energies, 0.0)
    chunks = SequenceChunks.of(batch.host_starts, batch.seq_ids, groups)
    number, energy = chunks.running_sums_of_sequences(torch.stack([sampled.double(), own]), groups).unbind()
    # Sums of ones are whole: a token that was sampled is at least the first.
    position = number.long() - 1
    cells = torch.where(counted, batch.spread(batch.group_ids) * seq_length + position, 0)
    rewards, num_groups = (
        batch.spread(batch.rewards),
        batch.parted_groups or batch.num_sequences // group_size,
    )
    sums = reward_sums(rewards, energy, counted, cells, num_groups * seq_length)
    sums = groups.all_reduce_dp_cp(sums) if batch.parted_groups else groups.all_reduce_cp(sums)
    return token_advantages(rewards, sums, counted, cells, length=seq_length)


@collective
def _sampled_token_counts(batch: RolloutBatch, groups: ParallelGroups) -> Tensor:
    """Tokens of each whole sequence that may be trained, [S] float64."""
    mask = trained_tokens(batch)
    [tokens] = groups.all_reduce_cp(
        segment_sums({"tokens": lambda: mask}, batch.seq_ids, batch.num_sequences)
    )
    return tokens


@collective
def _users_advantages(
    spec: str,
    batch: RolloutBatch,
    kept: Tensor,
    tokens: Tensor,
    groups: ParallelGroups,
    group_size: int,
) -> Tensor:
    """What the user's function makes of all groups of the global batch, of which this rank
    has some rows: [S].
    """
    ranks = 1 if groups.dp_cp is None else groups.dp_cp.size()
    rank = 0 if groups.dp_cp is None else groups.dp_cp.rank()
    numbers, *samples = _by_sample(batch, kept, tokens)
    numbers = numbers if batch.parted_groups else numbers + rank * batch.num_episodes
    # Context-parallel ranks share whole sequences: the first of them has them, those of the
    # others are put last.
    numbers = numbers.double() + (0.0 if groups.cp_rank == 0 else 2.0**52)
    rows = torch.stack([numbers, *samples])
    numbers, *columns = all_gather_stacked(rows, groups.dp_cp).transpose(0, 1).reshape(len(rows), -1)
    count = len(numbers) // groups.cp_size
    order = numbers.argsort(stable=True)[:count]
    rewards, kept, tokens = (column[order].view(-1, group_size) for column in columns)
    made = torch.zeros_like(numbers)
    made[order] = own_advantages(spec, rewards, kept > 0, tokens).reshape(-1)
    owner = (
        rank
        if groups.cp_size == 1
        else dist.get_group_rank(groups.dp_cp, dist.get_process_group_ranks(groups.cp)[0])
    )
    own = made.view(ranks, -1)[owner].float()
    return own if batch.episode_ids is None else own[batch.episode_ids]


def _by_sample(batch: RolloutBatch, kept: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(group, reward, 1 where it is kept, tokens) of each sample, [E].

    Of several sequences: the mean reward of those that are kept (of all where none is), whether one is, and
    the sum of their tokens.
    """
    rewards, ids = batch.rewards.double(), batch.episode_ids
    if ids is None:
        return batch.group_ids, rewards, kept.double(), tokens
    count = batch.episode_sums(kept.double())
    own = kept | (count == 0)[ids]
    rewards = batch.episode_sums(torch.where(own, rewards, 0.0)) / batch.episode_sums(own.double())
    groups = torch.zeros_like(count, dtype=torch.int64).scatter_(0, ids, batch.group_ids)
    return groups, rewards, (count > 0).double(), batch.episode_sums(tokens)

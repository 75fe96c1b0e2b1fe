"""Advantages whose baseline knows which rows were rejected: relative to a group, or to the global batch.

N rows (sequences), G groups (prompts).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_rl_corr.config.losses import ADVANTAGES, BY_TOKEN, WHITENED
from megatron_rl_corr.core.segments import sums_of_episodes
from megatron_rl_corr.reduce.collectives import collective

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
KINDS = tuple(kind for kind in ADVANTAGES if kind not in BY_TOKEN)
"""Those of a whole row; core/token_baseline.py has those of its tokens."""


@collective
def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    num_groups: int,
    kind: str,
    in_baseline: Tensor | None = None,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    tokens: Tensor | None = None,
    all_reduce_batch: Callable[[Tensor], Tensor] | None = None,
    episode_ids: Tensor | None = None,
) -> Tensor:
    """Advantage of each row, [N] float32; mean and std are over the rows of its group that count
    in the baseline.

    group_mean: r - mean. grpo: that over (population std + 1e-6). rloo: r - mean of the other rows; for a row
    outside the baseline all that count are others. raw: r. batch_mean: r - mean over the global batch. A row
    with no row to compare it with gets 0. reinforce_plus_plus: r `whitened` over the tokens of the batch;
    reinforce_plus_plus_baseline: r - the mean of its group, whitened.

    Where several rows are of one episode, its group counts it once, with the mean reward of those of its rows
    that count; rloo's other rows are those of other episodes. A row has the advantage of its own r.
    `whitened` counts tokens, and so those of each row.

    Sources: GRPO, arXiv:2402.03300, eq. 4; Dr.GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740, eq. 8;
    REINFORCE++, arXiv:2501.03262, and verl's estimators of these two names.

    Args:
        rewards: [N] float; those outside the baseline may be NaN.
        group_ids: [N] int64 in [0, num_groups).
        num_groups: G.
        kind: one of KINDS.
        in_baseline: [N] bool, the rows that mean and std count; None: all.
        all_reduce: sums a table [3, G] float64 of the groups over the ranks that have other rows of theirs,
            where groups are parted; None: groups are whole.
        tokens: [N] float64, tokens of each row that are trained; for kinds that are whitened.
        all_reduce_batch: sums a small tensor over the ranks that have other rows of the global batch; None:
            all rows are here.
        episode_ids: [N] int64 in [0, N), the episode of each row; all rows of one are here, and of one group.
            None: each row is one.

    Raises:
        ValueError: an unknown kind, or one that is whitened without tokens.
    """
    if kind not in KINDS:
        raise ValueError(f"advantage must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "raw":
        return rewards.float()
    if kind in WHITENED and tokens is None:
        raise ValueError(f"advantage {kind} is whitened over tokens; pass tokens, those of each row")
    counted = torch.ones_like(rewards, dtype=torch.float64) if in_baseline is None else in_baseline.double()
    values = rewards.double()
    if kind == "reinforce_plus_plus":
        return whitened(values, torch.where(counted > 0, tokens, 0.0), all_reduce_batch)

    # Rewards outside the baseline may be anything, NaN too: select, never multiply.
    own, present, groups = torch.where(counted > 0, values, 0.0), counted, group_ids
    if episode_ids is not None:  # what groups sum has a place for each episode
        rows = sums_of_episodes(counted, episode_ids)
        own, present = sums_of_episodes(own, episode_ids) / rows.clamp(min=1), (rows > 0).double()
        groups = torch.zeros_like(group_ids).scatter_(0, episode_ids, group_ids)

    if kind == "batch_mean":
        sums = torch.stack([present.sum(), own.sum()])
        count, total = (sums if all_reduce_batch is None else all_reduce_batch(sums)).unbind()
        return torch.where(count > 0, values - total / count.clamp(min=1), 0.0).float()

    def group_sum(summed: Tensor) -> Tensor:
        return summed.new_zeros(num_groups).index_add_(0, groups, summed)

    if all_reduce is None:
        counts, totals = group_sum(present), group_sum(own)
    else:
        counts, totals, squares = all_reduce(
            torch.stack([group_sum(present), group_sum(own), group_sum(own.square())])
        )
    count, total = counts[group_ids], totals[group_ids]
    if kind == "rloo":
        if episode_ids is not None:
            own, present = own[episode_ids], present[episode_ids]
        others = count - present
        return torch.where(others > 0, values - (total - own) / others.clamp(min=1), 0.0).float()
    size = count.clamp(min=1)
    centred = values - total / size
    if kind == "grpo":
        if all_reduce is None:
            from_mean = torch.where(present > 0, own - (totals / counts.clamp(min=1))[groups], 0.0)
            variance = group_sum(from_mean.square())[group_ids] / size
        else:
            variance = (squares[group_ids] / size - (total / size).square()).clamp(min=0)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    centred = torch.where(count > 0, centred, 0.0)
    if kind == "reinforce_plus_plus_baseline":
        return whitened(centred, torch.where(counted > 0, tokens, 0.0), all_reduce_batch)
    return centred.float()


@collective
def whitened(values: Tensor, weights: Tensor, all_reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """(v - m) / sqrt(s^2 + 1e-8) of each row, [N] float32; m and s^2 are over the weights of
    the global batch.

    With W = sum w: m = sum w v / W, s^2 = sum w (v - m)^2 / (W - 1). So a row counts once for each of its
    tokens, as in verl's masked_whiten, where each token has its row's value. Where all v are float32 and
    equal, m = v exactly and the result is 0: products and sums fit into float64's 53 bits up to 2^29 tokens.
    A row of weight 0 may hold anything.

    Args:
        values: [N] float64.
        weights: [N] float64, whole numbers.
        all_reduce: sums a tensor of three over the ranks that have other rows; None: all rows are here.
    """
    counted = torch.where(weights > 0, values, 0.0)
    sums = torch.stack([weights.sum(), (weights * counted).sum(), (weights * counted.square()).sum()])
    total, first, second = (sums if all_reduce is None else all_reduce(sums)).unbind()
    mean = first / total.clamp(min=1)
    variance = (second - total * mean.square()).clamp(min=0) / (total - 1).clamp(min=1)
    return ((values - mean) * (variance + VARIANCE_EPSILON).rsqrt()).float()

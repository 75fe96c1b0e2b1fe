"""Sends the leader's batch to its replica: each rank gets its own tokens, and of these what its stage reads.

S sequences of the replica, T tokens of them on this context-parallel rank, padding included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.batch.rollout_batch import AgentBranches, RolloutBatch
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_runs
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.slices import scatter_slices


@collective
def share_batch(
    batch: RolloutBatch | None,
    samples: int,
    layout: Layout,
    *,
    multiple: int,
    num_turns: int | None = None,
    means_of: AgentBranches | None = None,
    top_logprobs: int = 0,
) -> RolloutBatch:
    """This rank's share of the data leader's batch; every rank of the replica calls it.

    One broadcast of five numbers a sequence, six with episodes; where tokens lie follows from the lengths. Of
    its tokens the first stage gets the ids, 4 bytes each, and the last also labels, mask with versions,
    log-probs and turns: 16 bytes each, 20 with turns, and 8 for each of the K likeliest ids. Stages between
    them get none.

    Args:
        batch: whole, on the host, on the data leader; None on others.
        samples: S, the same on each rank.
        layout: this rank's process groups.
        multiple: each sequence is padded to one.
        num_turns: the largest number of turns of a sample; None without an environment.
        means_of: as the batch's field, where it has episodes; None: each sample is one.
        top_logprobs: K.
    """
    device, cp = communication_device(), (layout.cp_group.rank(), layout.cp_size)
    numbers = 5 if means_of is None else 6
    rows = torch.zeros(numbers, samples, dtype=torch.float64) if batch is None else _rows_of(batch)
    rows = rows.to(device)
    broadcast_to_replica([rows], layout)
    lengths, rewards, group_ids, version_lags, in_loss, *episodes = rows
    own = replace(
        RolloutBatch.bare(lengths.long().cpu().numpy(), multiple, cp=cp, device=device),
        rewards=rewards.float(),
        group_ids=group_ids.long(),
        version_lags=version_lags.float(),
        in_loss=in_loss.bool(),
        num_turns=num_turns,
    )
    if means_of is not None:
        own = replace(own.of_episodes(episodes[0].long().cpu().numpy()), means_of=means_of)
    boundaries, count = own.cu_seqlens.tolist(), own.num_tokens

    def columns_of(stage: int) -> int:
        if stage < layout.pp_size - 1:
            return 1
        return (4 if num_turns is None else 5) + 2 * top_logprobs

    def slice_of(stage: int, rank: int) -> Tensor:
        runs = zigzag_runs(rank, layout.cp_size, boundaries)
        into = torch.empty(columns_of(stage), count, dtype=torch.int32, pin_memory=device.type == "cuda")
        # The lag of a sampled label travels with the mask: 0 where it was not sampled, else 1 + its lag.
        columns = (
            lambda at: batch.tokens[at],
            lambda at: batch.labels[at],
            lambda at: batch.loss_mask[at] * (1 + batch.token_lags[at]),
            lambda at: batch.rollout_logprobs[at].view(torch.int32),
            *([] if num_turns is None else [lambda at: batch.turn_ids[at]]),
            *(partial(_column, batch.top_ids, column) for column in range(top_logprobs)),
            *(partial(_column, batch.top_logprobs, column) for column in range(top_logprobs)),
        )
        for row, column in zip(into, columns, strict=False):
            torch.cat([column(slice(*run)).int() for run in runs], out=row)
        return into

    values = torch.empty(columns_of(layout.pp_rank), count, dtype=torch.int32, device=device)
    stages = {0, layout.pp_size - 1}
    scatter_slices(None if batch is None else slice_of, values, layout, stages=stages)
    if layout.pp_rank not in stages:
        return own
    own = replace(own, tokens=values[0].long())
    if not layout.is_last_stage:
        return own
    return replace(
        own,
        labels=values[1].long(),
        loss_mask=values[2] > 0,
        token_lags=(values[2] - 1).clamp_(min=0).long(),
        rollout_logprobs=values[3].view(torch.float32).clone(),
        turn_ids=None if num_turns is None else values[4].long(),
        top_ids=_rows_of_columns(values[-2 * top_logprobs : -top_logprobs]) if top_logprobs else None,
        top_logprobs=_rows_of_columns(values[-top_logprobs:]).view(torch.float32) if top_logprobs else None,
    )


def _column(values: Tensor, column: int, at: slice) -> Tensor:
    """One of K values [T, K] of these tokens, its bits as int32."""
    return values[at, column].contiguous().view(torch.int32)


def _rows_of_columns(columns: Tensor) -> Tensor:
    """[K, T] -> [T, K], with memory of its own."""
    return columns.t().contiguous()


def _rows_of(batch: RolloutBatch) -> Tensor:
    """[5, S] float64: length, reward, group, lag of the version, and 1 for a sample in the loss; [6, S] with
    the episode.
    """
    in_loss = torch.ones_like(batch.rewards) if batch.in_loss is None else batch.in_loss
    rows = [torch.from_numpy(batch.lengths), batch.rewards, batch.group_ids, batch.version_lags, in_loss]
    rows += [] if batch.episode_ids is None else [batch.episode_ids]
    return torch.stack([row.double() for row in rows])

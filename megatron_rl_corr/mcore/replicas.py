"""Sends what a replica's data leader has to the other ranks of its replica."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.reduce.layout import Layout


def broadcast_to_replica(tensors: list[Tensor], layout: Layout) -> None:
    """Send tensors from the first rank of the first stage to its stage, and from there
    down every pipeline.
    """
    if layout.pp_rank == 0:
        _broadcast_from_first(tensors, layout.tp_cp_group)
    _broadcast_from_first(tensors, layout.pp_group)


def _broadcast_from_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)


def broadcast_batch(batch: Any, layout: Layout, *, num_turns: int | None) -> dict[str, Tensor | None]:
    """The fields of a batch that its leader knows, on its whole replica: two tensors are sent.

    Args:
        batch: padded or packed, of the same shapes on all ranks; only the leader's values count.
        layout: this rank's process groups.
        num_turns: the largest number of turns of a sample; None without an environment, and
            turn_ids are not sent.
    """
    # The lag of a sampled label travels with the mask: 0 for a label that was not sampled, else 1 + its lag.
    integers = [batch.tokens, batch.labels, batch.loss_mask * (1 + batch.token_lags)]
    if num_turns is not None:
        integers.append(torch.zeros_like(batch.tokens) if batch.turn_ids is None else batch.turn_ids)
    whole = torch.stack(integers).contiguous()
    in_loss = torch.ones_like(batch.rewards) if batch.in_loss is None else batch.in_loss.float()
    rows = torch.stack([batch.rewards, batch.group_ids.float(), batch.version_lags, in_loss])
    real = torch.cat([batch.rollout_logprobs.reshape(-1), rows.reshape(-1)])
    broadcast_to_replica([whole, real], layout)
    logprobs, rows = real.split([batch.rollout_logprobs.numel(), rows.numel()])
    rewards, group_ids, lags, in_loss = rows.view(4, -1)
    return {
        "tokens": whole[0],
        "labels": whole[1],
        "loss_mask": whole[2] > 0,
        "token_lags": (whole[2] - 1).clamp_(min=0),
        "turn_ids": None if num_turns is None else whole[3],
        "rollout_logprobs": logprobs.view_as(batch.rollout_logprobs),
        "rewards": rewards,
        "group_ids": group_ids.long(),
        "version_lags": lags,
        "in_loss": in_loss.bool(),
    }

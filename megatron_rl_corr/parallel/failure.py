"""Failing together: when one rank cannot go on, the others learn of it instead of waiting for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class PeerFailure(RuntimeError):
    """Another rank failed and has said why; this one only stops."""


def all_reduce_failure(error: BaseException | None, group: ProcessGroup | None = None) -> None:
    """Return where no rank of the group has an error; else raise it on the first rank that has one.

    All other ranks get PeerFailure, those with an error of their own too: one cause is told once, not by a thousand
    ranks. One collective of one number; every rank of the group must call it.
    """
    rank, nobody = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor(nobody if error is None else rank, device=communication_device())
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if first.item() == rank and error is not None:
        raise error
    if first.item() < nobody:
        raise PeerFailure("another rank failed; its message says why")


def communication_device() -> torch.device:
    """Where tensors of this job's collectives live: NCCL takes device tensors only."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

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
    ranks. One collective of two numbers; every rank of the group must call it.
    """
    all_reduce_done(True, error, group)


def all_reduce_done(done: bool, error: BaseException | None, group: ProcessGroup | None = None) -> bool:
    """Whether every rank is done; a failure is raised as by `all_reduce_failure`, whose collective this is.

    For what may take longer than a collective may wait: the ranks that are not done ask again from time to time.
    """
    rank, nobody = dist.get_rank(group), dist.get_world_size(group)
    told = torch.tensor([nobody if error is None else rank, int(done)], device=communication_device())
    dist.all_reduce(told, op=dist.ReduceOp.MIN, group=group)
    first, all_done = told.tolist()
    if first == rank and error is not None:
        raise error
    if first < nobody:
        raise PeerFailure("another rank failed; its message says why")
    return bool(all_done)


def communication_device() -> torch.device:
    """Where tensors of this job's collectives live: NCCL takes device tensors only."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

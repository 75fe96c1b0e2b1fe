"""Failing together: when one rank cannot go on, the others learn of it instead of waiting for it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class PeerFailure(RuntimeError):
    """Another rank failed and has said why; this one only stops."""


def all_reduce_failure(error: BaseException | None, group: ProcessGroup | None = None) -> None:
    """Raise `error` on the ranks that have one and PeerFailure on the others; return where none has one.

    One collective of one number; every rank of the group must call it.
    """
    failed = torch.tensor(0.0 if error is None else 1.0, device=communication_device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if error is not None:
        raise error
    if failed.item():
        raise PeerFailure("another rank failed; its message says why")


def communication_device() -> torch.device:
    """Where tensors of this job's collectives live: NCCL takes device tensors only."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

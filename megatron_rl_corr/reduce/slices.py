"""Sends each rank of a replica its slice of what the data leader has: no rank holds another's.

A slice is what one pipeline stage needs of the tokens of one context-parallel rank; the tensor-parallel ranks
of both have the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.reduce.collectives import collective, exchange
from megatron_rl_corr.reduce.layout import Layout

UNDER_WAY = 2
"""Slices that a leader holds at once beside its own: one that travels, one that is made."""


@collective
def scatter_slices(
    make: Callable[[int, int], Tensor] | None, own: Tensor, layout: Layout, *, stages: set[int]
) -> None:
    """Fill every rank's slice; every rank of the replica calls it, and all ranks must have met before.

    The leader sends each slice straight to the first tensor-parallel rank that needs it, which shares it with
    the others of its group.

    Args:
        make: make(stage, context-parallel rank) is that slice, in any memory; on the data leader. None on
            others.
        own: this rank's slice, which is filled: contiguous, on the communication device. Of one without
            elements nothing is sent. Not used on stages that get none.
        layout: this rank's process groups.
        stages: which get a slice.
    """
    gets_one = layout.pp_rank in stages and own.numel() > 0
    if make is not None:
        # The leader's own comes last, when nothing else is under way.
        places = [(stage, rank) for stage in sorted(stages) for rank in range(layout.cp_size)]
        places = [place for place in places if place != (0, 0)]
        _send_each(
            (make(*place).to(own.device, non_blocking=True), layout.replica_rank(*place)) for place in places
        )
        if gets_one:
            own.copy_(make(0, 0))
    elif gets_one and layout.tp_group.rank() == 0:
        exchange([dist.P2POp(dist.irecv, _bytes(own), layout.replica_rank(0, 0))])
    if gets_one and layout.tp_group.size() > 1:
        source = dist.get_process_group_ranks(layout.tp_group)[0]
        dist.broadcast(_bytes(own), source, group=layout.tp_group)


@collective
def _send_each(slices: Iterable[tuple[Tensor, int]]) -> None:
    """Send tensors to ranks of the job, as they are made: while one travels the next is made."""
    under_way: deque[tuple[list[dist.Work], Tensor]] = deque()
    for tensor, rank in slices:
        if not tensor.numel():  # nothing is expected there
            continue
        under_way.append((dist.batch_isend_irecv([dist.P2POp(dist.isend, _bytes(tensor), rank)]), tensor))
        del tensor
        if len(under_way) == UNDER_WAY:
            _wait(*under_way.popleft())
    while under_way:
        _wait(*under_way.popleft())


def _wait(works: list[dist.Work], tensor: Tensor) -> None:
    for work in works:
        work.wait()
    if tensor.is_cuda:
        # The host runs ahead of the device: it would make all slices, and keep all in its memory.
        torch.cuda.current_stream().synchronize()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: no backend sends int16."""
    return tensor.view(-1).view(torch.uint8)

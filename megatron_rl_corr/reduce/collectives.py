"""Every collective of the correction and its metrics.

K columns, U sequences or turns, R ranks, M microbatches, P packed values of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.reduce.metrics import Metric

try:
    from torch.distributed import all_gather_single
except ImportError:  # before torch 2.14; from then on the old name warns on every rank
    from torch.distributed import all_gather_into_tensor as all_gather_single


def collective[Function: Callable](function: Function) -> Function:
    """Mark a function that exchanges something between ranks: all of them call it, in the same order.

    Its docstring says which ranks. What calls it is collective too and is marked, which
    tests/conventions/test_collectives.py checks. A rank that leaves a call out makes the others wait.
    """
    return function


@dataclass(frozen=True)
class ParallelGroups:
    """Groups of one pipeline stage; None means this rank alone.

    Tensor-parallel ranks hold the same tokens, expert-parallel ranks lie in dp_cp: neither is summed over.
    """

    cp: ProcessGroup | None = None
    """Ranks that hold slices of the same sequences."""

    dp_cp: ProcessGroup | None = None
    """Ranks that together hold each token of the global batch once."""

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return 1 if self.cp is None else self.cp.size()

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.cp is None else self.cp.rank()

    @collective
    def all_reduce_cp(self, sums: Tensor) -> Tensor:
        """Sums [K, U] over tokens -> over whole sequences: one collective, in place.

        An all-reduce adds each element up in one place and copies it, so that all ranks decide alike.
        """
        return all_reduce(sums, self.cp)

    @collective
    def all_reduce_dp_cp(self, totals: Tensor) -> Tensor:
        """A small tensor summed over the global batch: one collective, in place."""
        return all_reduce(totals, self.dp_cp)


@collective
def all_reduce(values: Tensor, group: ProcessGroup | None, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the group, in place: one collective; without a group, or alone in it, none."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op, group=group)
    return values


@collective
def all_gather_stacked(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[...] on each of R ranks -> [R, ...] on all, in rank order: one collective; alone, a view."""
    if group is None or group.size() == 1:
        return tensor[None]
    # Flat, because gloo takes only the concatenation of its inputs' first dimension, not a new one.
    gathered = tensor.new_empty(group.size() * tensor.numel())
    all_gather_single(gathered, tensor.contiguous().view(-1), group=group)
    return gathered.view(group.size(), *tensor.shape)


@collective
def gather_to(tensor: Tensor, group: ProcessGroup | None, to: int, members: Sequence[int]) -> Tensor | None:
    """[...] of some ranks of a group -> [M, ...] on one of its ranks, in the order of the members; None on
    all others.

    Each member sends its own straight to that rank, and no other rank holds more than its own tensor. Every
    member and that rank call it; the rest of the group may. The group must have met in a collective before,
    as NCCL makes its connections with all ranks at once.

    Args:
        tensor: of the same shape on every member.
        group: None: this rank alone.
        to: the rank in the group that receives.
        members: ranks in the group, at least one.
    """
    own = 0 if group is None else group.rank()
    if own != to:
        if own in members:
            exchange([dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=to)])
        return None
    if list(members) == [own]:
        return tensor[None]
    gathered = tensor.new_empty(len(members), *tensor.shape)
    exchange(
        [
            dist.P2POp(dist.irecv, place, group=group, group_peer=member)
            for place, member in zip(gathered, members, strict=True)
            if member != own
        ]
    )
    if own in members:
        gathered[list(members).index(own)].copy_(tensor)
    return gathered


@collective
def exchange(operations: list[dist.P2POp]) -> None:
    """Send and receive tensors between pairs of ranks, all at once; of each pair both call it."""
    for work in dist.batch_isend_irecv(operations):
        work.wait()


_COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def merge(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several microbatches [M] as one dict.

    Raises:
        ValueError: microbatches hold unlike names.
    """
    parts = list(parts)
    if not parts:
        return {}
    for part in parts[1:]:
        if part.keys() != parts[0].keys():
            raise ValueError(f"microbatches hold unlike metrics: {sorted(part.keys() ^ parts[0].keys())}")
    merged = {}
    for name, metric in parts[0].items():
        values = torch.stack([part[name].values for part in parts])
        merged[name] = type(metric)(_COMBINE[metric.reduction](values, dim=0))
    return merged


@collective
def all_reduce_metrics(metrics: dict[str, Metric], group: ProcessGroup | None) -> dict[str, float]:
    """Every metric as a number over the group, exact whatever its reduction: two all-reduces
    and one host read.

    Sums travel in one, maxima and negated minima in the other: P float64 values in all, about 4 kB,
    however many ranks there are. Every rank of the group must hold the same names; they are packed
    in sorted order.
    """
    names = sorted(metrics, key=lambda name: (metrics[name].reduction != "sum", name))
    if not names:
        return {}
    values = [
        -metrics[name].values if metrics[name].reduction == "min" else metrics[name].values for name in names
    ]
    packed = torch.cat(values)
    first_extremum = sum(metrics[name].values.numel() for name in names if metrics[name].reduction == "sum")
    sums, extrema = packed[:first_extremum], packed[first_extremum:]
    if first_extremum:
        all_reduce(sums, group)
    if len(extrema):
        all_reduce(extrema, group, dist.ReduceOp.MAX)
    host, numbers, start = packed.tolist(), {}, 0
    for name in names:
        stop = start + metrics[name].values.numel()
        part = (
            [-value for value in host[start:stop]] if metrics[name].reduction == "min" else host[start:stop]
        )
        numbers |= metrics[name].numbers(name, part)
        start = stop
    return numbers

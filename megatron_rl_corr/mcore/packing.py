"""Which sequences share a microbatch: packs of at most so many tokens, of about equal cost.

S sequences of one replica, B packs (microbatches). All of it is host arithmetic on lengths, the same on every rank of
the replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.parallel.failure import communication_device


@dataclass(frozen=True)
class PackLimits:
    """How large packs may be, and what a sequence of them costs. Example: 8192 tokens, 3e-5, multiples of 4."""

    max_tokens: int
    """--rollout-max-tokens-per-microbatch: of a pack, over all context-parallel ranks."""
    attention_share: float = 0.0
    """Cost of one pair of tokens in attention, over that of one token everywhere else."""
    count_multiple: int = 1
    """The number of packs is a multiple of it: interleaved pipeline stages take microbatches in groups."""

    def cost(self, length: int) -> float:
        """Of a sequence, in tokens without attention: n + attention_share * n^2 / 2 (each token sees those before)."""
        return length + self.attention_share * length * length / 2


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of the costs in so many parts of about equal sums, by the largest differencing method.

    Partial solutions start as one cost beside zeros. The two of the widest spread are joined, the largest part of one
    with the smallest of the other, until one is left. Equal costs are joined in their order, so all ranks agree.

    Source: Karmarkar and Karp, The differencing method of set partitioning, 1982.

    Args:
        costs: nonnegative, one an item.
        parts: at least 1.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs):
        heap.append((-cost, index, [(cost, [index])] + [(0.0, [])] * (parts - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    found = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return sorted(found, key=lambda items: items[:1] or [len(costs)])


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the lengths in packs of at most max_tokens: longest first, each into the first pack with room.

    A sequence that is longer has a pack of its own.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((at for at, free in enumerate(room) if free >= lengths[index]), None)
        if fits is None:
            packs.append([])
            room.append(max_tokens)
            fits = len(packs) - 1
        packs[fits].append(index)
        room[fits] -= lengths[index]
    return [sorted(pack) for pack in packs]


def balanced_packs(lengths: Sequence[int], count: int, limits: PackLimits) -> list[list[int]]:
    """Indices of the lengths in `count` packs within the limit; packs are empty where there are fewer sequences.

    Balanced by cost where the limit allows it, else by tokens, else first fit with its largest packs cut in two.

    Args:
        lengths: tokens of each sequence, with its padding.
        count: at least `len(first_fit(...))`.
        limits: of a pack.
    """
    for costs in ([limits.cost(length) for length in lengths], lengths):
        packs = karmarkar_karp(costs, count)
        if all(sum(lengths[i] for i in pack) <= limits.max_tokens or len(pack) == 1 for pack in packs):
            return packs
    packs = first_fit(lengths, limits.max_tokens)
    assert len(packs) <= count, "more packs than there may be"
    while len(packs) < count:
        largest = max(packs, key=lambda pack: (len(pack) > 1, sum(lengths[i] for i in pack)))
        if len(largest) < 2:
            packs.append([])
            continue
        packs.remove(largest)
        halves = karmarkar_karp([lengths[i] for i in largest], 2)
        packs += [[largest[i] for i in half] for half in halves]
    return packs


def all_reduce_pack_count(needed: int, limits: PackLimits, group: ProcessGroup) -> int:
    """The number of packs that every replica makes: the most that one needs, and a multiple of limits.count_multiple.

    Waits for the device: Python has to know how often to run the model.
    """
    count = torch.tensor([needed], dtype=torch.int64, device=communication_device())
    if group.size() > 1:
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    most = max(int(count), 1)
    return -(-most // limits.count_multiple) * limits.count_multiple

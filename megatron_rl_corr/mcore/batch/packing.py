"""Which sequences share a microbatch: packs of at most so many tokens, of about equal cost.

S sequences of one replica, B packs (microbatches). All of it is host arithmetic on lengths, the same on
every rank of the replica.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device


@dataclass(frozen=True)
class PackLimits:
    """How large packs may be, and what a sequence of them costs. Example: 8192 tokens,
    3e-5, multiples of 4.
    """

    max_tokens: int
    """--rollout-max-tokens-per-microbatch: of a pack, over all context-parallel ranks."""
    attention_share: float = 0.0
    """Cost of one pair of tokens in attention, over that of one token everywhere else."""
    count_multiple: int = 1
    """The number of packs is a multiple of it: interleaved pipeline stages take microbatches in groups."""

    def cost(self, length: int, squares: int | None = None) -> float:
        """n + attention_share * n^2 / 2 (each token sees those before), in tokens without attention.

        Args:
            length: n; of several sequences the sum.
            squares: of several sequences the sum of n^2.
        """
        return length + self.attention_share * (length * length if squares is None else squares) / 2


def attention_share(args: argparse.Namespace) -> float:
    """`PackLimits.attention_share` of Megatron's model: 2 A / P with A the width of all heads, P a
    layer's weights.

    A token costs 2 P operations forward, a pair of tokens 4 A (its product of query and key, and of weight
    and value). Experts count that a token goes to.
    """
    heads = args.num_attention_heads * args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    matrices = 3 if args.swiglu or vars(args).get("quick_geglu") else 2
    width = args.ffn_hidden_size
    if args.num_experts:
        width = args.moe_router_topk * args.moe_ffn_hidden_size + (
            args.moe_shared_expert_intermediate_size or 0
        )
    layer = args.hidden_size * (2 * heads + 2 * groups * args.kv_channels + matrices * width)
    blocks = args.num_layers if vars(args).get("hybrid_layer_pattern") is None else args.num_layers / 2
    # before 0.18 a command line that is only checked has no size, and makes no packs
    vocabulary = vars(args).get("padded_vocab_size") or 0
    return 2 * heads / (layer + args.hidden_size * vocabulary / blocks)


def pack_limits(args: argparse.Namespace) -> PackLimits | None:
    """The run's, from all its flags; None with --rollout-pad-sequences."""
    if args.rollout_pad_sequences:
        return None
    tokens = args.rollout_max_tokens_per_microbatch or args.seq_length * args.micro_batch_size
    return PackLimits(tokens, attention_share(args), microbatch_multiple(args))


def check_packed_branches(limits: PackLimits | None) -> None:
    """ValueError for padded rows where a sample may have several sequences, so that replicas have other
    numbers of them.
    """
    if limits is None:
        raise ValueError(
            "--rollout-pad-sequences: each replica has the same number of rows, and an agent's episodes may "
            "have any number of sequences; leave it out, so that they are packed"
        )


def microbatch_multiple(args: argparse.Namespace) -> int:
    """A pass of the model takes a multiple of so many microbatches: interleaved pipeline stages
    take them in groups.
    """
    stages = args.virtual_pipeline_model_parallel_size and args.pipeline_model_parallel_size
    return args.microbatch_group_size_per_vp_stage or stages or 1


def karmarkar_karp(costs: Sequence[float], parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Indices of the costs in so many parts of about equal sums, by the largest differencing method.

    Partial solutions start as one cost beside zeros. The two of the widest spread are joined, the largest
    part of one with the smallest of the other, until one is left. Equal costs are joined in their order, so
    all ranks agree.

    Source: Karmarkar and Karp, The differencing method of set partitioning, 1982.

    Args:
        costs: nonnegative, one an item.
        parts: at least 1.
        equal_sizes: parts have equal numbers of items, of which there is a multiple of `parts`. Partial
            solutions then start as one item in each part, with costs next to each other.
    """
    step = parts if equal_sizes else 1
    assert len(costs) % step == 0, f"{len(costs)} items in {parts} equal parts"
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), step):
        items = [(costs[i], [i]) for i in order[start : start + step]] + [(0.0, [])] * (parts - step)
        heap.append((items[-1][0] - items[0][0], start, items))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, one = heapq.heappop(heap)
        _, second, other = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    if not heap:
        return [[] for _ in range(parts)]
    found = [items for _, items in heap[0][2]]
    if equal_sizes:
        _swap(np.asarray(costs, dtype=np.float64), found)
    return sorted(map(sorted, found))


def _swap(costs: np.ndarray, parts: list[list[int]]) -> None:
    """Swap an item of the largest part with one of the smallest, in place, for as long as that
    narrows the two.

    Parts of equal sizes need it: with few items in each, differencing alone leaves them
    some percent apart.
    """
    for _ in range(len(costs)):
        sums = [costs[part].sum() for part in parts]
        high, low = int(np.argmax(sums)), int(np.argmin(sums))
        gap = sums[high] - sums[low]
        moved = costs[parts[high]][:, None] - costs[parts[low]][None]
        left = np.abs(gap - 2 * moved)
        at, other = np.unravel_index(int(left.argmin()), left.shape)
        if left[at, other] >= gap * (1 - 1e-9):
            return
        parts[high][at], parts[low][other] = parts[low][other], parts[high][at]


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the lengths in packs of at most max_tokens: longest first, each into the
    first pack with room.

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
    """Indices of the lengths in `count` packs within the limit, none of them empty while there are lengths.

    Balanced by cost where the limit allows it, else by tokens, else first fit with its largest
    packs cut in two. Where another replica has more sequences, the last packs may be empty.

    Args:
        lengths: tokens of each sequence, with its padding.
        count: at least `len(first_fit(...))`.
        limits: of a pack.
    """
    if count > len(lengths):
        return [[i] for i in range(len(lengths))] + [[]] * (count - len(lengths))
    for costs in ([limits.cost(length) for length in lengths], lengths):
        packs = karmarkar_karp(costs, count)
        if all(len(pack) == 1 or 0 < sum(lengths[i] for i in pack) <= limits.max_tokens for pack in packs):
            return packs
    packs = first_fit(lengths, limits.max_tokens)
    assert len(packs) <= count, "more packs than there may be"
    while len(packs) < count:
        largest = max(packs, key=lambda pack: (len(pack) > 1, sum(lengths[i] for i in pack)))
        packs.remove(largest)
        halves = karmarkar_karp([lengths[i] for i in largest], 2)
        packs += [[largest[i] for i in half] for half in halves]
    # by their first sequence, not the longest ones first: the first pack may stand for all
    return sorted(packs)


@collective
def common_pack_count(needed: int, limits: PackLimits, group: ProcessGroup) -> int:
    """The number of packs that every replica makes: the most that one needs, and a multiple of
    limits.count_multiple.

    Waits for the device: Python has to know how often to run the model.
    """
    count = torch.tensor([needed], dtype=torch.int64, device=communication_device())
    if group.size() > 1:
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    most = max(int(count), 1)
    return -(-most // limits.count_multiple) * limits.count_multiple

"""Deals a step's samples out over replicas, so that each has about as much to compute; a
prompt's may be parted.

R replicas, E samples of each, before and after. A sample is an episode, whose sequences stay together.
"""

from __future__ import annotations

import bisect
import math
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_rl_corr.engines.trajectory import Trajectory, episode_numbers
from megatron_rl_corr.mcore.batch.packing import PackLimits, karmarkar_karp
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.sample_file import Origin

SPREAD = 0.005
"""A replica may have so much more to compute than the mean."""
EXCHANGES = 8
"""Most exchanges of pairs for each replica."""


class Rewarded(NamedTuple):
    """A sequence, its reward and the named parts of it, and where it comes from if somebody asks."""

    trajectory: Trajectory
    reward: float
    parts: dict[str, float] | None = None
    origin: Origin | None = None


def destinations(
    lengths: Sequence[Sequence[int]],
    limits: PackLimits,
    squares: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """The replica that each sample goes to, [R][E]: equal numbers of samples, about equal cost,
    few tokens moved.

    Samples stay where they are but for pairs that are exchanged, until no replica has more than SPREAD above
    the mean. Where exchanges of pairs do not come so far, as with few samples, all are divided anew.

    Args:
        lengths: [R][E] tokens of the samples, by the replica that has them.
        limits: what a sequence costs.
        squares: [R][E], the sum of n^2 over each sample's sequences; None: each has one.
    """
    squared = [[None] * len(row) for row in lengths] if squares is None else squares
    costs = [list(map(limits.cost, row, own)) for row, own in zip(lengths, squared, strict=True)]
    found, largest = _exchanged(costs)
    if largest <= (1 + SPREAD) * sum(map(sum, costs)) / len(costs):
        return found
    anew = _divided_anew(lengths, costs)
    loads = [0.0] * len(costs)
    for row, goes in zip(costs, anew, strict=True):
        for cost, replica in zip(row, goes, strict=True):
            loads[replica] += cost
    return anew if max(loads) < largest else found


def _exchanged(costs: Sequence[Sequence[float]]) -> tuple[list[list[int]], float]:
    """(the replica of each sample after exchanges of pairs, the largest cost that a replica then has).

    In turn the heaviest replica gives one sample to the lightest for a cheaper one: the pair that brings
    one of the two closest to the mean.
    """
    loads = [math.fsum(row) for row in costs]
    mean = math.fsum(loads) / len(loads)
    found = [[replica] * len(row) for replica, row in enumerate(costs)]
    has = [sorted((cost, replica, i) for i, cost in enumerate(row)) for replica, row in enumerate(costs)]
    for _ in range(EXCHANGES * len(costs)):
        heavy = max(range(len(loads)), key=lambda replica: (loads[replica], replica))
        light = min(range(len(loads)), key=lambda replica: (loads[replica], replica))
        wanted = min(loads[heavy] - mean, mean - loads[light])
        if loads[heavy] <= (1 + SPREAD) * mean:
            break
        pairs = [
            (abs(one[0] - other[0] - wanted), one, other)
            for one in has[heavy]
            for place in [bisect.bisect(has[light], (one[0] - wanted, -1, -1))]
            for other in has[light][max(0, place - 1) : place + 1]
        ]
        _, one, other = min(pairs)
        gain = one[0] - other[0]
        if not 0 < gain < loads[heavy] - loads[light]:
            break
        for taken, source, target in ((one, heavy, light), (other, light, heavy)):
            has[source].remove(taken)
            bisect.insort(has[target], taken)
            found[taken[1]][taken[2]] = target
        loads[heavy] -= gain
        loads[light] += gain
    return found, max(loads)


def _divided_anew(lengths: Sequence[Sequence[int]], costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """Parts of all samples by `karmarkar_karp`, each laid where most of its tokens are."""
    replicas, share = len(lengths), len(lengths[0])
    flat = [length for row in lengths for length in row]
    parts = karmarkar_karp([cost for row in costs for cost in row], replicas, equal_sizes=True)
    at_home = [
        (sum(flat[i] for i in part if i // share == replica), -number, -replica)
        for number, part in enumerate(parts)
        for replica in range(replicas)
    ]
    found, taken = [0] * len(flat), set()
    for _, number, replica in sorted(at_home, reverse=True):
        if ("part", -number) in taken or ("replica", -replica) in taken:
            continue
        taken |= {("part", -number), ("replica", -replica)}
        for i in parts[-number]:
            found[i] = -replica
    return [found[replica * share : (replica + 1) * share] for replica in range(replicas)]


@collective
def deal_out(
    samples: list[Rewarded] | None,
    share: int,
    limits: PackLimits,
    layout: Layout,
    *,
    with_episodes: bool = False,
) -> tuple[list[Rewarded] | None, int]:
    """(this replica's sequences after dealing, the bytes that its leader sent); (None, 0) on ranks
    that are no leader.

    Every rank of the leaders' data-parallel groups calls it: one all-gather of lengths (of these and their
    squares with episodes), then each leader sends what moves to the leader that gets it. Samples that stay
    keep their order, those that come are behind them.

    Args:
        samples: on a data leader the sequences of its E samples; None on others.
        share: E.
        limits: what a sequence costs.
        layout: this rank's process groups.
        with_episodes: a sample may have several sequences, one behind the other.
    """
    group, device = layout.dp_cp_group, communication_device()
    if layout.dp_size == 1:
        return samples, 0
    sizes, episodes = torch.zeros(2 if with_episodes else 1, share, dtype=torch.int64), []
    if samples is not None:
        episodes = episode_numbers([one.trajectory for one in samples]) if with_episodes else range(share)
        assert len(samples) >= share and episodes[-1] == share - 1, "another number of samples"
        lengths = torch.tensor([_length(one.trajectory) for one in samples])
        own = torch.stack([lengths, lengths.square()])
        sizes.index_add_(1, torch.tensor(episodes), own[: len(sizes)])
    # A leader is the first context-parallel rank of its replica, and those are numbered before replicas.
    every = all_gather_stacked(sizes.to(device), group)[:: layout.cp_size]
    if samples is None:
        return None, 0
    assert group.rank() == layout.dp_rank * layout.cp_size
    goes = destinations(every[:, 0].tolist(), limits, every[:, 1].tolist() if with_episodes else None)
    going = [goes[layout.dp_rank][episode] for episode in episodes]
    parts = {
        other: pickle.dumps([one for one, to in zip(samples, going, strict=True) if to == other])
        for other in range(layout.dp_size)
        if other != layout.dp_rank and other in goes[layout.dp_rank]
    }
    sources = [
        other for other in range(layout.dp_size) if other != layout.dp_rank and layout.dp_rank in goes[other]
    ]
    ranks = {other: dist.get_global_rank(group, other * layout.cp_size) for other in range(layout.dp_size)}
    come_sizes = {other: torch.zeros(1, dtype=torch.int64, device=device) for other in sources}
    _exchange_samples(
        come_sizes, {other: torch.tensor([len(x)]).to(device) for other, x in parts.items()}, ranks, layout
    )
    come = {other: torch.empty(int(n), dtype=torch.uint8, device=device) for other, n in come_sizes.items()}
    sent = {other: torch.frombuffer(bytearray(x), dtype=torch.uint8).to(device) for other, x in parts.items()}
    _exchange_samples(come, sent, ranks, layout)
    own = [one for one, to in zip(samples, going, strict=True) if to == layout.dp_rank]
    for other in sources:
        own += pickle.loads(come[other].cpu().numpy().tobytes())
    return own, sum(map(len, parts.values()))


@collective
def _exchange_samples(
    come: dict[int, torch.Tensor], go: dict[int, torch.Tensor], ranks: dict[int, int], layout: Layout
) -> None:
    """Receive a tensor from some leaders and send one to some, all at once."""
    group = layout.dp_cp_group
    operations = [dist.P2POp(dist.irecv, tensor, ranks[other], group) for other, tensor in come.items()]
    operations += [dist.P2POp(dist.isend, tensor, ranks[other], group) for other, tensor in go.items()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _length(sample: Trajectory) -> int:
    return len(sample.prompt_ids) + len(sample.output_ids) - 1

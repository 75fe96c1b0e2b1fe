"""Pushes of what has changed alone: each rank remembers its shards as the servers were proven to have them,
and sends its stage's sender the places and values that differ from them, bit by bit.

P parameters of this rank, C changed values of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.engines.weight_changes import ChangedTensor
from megatron_rl_corr.reduce.collectives import all_reduce, collective, exchange, gather_to
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.weight_sync.export import Members, Part, StageExporter, ranks_of

MOST_CHANGED = 0.1
"""Above this share of changed values all are sent: a place takes 4 bytes, a value 2 in 16 bits."""
MOST_REFUSALS = 3
"""Pushes of changes refused by servers that were well, or found wrong there, after which none is tried any
more.
"""
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Changes:
    """What differs from the weights of version `base`."""

    base: str
    share: float
    """Changed values over all values of the model."""
    due: bool
    """A push of everything follows, by which these are judged."""
    places: Sequence[Tensor | None]
    """[P] of [C] int32: where this rank's shards differ; None: another rank sends that parameter."""
    counts: Sequence[Sequence[int]]
    """[P][ranks of the parameter's group]: C of each, on a sender; [P] of () on others."""

    @collective
    def gather_changed(
        self, number: int, shard: Tensor, members: Members, parts: Sequence[Part]
    ) -> Sequence[Tensor] | None:
        """The changed values of these parts on the sender, NaN where nothing changed; None on others.

        Arguments as of `export.Gather`.
        """
        own, ranks, places = members.rank, ranks_of(parts), self.places[number]
        assert places is not None
        values = shard.reshape(-1)[places.long()]
        if own != members.sender:
            if own in ranks and len(places):
                _exchange(dist.isend, members, {members.sender: (places, values)})
            return None
        counts = self.counts[number]
        come = {
            rank: (places.new_empty(counts[rank]), values.new_empty(counts[rank]))
            for rank in ranks
            if rank != own and counts[rank]
        }
        _exchange(dist.irecv, members, come)
        whole = shard.new_full((len(ranks), shard.numel()), torch.nan)
        for row, rank in zip(whole, ranks, strict=True):
            where, what = (places, values) if rank == own else come.get(rank, (places[:0], values[:0]))
            row[where.long()] = what
        return whole.view(len(ranks), *shard.shape).unbind()


@collective
def _exchange(operation, members: Members, tensors: dict[int, tuple[Tensor, Tensor]]) -> None:
    operations = [
        dist.P2POp(operation, one, group=members.group, group_peer=rank)
        for rank, both in tensors.items()
        for one in both
    ]
    if operations:
        exchange(operations)


class DeltaPushes:
    """Decides which pushes send changes alone; every rank has one.

    Args:
        exporter: of this rank.
        full_every: of so many pushes one sends everything.
    """

    def __init__(self, exporter: StageExporter, *, full_every: int):
        self._exporter, self._full_every = exporter, full_every
        self._pushed: list[Tensor | None] | None = None
        """This rank's shards as the servers have them, in the host's memory."""
        self._version, self._since_full = "", 0
        self._proven = self._given_up = False
        self._refusals = 0
        self.share = 1.0
        """Values that the last push sent over all of the model."""

    @torch.no_grad()
    @collective
    def changes(self, *, same_servers: bool) -> Changes | None:
        """What the next push sends; None: everything. Every rank calls it.

        Everything goes to servers that are not proven to have the last weights, where more than MOST_CHANGED
        of the values changed, where one is NaN, which stands for no change, and after MOST_REFUSALS.

        Args:
            same_servers: all servers of this push took the last one; the same on all ranks.
        """
        if self._pushed is None or not same_servers or self._given_up:
            return None
        found = torch.zeros(3, dtype=torch.float64, device=communication_device())  # changed, all, NaN
        shards = self._shards()
        for shard, before in zip(shards, self._pushed, strict=True):
            if shard is not None and before is not None:
                differs = _differs(shard, before)
                found[0] += differs.count_nonzero()
                found[1] += shard.numel()
                found[2] += shard.isnan().any()
        changed, every, nan = all_reduce(found, dist.group.WORLD).tolist()
        if nan or changed > MOST_CHANGED * every:
            return None
        places = [
            None if shard is None or before is None else _differs(shard, before).nonzero()[:, 0].int()
            for shard, before in zip(shards, self._pushed, strict=True)
        ]
        due = (changed > 0 and not self._proven) or self._since_full + 1 >= self._full_every
        return Changes(self._version, changed / every, due, places, self._gather_counts(places))

    @torch.no_grad()
    def note_pushed(self, version: str, changes: Changes | None) -> None:
        """Remember what the servers now have; call it once that is proven.

        Args:
            version: of the weights.
            changes: that were sent alone; None: everything was.
        """
        self._since_full = 0 if changes is None else self._since_full + 1
        self.share = 1.0 if changes is None else changes.share
        self._version, shards = version, self._shards()
        if self._pushed is None:
            self._pushed = [None if shard is None else on_host(shard) for shard in shards]
            return
        for before, shard in zip(self._pushed, shards, strict=True):
            if before is not None and shard is not None:
                before.copy_(shard)

    def note_proof(self, changes: Changes, *, is_right: bool) -> None:
        """Servers had the same checksums after changes and after everything behind them, or not.

        Where nothing had changed that proves nothing.
        """
        self._proven, self._given_up = is_right and (self._proven or changes.share > 0), not is_right

    def note_no_proof(self) -> None:
        """Servers were lost on the way to it: the next push of changes is proven instead."""
        self._proven = False

    def note_failure(self) -> None:
        """A push failed, so that what the servers have is not known, and the next one sends everything."""
        self._pushed = None

    def note_refusal(self) -> bool:
        """What failed was not a server or the way to it, but the changes.

        Returns:
            True if no push sends changes alone from now on, as this was the last of MOST_REFUSALS.
        """
        self._refusals += 1
        self._given_up = self._given_up or self._refusals == MOST_REFUSALS
        return self._refusals == MOST_REFUSALS

    def _shards(self) -> list[Tensor | None]:
        """[P]: what the sender gathers of this rank."""
        pairs = zip(self._exporter.parameters, self._exporter.members, strict=True)
        return [None if members is None else one.tensor.detach().contiguous() for one, members in pairs]

    @collective
    def _gather_counts(self, places: Sequence[Tensor | None]) -> Sequence[Sequence[int]]:
        """`Changes.counts`: one gather over each group that the sender is in."""
        own = torch.tensor([0 if one is None else len(one) for one in places], device=communication_device())
        counts: list[Sequence[int]] = [()] * len(places)
        for members in self._exporter.groups:
            ranks = range(len(ranks_of(members.parts)))
            gathered = gather_to(own, members.group, members.sender, ranks)
            if gathered is not None:
                for number, of_ranks in enumerate(gathered.t().tolist()):
                    if self._exporter.members[number] is members:
                        counts[number] = of_ranks
        return counts


def check_sizes(shapes: Mapping[str, Sequence[int]]) -> None:
    """ValueError for a tensor with more values than places can count.

    Args:
        shapes: Hugging Face name -> shape.
    """
    for name, shape in shapes.items():
        if math.prod(shape) >= 2**31:
            raise ValueError(f"`push` delta: {name} has 2^31 values or more; use full")


def _differs(shard: Tensor, before: Tensor) -> Tensor:
    """[numel] bool: where the bits differ."""
    bits = _BITS[shard.element_size()]
    return (shard.view(bits) != before.to(shard.device).view(bits)).view(-1)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory."""
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def changed_units(units: Iterable[list[NamedTensor]]) -> Iterator[list[tuple[str, ChangedTensor]]]:
    """What changed, of the units in which anything did.

    Args:
        units: of `StageExporter.units` with `Changes.gather_changed`: NaN where nothing changed.
    """
    for unit in units:
        changed = [(name, ChangedTensor.of(whole)) for name, whole in unit]
        if any(len(one.places) for _, one in changed):
            yield changed

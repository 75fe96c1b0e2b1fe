"""Gathers a pipeline stage's weights on its sending rank, as whole tensors under Hugging Face
names, in buckets.

Only the sender receives: beside its own shards it holds the buckets that are under way and at most one
parameter more, or GATHERED_BYTES of its expert-parallel siblings; and where one Hugging Face tensor stacks
all experts of a layer, those of one layer. Other ranks hold their own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.engines.weight_changes import ChangedTensor
from megatron_rl_corr.models.hf_folder import FILE_BYTES, write_weights
from megatron_rl_corr.models.names import ParameterRule
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks
from megatron_rl_corr.reduce.collectives import collective, gather_to
from megatron_rl_corr.reduce.layout import Layout, StageGroups

GATHERED_BYTES = 256 * 2**20
"""Most bytes of one parameter's experts that a sender receives at once, unless a single expert has more."""


def default_bucket_mib(servers: int) -> float:
    """Larger buckets for more servers, as each bucket takes longer to announce: 16 MiB a server, from 256 MiB
    to 2 GiB.
    """
    return float(min(max(256, 16 * servers), 2048))


def buckets[Sized: (Tensor, ChangedTensor)](
    units: Iterable[list[tuple[str, Sized]]], bucket_bytes: int
) -> Iterator[list[tuple[str, Sized]]]:
    """Group units into buckets of bounded size, in order, without looking ahead.

    Args:
        units: tensors that one request must bring together.
        bucket_bytes: largest size of a bucket; only a single unit that is larger makes a larger bucket.

    Raises:
        ValueError: bucket_bytes is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: list[tuple[str, Sized]] = []
    size = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for _, tensor in unit)
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += nbytes
    if bucket:
        yield bucket


class StageExporter:
    """Gathers, converts and renames the weights of one pipeline stage; every rank of the stage has one.

    Args:
        parameters: of this rank.
        ranks: this rank's coordinates.
        groups: of the stage.
        stage: number of the stage, from 0.
        num_stages: pipeline stages.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        ranks: ShardRanks,
        groups: StageGroups,
        *,
        stage: int,
        num_stages: int,
    ):
        self.stage, self.num_stages = stage, num_stages
        self.parameters, self._ranks = parameters, ranks
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.sends, self.senders = rank == groups.sender, groups.senders
        self.leads = rank == 0
        self._planned: dict[str, list[int]] | None = None
        self._names: list[tuple[str, ...]] | None = None
        self._tp = _members_of(groups.tp, groups.sender, rank, (0, ranks.tp_rank))
        self._alone = Members(None, 0, [Part(0, [0])])
        self._experts = _members_of(groups.expert, groups.sender, rank, (ranks.ep_rank, ranks.expert_tp_rank))
        rules = [parameter.rule(ranks.ep_rank) for parameter in parameters]
        self.members = [None if rule.is_copy else self._members(rule) for rule in rules]
        """For each of `parameters` the ranks that it is gathered from; None: of this rank nothing is."""

    @classmethod
    def of(cls, parameters: Sequence[LocalParameter], layout: Layout) -> StageExporter:
        """That of a rank's parameters, from its place in the job."""
        place = {"stage": layout.pp_rank, "num_stages": layout.pp_size}
        return cls(parameters, layout.shard, layout.stage_groups, **place)

    @collective
    def units(
        self,
        after_parameter: Callable[[], None] = lambda: None,
        *,
        only: Callable[[int], bool] = lambda number: True,
        gather: Gather | None = None,
    ) -> Iterator[list[NamedTensor]]:
        """Lists of (Hugging Face name, whole tensor) that one request must bring together;
        most have one entry.

        Every rank of the stage must iterate to the end, because parameters are gathered meanwhile.

        Args:
            after_parameter: called on every rank of the stage between the same two parameters.
            only: whether a parameter is gathered, by its number in `parameters`; the same on all ranks.
            gather: in the place of `gather_shards`.
        """
        waiting: dict[tuple[str, ...], list[NamedTensor]] = {}
        for rule, named in whole_stacks(self._tensors(after_parameter, only, gather or gather_shards)):
            if not rule.sent_with:
                yield [named]
                continue
            unit = waiting.setdefault(rule.sent_with, [])
            unit.append(named)
            if len(unit) == len(rule.sent_with):
                yield waiting.pop(rule.sent_with)
        assert not waiting, f"this stage has only a part of {list(waiting)}"

    def planned(self) -> dict[str, list[int]]:
        """Hugging Face names and shapes of all that `units` will yield, on the sending rank; {} on others.

        Nothing is gathered: the same conversion runs on tensors without memory, once.
        """
        if not self.sends or self._planned is not None:
            return self._planned or {}
        shapes = {}
        for parameter in self.parameters:
            rule = parameter.rule(self._ranks.ep_rank)
            if rule.is_copy:
                continue
            shard = torch.empty(parameter.tensor.shape, dtype=parameter.tensor.dtype, device="meta")
            if rule.is_expert:
                rules = [(parameter.rule(part.ep_rank), len(part.ranks)) for part in self._experts.parts]
            else:
                rules = [(rule, 1 if rule.layout.replicated else len(self._tp.parts[0].ranks))]
            for one, size in rules:
                merged = zip(one.hf_names, one.layout.merge([shard] * size), strict=True)
                stack = [] if one.row is None else [one.rows]
                shapes |= {name: [*stack, *tensor.shape] for name, tensor in merged}
        self._planned = shapes
        return shapes

    @torch.no_grad()
    @collective
    def _tensors(
        self, after_parameter: Callable[[], None], only: Callable[[int], bool], gather: Gather
    ) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        for number, parameter in enumerate(self.parameters):
            rule = parameter.rule(self._ranks.ep_rank)
            if rule.is_copy:
                continue
            after_parameter()
            members = self.members[number]
            if members is None or not only(number):
                continue
            shard = parameter.tensor.detach()
            most = max(1, GATHERED_BYTES // (shard.nbytes * len(members.parts[0].ranks)))
            # no more than there are: `batched` makes room for as many as it is told
            for some in batched(members.parts, min(most, len(members.parts))):
                shards = gather(number, shard, members, some)
                if shards is None:
                    continue
                left = iter(shards)
                for part in some:
                    own = parameter.rule(part.ep_rank) if rule.is_expert else rule
                    merged = own.layout.merge([next(left) for _ in part.ranks])
                    yield from ((own, named) for named in zip(own.hf_names, merged, strict=True))
                del shards, left, merged  # before the next part is gathered

    def names(self) -> list[tuple[str, ...]]:
        """For each of `parameters`, its Hugging Face names on all ranks that it is gathered from."""
        if self._names is None:
            self._names = [
                ()
                if members is None
                else tuple(name for part in members.parts for name in one.rule(part.ep_rank).hf_names)
                for one, members in zip(self.parameters, self.members, strict=True)
            ]
        return self._names

    @property
    def groups(self) -> list[Members]:
        """Those that the sender gathers from, as far as this rank is in them, in one order on all ranks."""
        alone = [self._alone] if self.sends else []
        return [*alone, *(one for one in (self._tp, self._experts) if one is not None)]

    def _members(self, rule: ParameterRule) -> Members | None:
        if rule.is_expert:
            return self._experts
        if rule.layout.replicated:  # every rank has all of it
            return self._alone if self.sends else None
        return self._tp


def whole_stacks(
    tensors: Iterable[tuple[ParameterRule, NamedTensor]],
) -> Iterator[tuple[ParameterRule, NamedTensor]]:
    """These tensors, with those of single experts that one Hugging Face tensor stacks put together.

    A stack comes when its last row has; until then the sender holds it, of as many experts as a layer has.
    """
    waiting: dict[str, tuple[Tensor, set[int]]] = {}
    for rule, (name, tensor) in tensors:
        if rule.row is None:
            yield rule, (name, tensor)
            continue
        if name not in waiting:
            waiting[name] = tensor.new_empty(rule.rows, *tensor.shape), set()
        stack, there = waiting[name]
        stack[rule.row].copy_(tensor)
        there.add(rule.row)
        if len(there) == rule.rows:
            del waiting[name]
            yield rule, (name, stack)
    assert not waiting, f"some experts only of {list(waiting)}"


class Part(NamedTuple):
    """What of a parameter one expert-parallel rank has, which may be cut over tensor-parallel ranks."""

    ep_rank: int
    ranks: list[int]
    """In the group, in the order of their tensor-parallel ranks."""


@dataclass(frozen=True)
class Members:
    """A group that the stage's sender is in, and what each of its ranks holds."""

    group: ProcessGroup | None
    sender: int
    """Its rank in the group."""
    parts: list[Part]

    @property
    def rank(self) -> int:
        """This process's own rank in the group."""
        return 0 if self.group is None else self.group.rank()


Gather = Callable[[int, Tensor, Members, Sequence[Part]], Sequence[Tensor] | None]
"""gather(number of a parameter, this rank's shard, its members, parts): as `gather_shards`."""


def ranks_of(parts: Sequence[Part]) -> list[int]:
    """The ranks of these parts in their group, one part behind the other."""
    return [rank for part in parts for rank in part.ranks]


@collective
def gather_shards(
    number: int, shard: Tensor, members: Members, parts: Sequence[Part]
) -> Sequence[Tensor] | None:
    """The shards of these parts on the sender, one behind the other; None on others."""
    gathered = gather_to(shard, members.group, members.sender, ranks_of(parts))
    return None if gathered is None else gathered.unbind()


@collective
def _members_of(group: ProcessGroup | None, sender: int, rank: int, place: tuple[int, int]) -> Members | None:
    """Every rank of the group calls it; None: the sender is in the group of another replica.

    It is the group's first collective, which NCCL needs before two of its ranks exchange anything alone.

    Args:
        group: None: this rank alone.
        sender, rank: global ranks, of the sender and of this process.
        place: this rank's (expert-parallel rank, tensor-parallel rank).
    """
    ranks = [rank] if group is None else dist.get_process_group_ranks(group)
    if sender not in ranks:
        return None
    places: list[Any] = [place]
    if len(ranks) > 1:
        places *= len(ranks)
        dist.all_gather_object(places, place, group=group)
    in_order = sorted((one, i) for i, one in enumerate(places))
    parts = [
        Part(ep_rank, [i for _, i in of_rank])
        for ep_rank, of_rank in groupby(in_order, key=lambda one: one[0][0])
    ]
    return Members(group, ranks.index(sender), parts)


@collective
def write_stage(folder: Path, exporter: StageExporter) -> OSError | None:
    """Write a stage's weights as safetensors; every rank of the stage calls it, and its sending rank writes.

    Returns:
        Why a file could not be written: raised here, it would leave the other ranks waiting in a gather.
    """
    error = None
    for number, bucket in enumerate(buckets(exporter.units(), FILE_BYTES)):
        if exporter.sends and error is None:
            try:
                write_weights(folder / f"model-stage{exporter.stage:03d}-{number:05d}.safetensors", bucket)
            except OSError as failure:
                error = failure
    return error

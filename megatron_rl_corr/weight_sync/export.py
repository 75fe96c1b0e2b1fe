"""Gathers a pipeline stage's weights on its sending rank, as whole tensors under Hugging Face
names, in buckets.

Only the sender receives: beside its own shards it holds the buckets that are under way and at most one
parameter more, or GATHERED_BYTES of its expert-parallel siblings. Other ranks hold their own shards.
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
from megatron_rl_corr.models.hf_folder import FILE_BYTES, write_weights
from megatron_rl_corr.models.names import ParameterRule
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks
from megatron_rl_corr.reduce.collectives import collective, gather_to
from megatron_rl_corr.reduce.layout import StageGroups

GATHERED_BYTES = 256 * 2**20
"""Most bytes of one parameter's experts that a sender receives at once, unless a single expert has more."""


def default_bucket_mib(servers: int) -> float:
    """Larger buckets for more servers, as each bucket takes longer to announce: 16 MiB a server, from 256 MiB
    to 2 GiB.
    """
    return float(min(max(256, 16 * servers), 2048))


def buckets(units: Iterable[list[NamedTensor]], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group units into buckets of bounded size, in order, without looking ahead.

    Args:
        units: tensors that one request must bring together.
        bucket_bytes: largest size of a bucket; only a single unit that is larger makes a larger bucket.

    Raises:
        ValueError: bucket_bytes is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: list[NamedTensor] = []
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
        self._parameters, self._ranks = parameters, ranks
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.sends, self.senders = rank == groups.sender, groups.senders
        self.leads = rank == 0
        self._tp = _members_of(groups.tp, groups.sender, rank, (0, ranks.tp_rank))
        self._experts = _members_of(groups.expert, groups.sender, rank, (ranks.ep_rank, ranks.expert_tp_rank))

    @collective
    def units(self, after_parameter: Callable[[], None] = lambda: None) -> Iterator[list[NamedTensor]]:
        """Lists of (Hugging Face name, whole tensor) that one request must bring together;
        most have one entry.

        Every rank of the stage must iterate to the end, because parameters are gathered meanwhile.

        Args:
            after_parameter: called on every rank of the stage between the same two parameters.
        """
        waiting: dict[tuple[str, ...], list[NamedTensor]] = {}
        for rule, named in self._tensors(after_parameter):
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

        Nothing is gathered: the same conversion runs on tensors without memory.
        """
        if not self.sends:
            return {}
        shapes = {}
        for parameter in self._parameters:
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
                shapes |= {name: list(tensor.shape) for name, tensor in merged}
        return shapes

    @torch.no_grad()
    @collective
    def _tensors(self, after_parameter: Callable[[], None]) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        for parameter in self._parameters:
            rule = parameter.rule(self._ranks.ep_rank)
            if rule.is_copy:
                continue
            after_parameter()
            if rule.is_expert:
                if self._experts is not None:
                    yield from self._expert_tensors(parameter)
            elif rule.layout.replicated:  # every rank has all of it
                if self.sends:
                    yield from _named(rule, [parameter.tensor.detach()])
            elif self._tp is not None:
                shards = self._tp.gather_shards(parameter.tensor.detach(), self._tp.parts)
                if shards is not None:
                    yield from _named(rule, shards)

    @collective
    def _expert_tensors(self, parameter: LocalParameter) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        """One parameter's experts of all expert-parallel ranks, of as many ranks at once as
        GATHERED_BYTES allow.
        """
        shard, parts = parameter.tensor.detach(), self._experts.parts
        for some in batched(parts, max(1, GATHERED_BYTES // (shard.nbytes * len(parts[0].ranks)))):
            shards = self._experts.gather_shards(shard, some)
            if shards is None:
                continue
            left = iter(shards)
            for part in some:
                yield from _named(parameter.rule(part.ep_rank), [next(left) for _ in part.ranks])
            del shards, left  # before the next part is gathered


def _named(rule: ParameterRule, shards: Sequence[Tensor]) -> Iterator[tuple[ParameterRule, NamedTensor]]:
    for named in zip(rule.hf_names, rule.layout.merge(shards), strict=True):
        yield rule, named


class _Part(NamedTuple):
    """What of a parameter one expert-parallel rank has, which may be cut over tensor-parallel ranks."""

    ep_rank: int
    ranks: list[int]
    """In the group, in the order of their tensor-parallel ranks."""


@dataclass(frozen=True)
class _Members:
    """A group that the stage's sender is in, and what each of its ranks holds."""

    group: ProcessGroup | None
    sender: int
    """Its rank in the group."""
    parts: list[_Part]

    @collective
    def gather_shards(self, shard: Tensor, parts: Sequence[_Part]) -> Sequence[Tensor] | None:
        """The shards of these parts on the sender, one behind the other; None on others."""
        gathered = gather_to(shard, self.group, self.sender, [rank for part in parts for rank in part.ranks])
        return None if gathered is None else gathered.unbind()


@collective
def _members_of(
    group: ProcessGroup | None, sender: int, rank: int, place: tuple[int, int]
) -> _Members | None:
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
        _Part(ep_rank, [i for _, i in of_rank])
        for ep_rank, of_rank in groupby(in_order, key=lambda one: one[0][0])
    ]
    return _Members(group, ranks.index(sender), parts)


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

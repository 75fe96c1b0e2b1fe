"""Gathers a pipeline stage's weights on its sending rank, as whole tensors under Hugging Face
names, in buckets.

Beside its own shards a rank holds at most one parameter at a time, with its expert-parallel siblings and
those that are sent with it, and the sender one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.models.hf_folder import FILE_BYTES, write_weights
from megatron_rl_corr.models.names import ParameterRule
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.layout import StageGroups


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
        self._parameters, self._ranks, self._groups = parameters, ranks, groups
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.sends, self.senders = rank == groups.sender, groups.senders
        self.leads = rank == 0
        self._in_tp = _holds(groups.tp, groups.sender, rank)
        self._in_expert = _holds(groups.expert, groups.sender, rank)
        self._expert_places = self._gather_places() if self._in_expert else []

    @collective
    def _gather_places(self) -> list[tuple[int, int]]:
        """(expert-parallel rank, expert-tensor-parallel rank) of each member of the expert group."""
        place = (self._ranks.ep_rank, self._ranks.expert_tp_rank)
        if self._groups.expert is None or self._groups.expert.size() == 1:
            return [place]
        places = [None] * self._groups.expert.size()
        dist.all_gather_object(places, place, group=self._groups.expert)
        return places

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
                ep_ranks = [ep_rank for ep_rank, _ in self._expert_places]
                rules = [
                    (parameter.rule(ep_rank), ep_ranks.count(ep_rank)) for ep_rank in sorted(set(ep_ranks))
                ]
            else:
                whole = rule.layout.replicated or self._groups.tp is None
                rules = [(rule, 1 if whole else self._groups.tp.size())]
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
            if not rule.is_expert:
                if self._in_tp:
                    # Every rank has all of a replicated parameter.
                    group = None if rule.layout.replicated else self._groups.tp
                    shards = all_gather_stacked(parameter.tensor.detach(), group).unbind()
                    for named in zip(rule.hf_names, rule.layout.merge(shards), strict=True):
                        yield rule, named
            elif self._in_expert:
                yield from self._expert_tensors(parameter)

    @collective
    def _expert_tensors(self, parameter: LocalParameter) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        gathered = all_gather_stacked(parameter.tensor.detach(), self._groups.expert)
        for ep_rank in sorted({ep for ep, _ in self._expert_places}):
            mine = sorted((etp, i) for i, (ep, etp) in enumerate(self._expert_places) if ep == ep_rank)
            rule = parameter.rule(ep_rank)
            shards = [gathered[i] for _, i in mine]
            for named in zip(rule.hf_names, rule.layout.merge(shards), strict=True):
                yield rule, named


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


def _holds(group: ProcessGroup | None, sender: int, rank: int) -> bool:
    if group is None:
        return rank == sender
    return sender in dist.get_process_group_ranks(group)

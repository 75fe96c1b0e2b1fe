"""Streams a pipeline stage's weights under their Hugging Face names to one sending rank.

No rank ever holds more than one parameter (with its expert-parallel siblings, and those that are sent with it) beside
its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.models.names import ParameterRule
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks
from megatron_rl_corr.parallel.gather import all_gather_stacked
from megatron_rl_corr.parallel.layout import StageGroups
from megatron_rl_corr.weight_sync.buckets import NamedTensor


class StageExporter:
    """Gathers and renames the weights of one stage."""

    def __init__(
        self, parameters: Sequence[LocalParameter], ranks: ShardRanks, groups: StageGroups,
        *, stage: int, num_stages: int,
    ):
        self.stage, self.num_stages = stage, num_stages
        self._parameters, self._ranks, self._groups = parameters, ranks, groups
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.sends = rank == groups.sender
        self.leads = rank == 0
        self._in_tp = _holds(groups.tp, groups.sender, rank)
        self._in_expert = _holds(groups.expert, groups.sender, rank)
        self._expert_places = self._gather_places() if self._in_expert else []

    def _gather_places(self) -> list[tuple[int, int]]:
        """(expert-parallel rank, expert-tensor rank) of each member of the expert group."""
        place = (self._ranks.ep_rank, self._ranks.expert_tp_rank)
        if self._groups.expert is None or self._groups.expert.size() == 1:
            return [place]
        places = [None] * self._groups.expert.size()
        dist.all_gather_object(places, place, group=self._groups.expert)
        return places

    def units(self, after_parameter: Callable[[], None] = lambda: None) -> Iterator[list[NamedTensor]]:
        """(Hugging Face name, whole tensor) of the stage, in lists that one request must bring whole.

        Nearly all are lists of one. Every rank of the stage must run through it; after_parameter() is called as often
        on each, at the same places between their exchanges.
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
        assert not waiting, f"of {list(waiting)} this stage has a part only"

    @torch.no_grad()
    def _tensors(self, after_parameter: Callable[[], None]) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        for parameter in self._parameters:
            rule = parameter.rule(self._ranks.ep_rank)
            if rule.is_copy:
                continue
            after_parameter()
            if not rule.is_expert:
                if self._in_tp:
                    # A replicated parameter is whole already: gathering it would only move copies.
                    group = None if rule.layout.replicated else self._groups.tp
                    shards = all_gather_stacked(parameter.tensor.detach(), group).unbind()
                    for named in zip(rule.hf_names, rule.layout.merge(shards), strict=True):
                        yield rule, named
            elif self._in_expert:
                yield from self._expert_tensors(parameter)

    def _expert_tensors(self, parameter: LocalParameter) -> Iterator[tuple[ParameterRule, NamedTensor]]:
        gathered = all_gather_stacked(parameter.tensor.detach(), self._groups.expert)
        for ep_rank in sorted({ep for ep, _ in self._expert_places}):
            mine = sorted((etp, i) for i, (ep, etp) in enumerate(self._expert_places) if ep == ep_rank)
            rule = parameter.rule(ep_rank)
            shards = [gathered[i] for _, i in mine]
            for named in zip(rule.hf_names, rule.layout.merge(shards), strict=True):
                yield rule, named


def _holds(group: ProcessGroup | None, sender: int, rank: int) -> bool:
    if group is None:
        return rank == sender
    return sender in dist.get_process_group_ranks(group)

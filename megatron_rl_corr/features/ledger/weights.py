"""Weights of earlier versions, and weights as servers have them, in the live ones' place for a pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_rl_corr.features.ledger.parts import part_of
from megatron_rl_corr.mcore.reference.policy import ReferenceWeights
from megatron_rl_corr.models.shards import EXPERT_BIAS, LocalParameter
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.weight_sync.rounding import ROUNDINGS, is_rounded

Round = Callable[[str, Tensor], Tensor]
"""round(Hugging Face name, whole tensor): the tensor as a server has it, in its own number type."""


@dataclass
class KeptWeights:
    """This rank's parameters of the last few versions, on the host."""

    parameters: Sequence[LocalParameter]
    most: int
    """Versions that are kept at a time."""
    _kept: dict[int, ReferenceWeights] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(one.nbytes for one in self._kept.values())

    def __contains__(self, version: int) -> bool:
        return version in self._kept

    def take(self, version: int) -> None:
        """Keep the live weights, which are whole and current, under this number; the oldest ones may go."""
        if len(self._kept) < self.most:
            self._kept[version] = ReferenceWeights(self.parameters)
            return
        oldest = self._kept.pop(min(self._kept))
        oldest.take()
        self._kept[version] = oldest

    @contextmanager
    def in_place(self, version: int, only: Sequence[int] | None = None) -> Iterator[None]:
        """Within, the model has the weights of this version. only: those of these parameters, by number."""
        with self._kept[version].in_place(only):
            yield


@dataclass(frozen=True)
class RoundedParts:
    """Parts of the model with their weights rounded."""

    parameters: Sequence[LocalParameter]
    layout: Layout
    round_weight: Round

    @contextmanager
    @collective
    def changed(self, parts: Collection[str], chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Within, these parts are rounded. Every rank of a tensor-parallel group calls it.

        chunks: not read, as parameters are known: a change of the model is called with them.
        """
        chosen = [one for one in self.parameters if part_of(one) in parts]
        with rounded_in_place(chosen, self.layout, self.round_weight):
            yield


@dataclass(frozen=True)
class OldParts:
    """Parts of the model as they were a version before, rounded as a push rounds them.

    Every rank has the same names of parts; one whose stage has no such part changes nothing there.
    """

    kept: KeptWeights
    version: int
    """The one before."""
    rounded: RoundedParts | None
    """None: a push rounds nothing."""

    @contextmanager
    @collective
    def changed(self, parts: Collection[str], chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Within, the model has these parts of that version. Every rank of a tensor-parallel group calls it.

        chunks: not read, as parameters are known: a change of the model is called with them.
        """
        only = [at for at, one in enumerate(self.kept.parameters) if part_of(one) in parts]
        rounding = nullcontext() if self.rounded is None else self.rounded.changed(parts, chunks)
        with self.kept.in_place(self.version, only), rounding:
            yield


@contextmanager
@torch.no_grad()
@collective
def rounded_in_place(
    parameters: Sequence[LocalParameter], layout: Layout, round_weight: Round
) -> Iterator[None]:
    """Within, the model has its own weights as a server has them; after, byte for byte its own again.

    Each parameter is gathered whole over its tensor-parallel ranks, as borders of blocks must not depend on
    how a weight is cut; the host holds the model's own meanwhile.

    Args:
        parameters: of this rank, whole and current; all ranks of its tensor-parallel groups call it.
        layout: this rank's process groups.
        round_weight: what servers make of a tensor.
    """
    held: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in parameters:
            if parameter.local_name.endswith(EXPERT_BIAS):  # a server's are float32
                continue
            live = parameter.tensor.detach()
            held.append((live, live.to("cpu", copy=True)))
            live.copy_(_rounded_shard(parameter, layout, round_weight))
        yield
    finally:
        for live, own in held:
            live.copy_(own)


@collective
def _rounded_shard(parameter: LocalParameter, layout: Layout, round_weight: Round) -> Tensor:
    rule, shard, live = parameter.rule(layout.shard.ep_rank), layout.shard, parameter.tensor.detach()
    if rule.layout.replicated:
        shards, rank, size = [live], 0, 1
    else:
        assert not rule.is_expert or shard.expert_tp_size == 1, "the feature leaves the term out then"
        group = None if rule.is_expert else layout.tp_group
        rank, size = (0, 1) if rule.is_expert else (shard.tp_rank, shard.tp_size)
        shards = list(all_gather_stacked(live.contiguous(), group))
    whole = zip(rule.hf_names, rule.layout.merge(shards), strict=True)
    return rule.layout.split([round_weight(name, tensor) for name, tensor in whole], rank, size)


def rounding_of(kind: str, dtype: torch.dtype | None) -> Round | None:
    """What a push does to the weights that servers compute with; None: nothing.

    Args:
        kind: --rollout-push-rounding.
        dtype: the number type that servers hold a weight in, where it has fewer bits than the trainer's.
    """
    if kind == "none" and dtype is None:
        return None
    blockwise = ROUNDINGS.get(kind)

    def round_weight(name: str, tensor: Tensor) -> Tensor:
        if blockwise is not None and is_rounded(name, tensor):
            tensor = blockwise(tensor)
        return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)

    return round_weight

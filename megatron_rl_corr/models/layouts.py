"""How a Megatron parameter is split over tensor-parallel ranks, and how it converts to Hugging Face
tensors and back.

A layout is a pair of pure functions, inverse to each other: `merge(shards of all ranks)` returns the
Hugging Face tensors, `split(those tensors, rank, size)` returns one rank's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorLayout(Protocol):
    """The split of one parameter over R tensor-parallel ranks.

    Example, `GatedUp()` with R = 2, gate rows g0..g3 and up rows u0..u3: rank 0 holds [g0, g1, u0, u1],
    rank 1 holds [g2, g3, u2, u3]; `merge` returns [gate, up] with four rows each.
    """

    replicated: bool
    """True if every rank holds the whole parameter, so that nothing has to be gathered."""

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The parameter's Hugging Face tensors.

        Args:
            shards: R shards in rank order; for a replicated parameter the first one is enough.
        """
        ...

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """The shard of one rank.

        Args:
            tensors: the parameter's Hugging Face tensors, in the order in which `merge` returns them.
            rank: of R, from 0.
            size: R.

        Raises:
            ValueError: R does not divide the parameter.
        """
        ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor: norms, routers."""

    replicated = True

    def merge(self, shards):
        return [shards[0]]

    def split(self, tensors, rank, size):
        return tensors[0]


@dataclass(frozen=True)
class Sharded:
    """Split evenly along one dimension: 0 for column-parallel weights, 1 for row-parallel ones."""

    dim: int
    replicated = False

    def merge(self, shards):
        return [_cat(shards, dim=self.dim)]

    def split(self, tensors, rank, size):
        return _cut(tensors[0], self.dim, rank, size)


@dataclass(frozen=True)
class RowsOrWhole:
    """Split along dimension 0 by Megatron's own layers, whole on every rank in Transformer Engine's."""

    rows: int
    """Rows of the whole parameter."""

    def resolve(self, shard: Tensor) -> TensorLayout:
        """The layout of the model at hand: replicated if this rank's shard has all rows.

        Args:
            shard: [rows of this rank, ...] the parameter as this rank holds it.
        """
        return Replicated() if shard.shape[0] == self.rows else Sharded(0)


@dataclass(frozen=True)
class Vocabulary:
    """One row per token id, padded with zeros from vocab_size to padded_size rows, split
    along dimension 0.
    """

    vocab_size: int
    padded_size: int
    replicated = False

    def merge(self, shards):
        return [_cat(shards, dim=0)[: self.vocab_size]]

    def split(self, tensors, rank, size):
        [whole] = tensors
        padding = whole.new_zeros(self.padded_size - whole.shape[0], *whole.shape[1:])
        return _cut(_cat([whole, padding]), 0, rank, size)


@dataclass(frozen=True)
class GatedUp:
    """Two Hugging Face tensors, gate and up, stacked along dimension 0; each half is split by itself."""

    replicated = False

    def merge(self, shards):
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [_cat([half[i] for half in halves], dim=0) for i in range(2)]

    def split(self, tensors, rank, size):
        return _cat([_cut(tensor, 0, rank, size) for tensor in tensors], dim=0)


@dataclass(frozen=True)
class Sections:
    """Hugging Face tensors of one or more sections of rows each; every section is split by itself.

    Example, `Sections(((2, 4), (4,)))` with R = 2, rows a0 a1 b0..b3 of the first tensor and c0..c3 of the
    second: rank 0 holds [a0, b0, b1, c0, c1].
    """

    rows: tuple[tuple[int, ...], ...]
    """For each tensor, the rows of each of its sections."""
    replicated = False

    def merge(self, shards):
        flat = [rows // len(shards) for tensor in self.rows for rows in tensor]
        cut = [shard.split(flat, dim=0) for shard in shards]
        whole = iter([_cat([sections[i] for sections in cut]) for i in range(len(flat))])
        return [_cat([next(whole) for _ in tensor]) for tensor in self.rows]

    def split(self, tensors, rank, size):
        sections = [
            section
            for tensor, rows in zip(tensors, self.rows, strict=True)
            for section in tensor.split(list(rows), dim=0)
        ]
        return _cat([_cut(section, 0, rank, size) for section in sections])


@dataclass(frozen=True)
class GroupedSections:
    """As `Sections`, but that each Hugging Face tensor has its sections' rows in turn, group by group.

    Example, `GroupedSections(2, ((2, 4),))` with R = 1: [a0, a1, b0, b1, b2, b3] is the parameter,
    [a0, b0, b1, a1, b2, b3] is the Hugging Face tensor.
    """

    groups: int
    rows: tuple[tuple[int, ...], ...]
    """For each tensor, the rows of each of its sections, of all groups together."""
    replicated = False

    def merge(self, shards):
        whole = Sections(self.rows).merge(shards)
        return [self._by_group(*pair) for pair in zip(whole, self.rows, strict=True)]

    def split(self, tensors, rank, size):
        whole = [self._by_section(tensor, rows) for tensor, rows in zip(tensors, self.rows, strict=True)]
        return Sections(self.rows).split(whole, rank, size)

    def _by_group(self, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
        parts = [section.unflatten(0, (self.groups, -1)) for section in tensor.split(list(rows), dim=0)]
        return _cat(parts, dim=1).flatten(0, 1)

    def _by_section(self, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
        by_group = tensor.unflatten(0, (self.groups, -1))
        parts = by_group.split([section // self.groups for section in rows], dim=1)
        return _cat([part.flatten(0, 1) for part in parts])


@dataclass(frozen=True)
class LessOne:
    """The weight of a norm that Megatron keeps less 1, and the checkpoint as it is. Every rank has all of it.

    Exact from 0.5 to 256, in bfloat16 too; smaller ones are rounded to what lies that near to -1.
    """

    replicated = True

    def merge(self, shards):
        return [shards[0] + 1]

    def split(self, tensors, rank, size):
        return tensors[0] - 1


@dataclass(frozen=True)
class InterleavedGateUp:
    """One Hugging Face tensor, input x output, in whose outputs gate and up take turns.

    Example, R = 1, gate rows g0, g1 and up rows u0, u1 of a weight: [g0, g1, u0, u1] is the
    parameter, [g0, u0, g1, u1] transposed is the Hugging Face tensor. A bias is not transposed.
    """

    replicated = False

    def merge(self, shards):
        gate, up = GatedUp().merge(shards)
        return [_take_turns(gate, up).movedim(0, -1).contiguous()]

    def split(self, tensors, rank, size):
        outputs = tensors[0].movedim(-1, 0)
        return GatedUp().split([outputs[::2], outputs[1::2]], rank, size)


@dataclass(frozen=True)
class Transposed:
    """One Hugging Face tensor, input x output, whose input is split over ranks: a row-parallel weight."""

    replicated = False

    def merge(self, shards):
        return [_cat(shards, dim=1).t().contiguous()]

    def split(self, tensors, rank, size):
        return _cut(tensors[0].t(), 1, rank, size)


@dataclass(frozen=True)
class GroupedQKV:
    """Three Hugging Face tensors q, k, v, interleaved by query group; the groups are split over ranks.

    Along dimension 0 each group holds the rows of its query heads, of its key head and of its value head,
    head_dim rows each. Used for weights and biases.

    With gates of the output, a group has those of its heads behind its query heads, and q has each head's
    query and gate in turn. Example, one group of heads 0 and 1: [q0, q1, g0, g1, k, v] is the parameter,
    [q0, g0, q1, g1] is q.
    """

    heads: int
    groups: int
    head_dim: int
    gated: bool = False
    replicated = False

    def merge(self, shards):
        whole = _cat(shards, dim=0)
        rest = whole.shape[1:]
        per_group, parts = self.heads // self.groups, 2 if self.gated else 1
        grouped = whole.view(self.groups, parts * per_group + 2, self.head_dim, *rest)
        q, k, v = grouped.split([parts * per_group, 1, 1], dim=1)
        q = q.unflatten(1, (parts, per_group)).transpose(1, 2)
        return [part.reshape(-1, *rest) for part in (q, k, v)]

    def split(self, tensors, rank, size):
        if self.groups % size:
            raise ValueError(
                f"--tensor-model-parallel-size {size} does not divide the model's {self.groups} key-value "
                "heads; use a divisor of them"
            )
        rest, per_group = tensors[0].shape[1:], self.heads // self.groups
        q, k, v = (tensor.view(self.groups, -1, self.head_dim, *rest) for tensor in tensors)
        q = q.unflatten(1, (per_group, -1)).transpose(1, 2).flatten(1, 2)
        return _cat([q, k, v], dim=1).chunk(size, dim=0)[rank].reshape(-1, *rest)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """torch.cat, imported with the first tensor: commands that read names and sizes alone start at once.

    Tensors that lie one behind the other in memory already, as after a gather, are not copied: an embedding
    may have gigabytes.
    """
    import torch

    if dim == 0 and _adjacent(tensors):
        first = tensors[0]
        # not with its own strides: of a dimension of size 1 they may be any
        whole = first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
        return whole.view(-1, *first.shape[1:])
    return torch.cat(list(tensors), dim=dim)


def _take_turns(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both, one of each in turn."""
    import torch

    return torch.stack([first, second], dim=1).flatten(0, 1)


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """True if contiguous tensors follow each other in one storage."""
    storage, place = tensors[0].untyped_storage(), tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage()._cdata == storage._cdata
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == place):
            return False
        place += tensor.numel()
    return True


def _cut(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The rank's equal share of a tensor along `dim`. Raises ValueError if the size does not divide it."""
    if tensor.shape[dim] % size:
        raise ValueError(
            f"a tensor-parallel size of {size} does not divide dimension {dim} of a weight of shape "
            f"{tuple(tensor.shape)}; use a divisor of {tensor.shape[dim]}"
        )
    return tensor.chunk(size, dim=dim)[rank]

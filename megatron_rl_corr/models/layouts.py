"""How one Megatron parameter is cut over tensor-parallel ranks, and which Hugging Face tensors it is made of.

merge and split are pure and inverse to each other: merge(shards of all ranks) gives the Hugging Face tensors,
split(those, rank, size) one rank's shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    replicated: bool
    """Whether every rank holds the whole, so that there is nothing to gather."""

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]: ...

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor: ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole tensor (norms, router)."""

    replicated = True

    def merge(self, shards):
        return [shards[0]]

    def split(self, tensors, rank, size):
        return tensors[0]


@dataclass(frozen=True)
class Sharded:
    """Cut evenly along one dimension: 0 for column-parallel, 1 for row-parallel weights."""

    dim: int
    replicated = False

    def merge(self, shards):
        return [torch.cat(list(shards), dim=self.dim)]

    def split(self, tensors, rank, size):
        return _cut(tensors[0], self.dim, rank, size)


@dataclass(frozen=True)
class RowsOrWhole:
    """Cut along dimension 0 by Megatron's own layers, whole on every rank in Transformer Engine's: the shard tells."""

    rows: int

    def of(self, shard: Tensor) -> Layout:
        """The layout of a parameter of which this rank holds `shard`."""
        return Replicated() if shard.shape[0] == self.rows else Sharded(0)


@dataclass(frozen=True)
class Vocabulary:
    """Rows are token ids, padded with zeros from vocab_size to padded_size rows, cut along dimension 0."""

    vocab_size: int
    padded_size: int
    replicated = False

    def merge(self, shards):
        return [torch.cat(list(shards), dim=0)[: self.vocab_size]]

    def split(self, tensors, rank, size):
        [whole] = tensors
        padding = whole.new_zeros(self.padded_size - whole.shape[0], *whole.shape[1:])
        return _cut(torch.cat([whole, padding]), 0, rank, size)


@dataclass(frozen=True)
class GatedUp:
    """[gate; up] stacked along dimension 0, each half cut on its own; two Hugging Face tensors."""

    replicated = False

    def merge(self, shards):
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([half[i] for half in halves], dim=0) for i in range(2)]

    def split(self, tensors, rank, size):
        return torch.cat([_cut(tensor, 0, rank, size) for tensor in tensors], dim=0)


@dataclass(frozen=True)
class GroupedQKV:
    """Per query group its query heads, its key, its value, along dimension 0; groups are cut over ranks.

    Three Hugging Face tensors (q, k, v), each with heads of head_dim rows. Weights and biases alike.
    """

    heads: int
    groups: int
    head_dim: int
    replicated = False

    def merge(self, shards):
        whole = torch.cat(list(shards), dim=0)
        rest = whole.shape[1:]
        per_group = self.heads // self.groups
        grouped = whole.view(self.groups, per_group + 2, self.head_dim, *rest)
        q, k, v = grouped.split([per_group, 1, 1], dim=1)
        return [part.reshape(-1, *rest) for part in (q, k, v)]

    def split(self, tensors, rank, size):
        if self.groups % size:
            raise ValueError(
                f"--tensor-model-parallel-size {size} does not divide the model's {self.groups} key-value "
                "heads; use a divisor of them"
            )
        rest = tensors[0].shape[1:]
        heads = (self.heads // self.groups, 1, 1)
        parts = [t.view(self.groups, n, self.head_dim, *rest) for t, n in zip(tensors, heads, strict=True)]
        return torch.cat(parts, dim=1).chunk(size, dim=0)[rank].reshape(-1, *rest)


def _cut(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The rank's even part of a tensor; ValueError where there is none."""
    if tensor.shape[dim] % size:
        raise ValueError(
            f"a tensor-parallel size of {size} does not divide dimension {dim} of a weight of shape "
            f"{tuple(tensor.shape)}; use a divisor of {tensor.shape[dim]}"
        )
    return tensor.chunk(size, dim=dim)[rank]

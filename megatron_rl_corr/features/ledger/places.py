"""Sums of the rest by server, by engine and by the rank that holds a token's experts, as metrics.

core/ledger_places.py makes numbers of them. S' samples of this replica, T' tokens of them on this
context-parallel rank, P places, U units: a prompt's samples on one server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched

import torch
from torch import Tensor

from megatron_rl_corr.core.ledger_places import ROUTED, is_place, place_numbers, routed_numbers
from megatron_rl_corr.core.segments import segment_sums
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.features.ledger.causes import Rest
from megatron_rl_corr.mcore.batch.replicas import broadcast_to_replica
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric

COLUMNS, ROUTED_COLUMNS = 5, 8
"""Sums in a row, as `place_numbers` and `routed_numbers` have them."""


class PlaceTable(Metric):
    """Rows of sums, which travel under ledger/at/KIND/LABEL,LABEL and are logged as
    ledger/at/KIND/LABEL/NUMBER.
    """

    columns, numbers_of = COLUMNS, staticmethod(place_numbers)

    @classmethod
    def numbers(cls, name: str, values: Sequence[float]) -> dict[str, float]:
        kind, _, labels = name.rpartition("/")
        places = cls.numbers_of(list(batched(values, cls.columns)))
        pairs = zip(labels.split(","), places, strict=True)
        return {f"{kind}/{label}/{key}": value for label, place in pairs for key, value in place.items()}


class RoutedTable(PlaceTable):
    """The same of expert-parallel ranks."""

    columns, numbers_of = ROUTED_COLUMNS, staticmethod(routed_numbers)


@collective
def server_places(samples: Sequence[Trajectory], count: int, urls: Sequence[str], layout: Layout) -> Tensor:
    """[S'] int64: which of the servers each sample came from; behind the last one where it is not of these.

    A response that several servers sampled counts as the last one's. Every rank calls it: a broadcast.

    Args:
        samples: of this replica, on its data leader; not used on others.
        count: S'.
        urls: of all servers.
    """
    places = torch.zeros(count, dtype=torch.int64, device=communication_device())
    if layout.is_data_leader:
        known = {url: at for at, url in enumerate(urls)}
        places = torch.tensor([known.get(one.server, len(urls)) for one in samples], device=places.device)
    broadcast_to_replica([places], layout)
    return places


@dataclass(frozen=True)
class RestByPlace:
    """The rest of a batch's samples, to be summed by place, on ranks of the last stage."""

    rest: Rest
    part: RolloutBatch
    """The samples."""
    servers: Tensor
    """[S'], as `server_places`."""
    noise: float
    groups: ParallelGroups

    @cached_property
    def _unit_of_sample(self) -> Tensor:
        """[S'] int64 in [0, U)."""
        keys = [self.part.group_ids, self.servers]
        if self.part.engine_ids is not None:
            keys.append(self.part.engine_ids)
        return torch.stack(keys, dim=1).unique(dim=0, return_inverse=True)[1]

    @cached_property
    def _size(self) -> Tensor:
        """[T'] float64."""
        return torch.where(self.rest.valid, torch.log(self.rest.e.abs() + self.noise / 10), 0.0)

    @collective
    def _by_unit(self, columns: Sequence[Tensor]) -> Tensor:
        """[K, S'] sums over whole units, of which there are at most S'; columns: K, [T'] each."""
        units, count = self._unit_of_sample[self.part.seq_ids], self.part.num_sequences
        made = {str(at): lambda one=one: one for at, one in enumerate(columns)}
        return self.groups.all_reduce_cp(segment_sums(made, units, count))

    @collective
    def of_samples(self, places: Tensor, count: int) -> Tensor:
        """[P, 5] float64, rows of `place_numbers`, this rank's share.

        Args:
            places: [S'] of each sample, P for one of no place.
            count: P.
        """
        valid, e, of_token = self.rest.valid, self.rest.e, places[self.part.seq_ids]
        columns = {"tokens": lambda: valid, "square": lambda: torch.where(valid, e.square(), 0.0)}
        by_place = segment_sums(columns, of_token, count + 1)
        tokens, size = self._by_unit([valid, self._size])
        mean, has = torch.where(tokens > 0, size / tokens, 0.0), (tokens > 0) * self._counts_once
        of_unit = torch.full_like(places, count).scatter(0, self._unit_of_sample, places)
        columns = {"units": lambda: has, "sum": lambda: has * mean, "squares": lambda: has * mean.square()}
        return torch.cat([by_place, segment_sums(columns, of_unit, count + 1)])[:, :-1].T

    @collective
    def of_experts(self, weights: Tensor) -> Tensor:
        """[R, 8] float64, rows of `routed_numbers`, this rank's share.

        weights: [T', R] share of each token's experts that each expert-parallel rank holds; 0 where they are
        not known.
        """
        valid = self.rest.valid & (weights.sum(dim=1) > 0)
        square = torch.where(valid, self.rest.e.square(), 0.0)
        rows = []
        for w in torch.where(valid[:, None], weights.double(), 0.0).unbind(dim=1):
            x = torch.where(valid, self._size, 0.0)
            columns = [valid, x, w, square, x * w, w * w, square * w]
            n, sum_x, sum_w, sum_e, xw, ww, ew = self._by_unit(columns)
            some = n.clamp(min=1)
            both, own, routed = xw - sum_x * sum_w / some, ww - sum_w**2 / some, ew - sum_e * sum_w / some
            once = [(n > 0).sum(), both.sum(), both.square().sum(), own.sum(), routed.sum()]
            here = torch.stack([valid.sum().double(), w.sum(), square.sum()])
            rows.append(torch.cat([here, self._counts_once * torch.stack(once)]))
        return torch.stack(rows)

    @property
    def _counts_once(self) -> float:
        """One of the ranks that share a sequence counts its units."""
        return float(self.groups.cp_rank == 0)


def server_table(rows: Tensor) -> dict[str, Metric]:
    """rows: [P, 5]."""
    return {_key("server", map(str, range(1, len(rows) + 1))): PlaceTable(rows.flatten())}


def engine_table(rows: Tensor, engines: Sequence[str]) -> dict[str, Metric]:
    """rows: [P, 5] of these engines."""
    return {_key("engine", engines): PlaceTable(rows.flatten())}


def routed_table(rows: Tensor) -> dict[str, Metric]:
    """rows: [R, 8]."""
    return {_key(ROUTED, map(str, range(len(rows)))): RoutedTable(rows.flatten())}


def _key(kind: str, labels: Sequence[str]) -> str:
    return f"ledger/at/{kind}/{','.join(labels)}"


def named_places(rows: Sequence[Sequence[float]]) -> list[int]:
    """The places that are named. rows: of all ranks."""
    return [at for at, numbers in enumerate(place_numbers(rows)) if is_place(numbers)]

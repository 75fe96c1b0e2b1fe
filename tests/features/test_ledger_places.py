"""Sums of the rest by place, from tensors: against sums written out, and with a batch cut over ranks."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.features.ledger.causes import Rest
from megatron_rl_corr.features.ledger.places import (
    RestByPlace,
    engine_table,
    named_places,
    routed_table,
    server_places,
    server_table,
)
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.moe.routes import ReplayedRoutes
from megatron_rl_corr.reduce.collectives import ParallelGroups

NOISE = 1e-3


def batch_of(lengths, groups, multiple=4):
    made = RolloutBatch.empty(lengths, multiple)
    return replace(made, group_ids=torch.tensor(groups), loss_mask=~made.padding)


def rest_of(batch, seed=0):
    e = 0.1 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)).double()
    return Rest(torch.where(batch.loss_mask, e, 0.0), batch.loss_mask, e)


def test_sums_by_server_then_those_written_out():
    # Samples of 3, 2, 4 and 1 tokens; the first two are of one prompt and one server, and so one unit.
    batch = batch_of([3, 2, 4, 1], [0, 0, 0, 1])
    servers = torch.tensor([0, 0, 1, 2])  # the last is not of these two
    rest = rest_of(batch)
    by_place = RestByPlace(rest, batch, servers, NOISE, ParallelGroups())
    first, second = by_place.of_samples(servers, 2).tolist()
    e = rest.e[batch.loss_mask]
    size = (e.abs() + NOISE / 10).log()
    for row, here, units in ((first, slice(0, 5), 1), (second, slice(5, 9), 1)):
        mean = float(size[here].mean())
        assert row == pytest.approx([len(e[here]), float(e[here].square().sum()), units, mean, mean**2])


def test_sums_by_rank_of_experts_then_those_written_out():
    batch = batch_of([3, 4], [0, 1])
    rest = rest_of(batch)
    weights = torch.rand(batch.num_tokens, 2, generator=torch.Generator().manual_seed(1))
    weights /= weights.sum(dim=1, keepdim=True)
    weights[1] = 0.0  # a token without routes
    servers = torch.zeros(2, dtype=torch.int64)
    rows = RestByPlace(rest, batch, servers, NOISE, ParallelGroups()).of_experts(weights)
    for rank, row in enumerate(rows.tolist()):
        wanted = torch.zeros(5, dtype=torch.float64)
        tokens, places = [], ([0, 2], [4, 5, 6, 7])
        for unit in places:
            w, x = weights[unit, rank].double(), (rest.e[unit].abs() + NOISE / 10).log()
            apart, square = w - w.mean(), rest.e[unit].square()
            both = (apart * x).sum()
            wanted += torch.stack(
                [torch.ones(()).double(), both, both**2, (apart**2).sum(), (apart * square).sum()]
            )
            tokens += unit
        square, w = rest.e[tokens].square(), weights[tokens, rank].double()
        sums = [6, float(w.sum()), float(square.sum())]
        assert row == pytest.approx([*sums, *wanted.tolist()])


class Lockstep:
    """Groups of context-parallel ranks that are threads."""

    def __init__(self, rank, shared):
        self.cp_rank, self._shared = rank, shared

    def all_reduce_cp(self, sums):
        self._shared.parts[self.cp_rank] = sums
        self._shared.barrier.wait()
        total = sum(self._shared.parts)
        self._shared.barrier.wait()
        return total


def test_batch_cut_over_context_ranks_then_rows_add_up_to_the_whole():
    batch = batch_of([8, 4, 8], [0, 1, 1])
    rest, servers = rest_of(batch), torch.tensor([0, 1, 1])
    weights = torch.rand(batch.num_tokens, 2, generator=torch.Generator().manual_seed(1))
    whole = RestByPlace(rest, batch, servers, NOISE, ParallelGroups())
    wanted = whole.of_samples(servers, 2), whole.of_experts(weights)
    shared = SimpleNamespace(parts=[None, None], barrier=threading.Barrier(2, timeout=20))
    found = [None, None]

    def one(rank):
        cut = batch.context_slice(rank, 2)
        number = torch.arange(batch.num_tokens)
        at = replace(batch, labels=number).context_slice(rank, 2).labels
        own = Rest(rest.e[at], rest.valid[at], rest.slope[at])
        by_place = RestByPlace(own, cut, servers, NOISE, Lockstep(rank, shared))
        found[rank] = by_place.of_samples(servers, 2), by_place.of_experts(weights[at])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for kind in range(2):
        assert torch.allclose(found[0][kind] + found[1][kind], wanted[kind])


def test_tables_then_numbers_of_each_place_by_its_label():
    rows = torch.tensor([[640, 100.0, 20, 40.0, 81.0], [640, 2.0, 20, 0.0, 1.0]], dtype=torch.float64)
    [(name, table)] = server_table(rows).items()
    found = table.numbers(name, table.values.tolist())
    assert found["ledger/at/server/1/share"] == pytest.approx(100 / 102)
    assert set(found) == {
        f"ledger/at/server/{at}/{key}" for at in (1, 2) for key in ("share", "excess", "chance")
    }
    assert named_places(rows.tolist()) == [0]
    [(name, table)] = engine_table(rows, ("sglang", "sglang+vllm")).items()
    assert "ledger/at/engine/sglang+vllm/share" in table.numbers(name, table.values.tolist())
    [(name, table)] = routed_table(torch.ones(2, 8, dtype=torch.float64)).items()
    assert "ledger/at/expert_rank/1/chance" in table.numbers(name, table.values.tolist())


def test_servers_of_samples_then_their_places_and_one_behind_for_another(monkeypatch):
    monkeypatch.setattr(
        "megatron_rl_corr.features.ledger.places.broadcast_to_replica", lambda tensors, layout: None
    )
    samples = [SimpleNamespace(server=url) for url in ("http://b", "http://a", "http://c")]
    layout = SimpleNamespace(is_data_leader=True)
    assert server_places(samples, 3, ("http://a", "http://b"), layout).tolist() == [1, 0, 2]


def test_routes_of_tokens_then_the_share_of_each_rank():
    routes = object.__new__(ReplayedRoutes)
    routes.routers = SimpleNamespace(shape=SimpleNamespace(experts=8))
    routes._layout = SimpleNamespace(pp_size=1)
    # Two layers with two experts a token, of which rank 0 of 2 holds 0 to 3; a token without routes.
    none = torch.iinfo(torch.uint8).max
    routes.given = torch.tensor(
        [[[0, 3], [4, 1]], [[5, 6], [7, 4]], [[none, none], [none, none]]], dtype=torch.uint8
    )
    assert routes.shares_of_ranks(torch.tensor([2, 0, 1]), 2).tolist() == [[0, 0], [0.75, 0.25], [0, 1]]

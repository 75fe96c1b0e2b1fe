"""Where the rest sits, on sums that are made up: what is named, and how seldom something is where places do
not differ.
"""

import math

import pytest
import torch

from megatron_rl_corr.core.ledger_places import (
    first_layer_apart,
    is_place,
    is_routed_place,
    place_lines,
    place_numbers,
    routed_numbers,
    t_chance,
)


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    # Tables of Student's t, one-sided.
    [(6.869, 5, 0.0005), (4.587, 10, 0.0005), (2.228, 10, 0.025), (3.291, 1e6, 0.0005), (-2.228, 10, 0.975)],
)
def test_chance_of_t_then_that_of_the_tables(t, freedom, chance):
    assert t_chance(t, freedom) == pytest.approx(chance, rel=0.1)


def test_server_of_three_samples_then_the_numbers_by_hand():
    # Units' means 3 and 5 here; 1, 2 and 3 there. Means 4 and 2, squares about them 2 and 2, in 3 degrees of
    # freedom: t = 2 / sqrt(4 / 3 * (1 / 2 + 1 / 3)) = 1.897, whose chance is 0.077; of two places twice.
    here, there = place_numbers([[100, 30.0, 2, 8, 34], [200, 20.0, 3, 6, 14]])
    assert here == {
        "share": 0.6,
        "excess": pytest.approx(3),
        "chance": pytest.approx(2 * 0.077, rel=0.1),
    }
    assert there["share"] == 0.4 and there["excess"] == pytest.approx(1 / 3) and there["chance"] == 1


@pytest.mark.parametrize(
    "row",
    [
        [63, 100.0, 20, 40.0, 81.0],  # few tokens
        [640, 0.001, 20, 40.0, 81.0],  # of little of the rest
        [640, 2.5, 20, 40.0, 81.0],  # not twice the others' square
        [640, 100.0, 20, 2.0, 1.3],  # within chance of the others
    ],
)
def test_server_without_evidence_then_it_is_not_named(row):
    others = [640, 2.0, 20, 0.0, 1.0]
    assert is_place(place_numbers([[640, 100.0, 20, 40.0, 81.0], others])[0])
    assert not any(is_place(one) for one in place_numbers([row, others]))


def rows_of_servers(generator, servers, units, tokens=80, worse=None, tail=1.0):
    """Rows of servers whose prompts differ in how hard they are, and whose tokens have tails."""
    e = torch.randn(units, tokens, generator=generator).abs() ** tail
    e *= torch.exp(0.7 * torch.randn(units, 1, generator=generator)) * 0.05
    at = torch.randint(servers, (units,), generator=generator)
    if worse is not None:
        e[at == worse] *= 10
    mean, square = torch.log(e + 0.001).mean(dim=1), e.square().sum(dim=1)
    rows = []
    for one in range(servers):
        here = at == one
        sums = [here.sum() * tokens, square[here].sum(), here.sum()]
        rows.append([*map(float, sums), float(mean[here].sum()), float(mean[here].square().sum())])
    return rows


@pytest.mark.parametrize("tail", [1.0, 3.0])
@pytest.mark.parametrize(("servers", "units"), [(2, 8), (4, 16), (16, 64), (8, 9)])
def test_servers_alike_then_one_is_named_in_less_than_1_run_of_100(servers, units, tail):
    generator = torch.Generator().manual_seed(servers)
    named = 0
    for _ in range(400):
        rows = rows_of_servers(generator, servers, units, tail=tail)
        named += any(is_place(one) for one in place_numbers(rows))
    assert named <= 2


@pytest.mark.parametrize(("servers", "units"), [(2, 16), (4, 32), (16, 64)])
def test_one_server_with_ten_times_the_rest_then_it_alone_is_named(servers, units):
    generator = torch.Generator().manual_seed(servers)
    found = []
    for _ in range(100):
        numbers = place_numbers(rows_of_servers(generator, servers, units, worse=1))
        found.append([at for at, one in enumerate(numbers) if is_place(one)])
    assert all(one in ([], [1]) for one in found) and found.count([1]) >= 80


def rows_of_ranks(generator, ranks, units, tokens=80, worse=None):
    """Rows of expert-parallel ranks; e^2 of a token grows with its routes to rank `worse`."""
    w = torch.rand(units, tokens, ranks, generator=generator) ** 3
    w /= w.sum(dim=-1, keepdim=True)
    e = torch.randn(units, tokens, generator=generator).abs() * 0.05
    e *= torch.exp(0.7 * torch.randn(units, 1, generator=generator))
    if worse is not None:
        e *= w[..., worse].sqrt()
    x, rows = torch.log(e + 0.001), []
    for rank in range(ranks):
        own = w[..., rank]
        apart, square = own - own.mean(dim=1, keepdim=True), e.square()
        both = (apart * x).sum(dim=1)
        squares = [both.sum(), both.square().sum(), apart.square().sum(), (apart * square).sum()]
        rows.append([units * tokens, float(own.sum()), float(square.sum()), units, *map(float, squares)])
    return rows


def test_routed_ranks_then_the_numbers_by_hand():
    # Slope 6 / 15 = 0.4, mean w 0.4, mean e^2 0.2: 0.8 of it. Units' sums 1 .. 5: mean 3, t = 3 /
    # sqrt(2.5 / 5) = 4.243 in 4 degrees of freedom, whose chance is 0.0066.
    first, second = routed_numbers(
        [[100, 40.0, 20.0, 5, 15.0, 55.0, 15.0, 6.0], [100, 60.0, 20.0, 5, -15.0, 55.0, 15.0, -6.0]]
    )
    assert first == {"share": pytest.approx(0.8), "chance": pytest.approx(2 * 0.0066, rel=0.1)}
    assert second == {"share": pytest.approx(-1.2), "chance": 1.0}


@pytest.mark.parametrize(("ranks", "units"), [(2, 8), (8, 16)])
def test_ranks_alike_then_one_is_named_in_less_than_1_run_of_100(ranks, units):
    generator = torch.Generator().manual_seed(ranks)
    made = (routed_numbers(rows_of_ranks(generator, ranks, units)) for _ in range(400))
    assert sum(any(map(is_routed_place, one)) for one in made) <= 2


def test_one_rank_whose_tokens_have_more_of_the_rest_then_it_alone():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        numbers = routed_numbers(rows_of_ranks(generator, 2, 16, worse=1))
        assert [is_routed_place(one) for one in numbers] == [False, True]


def step(*rates, tokens=1000):
    found = {f"router_replay/disagreement/layer_{at:03d}": rate for at, rate in enumerate(rates)}
    return found | {"ledger/tokens": tokens}


def test_layers_whose_routes_differ_then_the_first_from_which_on_all_do():
    assert first_layer_apart(step(0.0, 0.01, 0.3, 0.25)) == (2, 0.01, 0.25)
    assert first_layer_apart(step(0.0, 0.0, 0.01, 0.2, 0.2)) == (3, 0.01, 0.2)  # the larger step
    assert first_layer_apart(step(0.2, 0.3, 0.25)) == (0, 0.0, 0.2)
    assert first_layer_apart(step(0.16, 0.7, 0.8)) == (0, 0.0, 0.16)  # the first differs, too
    sparse = {f"router_replay/disagreement/layer_{at:03d}": rate for at, rate in {3: 0.0, 7: 0.3}.items()}
    assert first_layer_apart(sparse | {"ledger/tokens": 1000}) == (7, 0.0, 0.3)


def test_layers_whose_routes_differ_little_or_here_and_there_then_none():
    assert first_layer_apart(step(0.0, 0.3, 0.0)) is None
    assert first_layer_apart(step(0.02, 0.04, 0.06)) is None
    assert first_layer_apart(step(0.0, 0.01, tokens=100)) is None
    assert first_layer_apart(step(0.0, 0.3, tokens=63)) is None
    assert first_layer_apart({"ledger/tokens": 1000}) is None
    assert first_layer_apart(step(0.0, math.nan)) is None


def test_healthy_routes_of_many_layers_then_no_layer():
    generator, named = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        rates = (torch.rand(61, 300, generator=generator) < torch.linspace(0.005, 0.03, 61)[:, None]).float()
        named += first_layer_apart(step(*rates.mean(dim=1).tolist(), tokens=300)) is not None
    assert named <= 2


def test_words_then_what_is_named_alone():
    numbers = step(0.002, 0.31) | {
        "ledger/at/server/1/share": 0.09,
        "ledger/at/server/1/excess": 0.1,
        "ledger/at/server/1/chance": 1.0,
        "ledger/at/server/2/share": 0.91,
        "ledger/at/server/2/excess": 10.0,
        "ledger/at/server/2/chance": 1e-5,
        "ledger/at/engine/vllm/share": 0.91,
        "ledger/at/engine/vllm/excess": 10.0,
        "ledger/at/engine/vllm/chance": 1e-5,
        "ledger/at/expert_rank/0/share": 0.3,
        "ledger/at/expert_rank/0/chance": 1.0,
        "ledger/at/expert_rank/1/share": 0.7,
        "ledger/at/expert_rank/1/chance": 1e-4,
    }
    assert place_lines(numbers, "the rest", ["http://a:1", "http://b:1"]) == [
        "91 % of the rest is of samples of server 2 of 2 (http://b:1)",
        "91 % of the rest is of samples of the engine vllm",
        "70 % of the rest goes with routes to the experts of expert-parallel rank 1 of 2",
        "servers choose other experts from layer 1 on (0.2 % of tokens before, 31 % or more from there)",
    ]
    assert place_lines(numbers, "the rest")[0] == "91 % of the rest is of samples of server 2 of 2"
    assert place_lines(numbers | {"ledger/at/expert_rank/1/share": 0.4}, "the rest")[2:] == [
        "servers choose other experts from layer 1 on (0.2 % of tokens before, 31 % or more from there)"
    ]

"""Which routes can't be those of their tokens: made up choices of a router, and routes that went
wrong in one way.
"""

import pytest
import torch

from megatron_rl_corr.moe.agreement import RouteAgreement, judge, kappa

EXPERTS, TOP_K, LAYERS = 8, 2, 3


def choices(tokens, *, stays=1, seed=0):
    """[t, M, k]: each layer's experts of random tokens, the same for `stays` tokens on end."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(-(-tokens // stays), LAYERS, EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices.repeat_interleave(stays, dim=0)[:tokens]


def of_rows(rows, layers, experts, positions, **settings):
    """A RouteAgreement of samples whose tokens stand at these positions, row by row; their
    places [t, rows].
    """
    seq_ids = torch.arange(rows).repeat_interleave(len(positions))
    agreement = RouteAgreement(
        seq_ids, positions.repeat(rows), samples=rows, layers=layers, experts=experts, **settings
    )
    return agreement, torch.arange(len(seq_ids)).view(rows, -1).t()


def found(routes, natural, *, minimum=0.25, known=None, positions=None):
    """What `judge` says of two samples: a right one, then this one [t, M, k] each."""
    tokens = len(natural)
    agreement, places = of_rows(2, LAYERS, EXPERTS, torch.arange(tokens) if positions is None else positions)
    routes = routes.clone()
    if known is not None:
        routes[known:] = 255
    for layer in range(LAYERS):
        both = torch.stack([natural[:, layer], routes[:, layer]], dim=1).to(torch.uint8)
        own = torch.stack([natural[:, layer]] * 2, dim=1)
        agreement.observe(places, layer, both, own, torch.zeros(tokens, 2, EXPERTS))
    return judge(agreement, (4, 7, 9), TOP_K, minimum)


def test_kappa_of_three_tokens_by_hand():
    # Both chose {0, 1}, {0, 2}, {0, 3}, but the last, where one took {0, 2}: 5 of 6 experts agree.
    # Counts are 3, 1, 1, 1 and 3, 1, 2, 0, so chance is (9 + 1 + 2) / (3 * 6) = 2/3, and kappa (5/6 -
    # 2/3) / (1/3) = 1/2.
    counts = torch.tensor([[3.0, 1, 1, 1], [3, 1, 2, 0]])
    beyond, room = kappa(torch.tensor(5.0), counts, torch.tensor(3.0), 2)
    assert (float(beyond), float(room)) == pytest.approx((1 / 6, 1 / 3))


@pytest.mark.parametrize("by", [1, -1])
def test_judge_when_neighbours_are_routed_alike_and_routes_are_shifted_then_only_the_shift_tells(by):
    natural = choices(60, stays=3)
    row, said = found(natural.roll(by, 0), natural)
    # Two tokens of three have their own experts still, and more by chance.
    assert (
        row == 1
        and "rule shift: Megatron would choose 7" in said
        and ("behind" if by > 0 else "before") in said
    )
    assert "100% of those of the tokens" in said or "9" in said.split("and ")[1][:2]


def test_judge_when_two_layers_are_exchanged_then_the_first_of_them_is_named():
    natural = choices(40)
    row, said = found(natural[:, [0, 2, 1]], natural)
    assert row == 1 and "rule agreement" in said and ("in layer 7" in said or "in layer 9" in said)


def test_judge_when_of_another_model_then_all_layers_are_named_even_in_a_short_sample():
    natural = choices(8)
    row, said = found(choices(8, seed=1), natural)
    assert row == 1 and "in all layers of a stage" in said
    assert found(choices(8, seed=1), natural, minimum=-1.0) is None


def test_judge_when_a_tenth_of_the_experts_differs_then_nothing_is_wrong():
    natural = choices(50)
    routes = natural.clone()
    routes[::5, :, 0] = torch.tensor(
        [next(e for e in range(EXPERTS) if e not in row) for row in natural[::5].flatten(0, 1).tolist()]
    ).view(-1, LAYERS)
    assert found(routes, natural) is None


def test_judge_when_too_few_tokens_have_routes_then_nothing_can_be_told():
    natural = choices(30)
    # 3 layers of 2 experts a token, of which about 3 in 4 would differ by chance: 27 and 36 against 32.
    assert found(choices(30, seed=1), natural, known=6) is None
    assert found(choices(30, seed=1), natural, known=8) is not None


def test_judge_when_all_tokens_take_the_same_experts_then_nothing_can_be_told():
    natural = choices(40, stays=40)
    assert found(natural.roll(1, 0), natural) is None


def test_judge_when_this_rank_has_two_parts_of_the_row_then_tokens_at_the_seam_are_no_neighbours():
    natural = choices(60, stays=3)
    positions = torch.cat([torch.arange(30), torch.arange(90, 120)])
    agreement, places = of_rows(1, 1, EXPERTS, positions)
    routes = natural[:, :1].to(torch.uint8)
    agreement.observe(places, 0, routes, natural[:, :1], torch.zeros(60, 1, EXPERTS))
    assert agreement.sums[0, 0, 3] == 58 and agreement.sums[0, 0, 0] == 60


@pytest.mark.parametrize("softmax", [True, False])
def test_gates_apart_of_two_tokens_by_hand(softmax):
    agreement, places = of_rows(1, 1, 4, torch.arange(2), softmax=softmax)
    scores = torch.tensor([[0.6, 0.2, 0.1, 0.0], [0.1, 0.3, 0.1, 0.4]])[:, None]
    natural, routes = torch.tensor([[0, 1], [3, 1]])[:, None], torch.tensor([[2, 1], [1, 3]])[:, None]
    agreement.observe(places, 0, routes.to(torch.uint8), natural, scores)
    # Of the first token expert 0 is in one choice only; the second token's sets are the same,
    # in another order.
    expected = 1 / (1 + torch.exp(torch.tensor(-0.4))) if softmax else 0.75
    assert float(agreement.sums[0, 0, 7]) == pytest.approx(float(expected))
    assert agreement.sums[0, 0, :3].tolist() == [2, 3, 1]


def judged(routes, natural, *, experts=8, parts=1):
    """What `judge` says of rows [N, t, k] in one layer, or [N, t, M, k]."""
    routes, natural = (
        ids.transpose(0, 1) if ids.ndim == 4 else ids.transpose(0, 1)[:, :, None] for ids in (routes, natural)
    )
    tokens, rows, layers, top_k = natural.shape
    agreement, places = of_rows(rows, layers, experts, torch.arange(tokens), parts=parts)
    for layer in range(layers):
        ids, scores = routes[:, :, layer].to(torch.uint8), torch.zeros(tokens, rows, experts)
        agreement.observe(places, layer, ids, natural[:, :, layer], scores)
    return judge(agreement, tuple(range(layers)), top_k, 0.25)


def test_judge_when_hardly_any_token_takes_other_experts_then_a_few_that_differ_are_no_proof():
    natural = torch.tensor([0, 1]).repeat(1, 16, 1)
    routes = natural.clone()
    routes[0, 3, 1] = routes[0, 9, 1] = 2
    assert judged(routes, natural) is None  # 30 of 32 experts are the same
    natural = torch.zeros(1, 200, 1, dtype=torch.int64)
    routes = natural.clone()
    routes[0, ::17] = 1
    assert judged(routes, natural) is None


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 1)])
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.1])
def test_judge_when_a_router_prefers_some_experts_then_rounding_passes_and_another_model_does_not(
    experts, top_k, spread
):
    generator = torch.Generator().manual_seed(5)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    preferred = some(2, 8, experts)  # of two models, in 8 layers
    scores = preferred[0] + spread * some(256, 24, 8, experts)
    natural = scores.topk(top_k).indices
    rounded = (scores + 0.03 * spread * some(*scores.shape)).topk(top_k).indices
    other = (preferred[1] + spread * some(*scores.shape)).topk(top_k).indices
    assert judged(rounded, natural, experts=experts) is None
    assert all(judged(other[row, None], natural[row, None], experts=experts) for row in range(4))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("flickers", [False, True])
def test_judge_when_long_repeated_text_is_at_a_near_tie_then_it_counts_as_few_tokens(flickers, parts):
    prompt = choices(120)[:, 0]
    one, another = torch.tensor([0, 1]).repeat(500, 1), torch.tensor([0, 2]).repeat(500, 1)
    if flickers:  # both sides toss a coin for each token
        coins = torch.rand(2, 500, 1, generator=torch.Generator().manual_seed(1)) < 0.5
        one, another = (torch.where(coin, one, another) for coin in coins)
    natural, routes = torch.cat([prompt, one])[None], torch.cat([prompt, another])[None]
    assert judged(routes, natural, parts=parts) is None
    # The prompt alone tells that routes are another's, however long the text behind it agrees.
    unrelated = torch.cat([choices(120, seed=1)[:, 0], one])[None]
    assert judged(unrelated, natural, parts=parts) is not None


def test_judge_when_tokens_of_one_expert_come_in_plenty_then_routes_of_other_tokens_are_refused_still():
    """Two choices of a favourite and one of seven more share half of their experts by chance alone."""
    generator = torch.Generator().manual_seed(2)
    favourite, others = (
        torch.zeros(2, 300, dtype=torch.int64),
        torch.randint(1, 8, (2, 300), generator=generator),
    )
    natural, routes = torch.stack([favourite, others], dim=2)[:, None]
    assert "rule agreement" in judged(routes, natural)[1]
    assert judged(natural, natural) is None


def test_sums_of_repeated_sets_by_hand():
    natural = torch.tensor([[0, 1], [1, 0], [2, 3]] + [[0, 1]] * 18)[:, None]  # 20 of one set, 1 of another
    routes = natural.clone()
    routes[0] = torch.tensor([0, 4])
    agreement, places = of_rows(1, 1, 8, torch.arange(21), parts=2)
    agreement.observe(places, 0, routes.to(torch.uint8), natural, torch.zeros(21, 1, 8))
    # On each of two ranks 20 tokens weigh as 4, so 0.2 each; one expert of a token differs.
    assert agreement.sums[0, 0, 8:].tolist() == pytest.approx([5, 9.8])
    assert agreement.counts[0, 0].flatten().tolist() == pytest.approx(
        [4, 3.8, 1, 1, 0.2, 0, 0, 0, 4, 4, 1, 1, 0, 0, 0, 0]
    )
    assert agreement.sums[0, 0, :2].tolist() == [21, 41]


def test_observe_when_samples_are_packed_then_sums_are_those_of_rows_and_padding_counts_nowhere():
    natural = choices(30)
    routes = natural.clone().to(torch.uint8)
    routes[::3, :, 0] = (routes[::3, :, 0] + 3) % EXPERTS
    scores = torch.rand(30, 1, EXPERTS, generator=torch.Generator().manual_seed(4))
    rows, sizes = [], (12, 18)
    for ids, chosen, values in zip(
        routes.split(sizes), natural.split(sizes), scores.split(sizes), strict=True
    ):
        agreement, places = of_rows(1, 1, EXPERTS, torch.arange(len(ids)))
        agreement.observe(places, 0, ids[:, :1], chosen[:, :1], values)
        rows.append(agreement)
    # Sample 1 lies in front of sample 0, and 3 places without a token behind them.
    positions = torch.cat([torch.arange(12), torch.arange(18)])
    packed = RouteAgreement(
        torch.arange(2).repeat_interleave(torch.tensor(sizes)),
        positions,
        samples=2,
        layers=1,
        experts=EXPERTS,
    )
    order = torch.cat([torch.arange(12, 30), torch.arange(12), torch.full((3,), 30)])[:, None]
    behind = order.clamp(max=29)[:, 0]
    for _ in range(2):  # run again, as Megatron may: put there once
        packed.observe(order, 0, routes[behind, :1], natural[behind, :1], scores[behind])
    for sample, alone in enumerate(rows):
        torch.testing.assert_close(packed.sums[sample], alone.sums[0])
        torch.testing.assert_close(packed.counts[sample], alone.counts[0])

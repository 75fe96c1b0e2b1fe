"""The bound of a gradient's bias by hand, and its certainty against draws."""

import math

import pytest
import torch

from megatron_rl_corr.core.bias_bound import LONGEST_SCORE, bias_terms, longest_scores, mean_at_most


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_terms_when_made_then_as_by_hand():
    # two responses, of two tokens and of one; A = 2 and -1, products 0.25 and 4, the cap 3
    terms = bias_terms(
        double(2.0, 1.0, -1.0),
        double(0.5, 1.0, 2.0),
        double(2.0, -1.0),
        double(0.25, 4.0),
        torch.tensor([0, 0, 1]),
        cap=3.0,
        furthest=10.0,
    )
    # wanted 0.5 and -3: 1.5 x 0.5 + 0.5 x 1 + 10 x 0.75, and 2 x 2 + 10 x -2
    assert terms.tolist() == pytest.approx([8.75, -16.0])


def test_scores_when_the_rest_is_unknown_then_never_shorter_than_the_gradient():
    p = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(dim=1)
    p[0], p[1] = double(0.0, 1.0, 0.0, 0.0, 0.0, 0.0), double(0.5, 0.5, 0.0, 0.0, 0.0, 0.0)
    exact = torch.cat([1 - p[:, :1], p[:, 1:]], dim=1).norm(dim=1)
    bound = longest_scores(p[:, 0].log())
    assert (bound >= exact - 1e-15).all() and bound.max() <= LONGEST_SCORE
    assert bound[:2].tolist() == pytest.approx(exact[:2].tolist())  # all of the rest on one token


def test_bound_when_one_token_has_two_choices_then_at_least_the_bias():
    # p = (0.6, 0.4), mu = (0.8, 0.2), rewards 1 and -1, no weights
    p, mu, rewards = double(0.6, 0.4), double(0.8, 0.2), double(1.0, -1.0)
    scores = torch.eye(2, dtype=torch.float64) - p
    bias = ((mu - p) * rewards) @ scores
    terms = [
        bias_terms(
            rewards,
            longest_scores(p.log()),
            rewards,
            p / mu,
            torch.arange(2),
            cap=cap,
            furthest=LONGEST_SCORE,
        )
        for cap in (1.0, 2.0)
    ]
    bounds = [(mu @ one).item() for one in terms]
    # cap 1: 0.8 x (0.25 x 0.4 + 0.25) and 0; cap 2: 0.8 x the same + 0.2 x (0.6 - 1), all times sqrt(2)
    assert bounds == pytest.approx([0.28 * LONGEST_SCORE, 0.2 * LONGEST_SCORE])
    assert bias.norm() < bounds[1] < bounds[0]


def test_mean_when_certified_then_the_formula_and_above_the_truth():
    values = double(0.0, 1.0, 1.0, 0.0)
    rarity = math.log(2 / 0.05)
    wanted = 0.5 + math.sqrt(2 * (1 / 3) * rarity / 4) + 7 * 3 * rarity / (3 * 3)
    assert mean_at_most(values, lowest=-1.0, highest=2.0, chance=0.05).item() == pytest.approx(wanted)
    draws = torch.rand(500, 400, generator=torch.Generator().manual_seed(1), dtype=torch.float64) < 0.1
    certified = [mean_at_most(one, lowest=0.0, highest=1.0, chance=0.05).item() for one in draws.double()]
    assert sum(one < 0.1 for one in certified) <= 25 and max(certified) < 0.3

"""Enumeration against sums written out by hand, finite differences and Monte Carlo."""

import math

import pytest
import torch

from lab.estimators import all_arms
from lab.exact import Moments, distance, moments, true_gradient
from lab.map import Cell, case_of, cases_of
from lab.mismatch import KINDS, Noise, sampler_conditionals
from lab.policies import TASKS, World, expected_reward, random_tables
from lab.sampled import sampled_moments

TINY = World(vocabulary=2, length=2)
# logits of token 0 and 1 behind token 0, behind token 1, and at the beginning
TABLE = ((0.3, -0.2), (-0.5, 0.4), (0.1, 0.7))
# log-odds of token 1 for the sampler: at the beginning, behind 0, behind 1
SAMPLER = (0.2, -0.9, 0.6)
REWARDS = (1.0, 0.0, 0.25, 0.5)  # of 00, 01, 10, 11


def softmax(logits):
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def by_hand(weigh):
    """(|bias|^2, variance, along) over |g|^2: loops over the four responses, with Python's floats alone.

    weigh: the ratios of both tokens -> their weights.
    """
    p = {before: softmax(TABLE[row]) for before, row in ((None, 2), (0, 0), (1, 1))}
    odds = dict(zip((None, 0, 1), SAMPLER, strict=True))
    mu = {before: softmax((0.0, odds[before])) for before in p}
    responses = [(first, second) for first in (0, 1) for second in (0, 1)]
    chance = {y: p[None][y[0]] * p[y[0]][y[1]] for y in responses}
    baseline = sum(chance[y] * reward for y, reward in zip(responses, REWARDS, strict=True))
    truth, mean, power = [0.0] * 6, [0.0] * 6, 0.0
    for y, reward in zip(responses, REWARDS, strict=True):
        drawn = mu[None][y[0]] * mu[y[0]][y[1]]
        ratios = (p[None][y[0]] / mu[None][y[0]], p[y[0]][y[1]] / mu[y[0]][y[1]])
        estimate = [0.0] * 6
        for place, (before, row) in enumerate(((None, 2), (y[0], y[0]))):
            for token in (0, 1):
                score = (token == y[place]) - p[before][token]
                truth[2 * row + token] += chance[y] * (reward - baseline) * score
                estimate[2 * row + token] += weigh(ratios)[place] * (reward - baseline) * score
        mean = [old + drawn * new for old, new in zip(mean, estimate, strict=True)]
        power += drawn * sum(new * new for new in estimate)
    norm2 = sum(one * one for one in truth)
    bias2 = sum((one - other) ** 2 for one, other in zip(mean, truth, strict=True))
    along = sum(one * other for one, other in zip(mean, truth, strict=True))
    return bias2 / norm2, (power - sum(one * one for one in mean)) / norm2, along / norm2


def tiny_case():
    table = torch.tensor([TABLE], dtype=torch.float64)
    odds = torch.tensor(SAMPLER, dtype=torch.float64)
    mu = torch.stack([torch.zeros(3, dtype=torch.float64), odds], dim=1).log_softmax(dim=1)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    scores, truth = TINY.scores(table)[0], true_gradient(TINY, table, rewards)[0]
    return case_of(TINY, scores, truth, TINY.log_conditionals(table)[0], mu, rewards)


@pytest.mark.parametrize(
    ("arm", "weigh"),
    [
        ("none", lambda ratios: (1.0, 1.0)),
        ("token_unbounded", lambda ratios: ratios),
        ("token_clip", lambda ratios: [min(max(ratio, 0.5), 2.0) for ratio in ratios]),
        ("sequence_unbounded", lambda ratios: (ratios[0] * ratios[1],) * 2),
        ("sequence_mask", lambda ratios: (0.5 <= ratios[0] * ratios[1] <= 2 and ratios[0] * ratios[1],) * 2),
        ("geometric_truncate", lambda ratios: (min(2.0, math.sqrt(ratios[0] * ratios[1])),) * 2),
        ("rule:seq_mean_ratio", lambda ratios: (0.9 <= math.sqrt(ratios[0] * ratios[1]) <= 1.1,) * 2),
        ("rule:token_ratio", lambda ratios: [0.5 <= ratio <= 2.0 for ratio in ratios]),
    ],
)
def test_arm_when_enumerated_then_as_by_hand(arm, weigh):
    found = tiny_case().measure(all_arms()[arm])
    # the package subtracts log-probs in float32
    assert (found.bias2, found.variance, found.along) == pytest.approx(by_hand(weigh), rel=1e-5, abs=1e-12)


def test_hand_made_case_when_weighed_then_arms_differ():
    results = [by_hand(weigh) for weigh in (lambda r: (1.0, 1.0), lambda r: r, lambda r: (r[0] * r[1],) * 2)]
    assert results[0][0] > 0.14 > results[1][0] > 0.1 and results[2][0] < 1e-30


def test_sequence_weights_when_unbounded_then_unbiased():
    case = next(cases_of(Cell("outcome", "rounding", 1.0, 6), 1))
    exact = (case.samples.train_logprobs - case.samples.rollout_logprobs).sum(dim=1).exp()
    pulls = (exact * case.samples.advantages)[:, None].expand_as(case.samples.train_logprobs)
    assert moments(pulls, case.scores, case.probabilities, case.truth).bias2 < 1e-24  # (1e-12)^2
    # the package's weights are float32
    assert case.measure(all_arms()["sequence_unbounded"]).bias2 < 1e-12
    assert case.measure(all_arms()["token_unbounded"]).bias2 > 1e-4


@pytest.mark.parametrize("task", TASKS)
def test_true_gradient_when_differenced_then_the_same(task):
    world = World(vocabulary=4, length=3)
    theta, step = random_tables(world, 1, spread=1.0, seed=3), 1e-5
    rewards = TASKS[task](world.responses, 4)
    for place, slope in enumerate(true_gradient(world, theta, rewards)[0]):
        moved = torch.zeros(theta.numel(), dtype=torch.float64)
        moved[place] = step
        up, down = (
            expected_reward(world, theta + sign * moved.view_as(theta), rewards).item() for sign in (1, -1)
        )
        assert (up - down) / (2 * step) == pytest.approx(slope.item(), abs=1e-9)


def test_expected_reward_when_grown_then_the_sum_over_responses():
    world = World(vocabulary=3, length=4)
    theta = random_tables(world, 2, spread=1.0, seed=1)
    rewards = TASKS["dense"](world.responses, 3)
    listed = world.token_logprobs(world.log_conditionals(theta)).sum(dim=2).exp() @ rewards
    assert expected_reward(world, theta, rewards).tolist() == pytest.approx(listed.tolist(), abs=1e-14)


def test_scores_when_weighed_by_the_policy_then_their_mean_is_0():
    case = next(cases_of(Cell("parity", "rounding", 0.3, 4), 1))
    p = case.samples.train_logprobs.sum(dim=1).exp()
    assert (p @ case.scores.sum(dim=1)).abs().max() < 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_when_listed_then_its_probabilities_sum_to_1(kind):
    for case in cases_of(Cell("outcome", kind, KINDS[kind].sizes[-1], 4), 2):
        assert case.probabilities.sum().item() == pytest.approx(1, abs=1e-12)
        assert 0 < case.distance.tv < 1 and 0 < case.distance.ess < 1 + 1e-12


def test_top_p_when_sampled_then_weights_miss_the_mass_that_it_cut():
    world = World(vocabulary=4, length=1)
    theta = torch.tensor([[[0.0] * 4] * 4 + [[math.log(x) for x in (0.5, 0.3, 0.15, 0.05)]]]).double()
    mu = sampler_conditionals(world, theta, Noise.drawn(world, 1, 0), "top_p", 0.1)
    # 0.5 + 0.3 is below 0.9, so the third is kept too, and the fourth not
    assert mu[0, 0].exp().tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0])
    assert distance(world, world.log_conditionals(theta)[0], mu[0]).tv == pytest.approx(0.05)


def test_moments_when_added_up_then_errors_of_a_batch():
    # |E g_hat|^2 = 0.25 + 2 x 0.75 - 1 = 0.75: over 8, 1 - 0.75^2 / (0.75 + 4 / 8) = 0.55
    found = Moments(bias2=0.25, variance=4.0, along=0.75)
    assert found.error(8) == 0.75 and found.direction_error(8) == pytest.approx(0.55)


@pytest.mark.parametrize("arm", ["none", "token_truncate"])
def test_sampled_moments_when_the_exact_ones_are_known_then_within_their_errors(arm):
    case = next(cases_of(Cell("outcome", "rounding", 1.0, 4), 1))
    exact = case.measure(all_arms()[arm])
    found = sampled_moments(case, all_arms()[arm], batch=16, batches=400, seed=3)
    assert abs(found.bias2 - exact.bias2) < 4 * found.bias2_se
    assert abs(found.variance - exact.variance / 16) < 4 * found.variance_se < found.variance


def test_arm_when_it_couples_samples_then_the_map_refuses_it():
    with pytest.raises(ValueError, match="slime_mis.*couples"):
        tiny_case().measure(all_arms()["preset:slime_mis"])

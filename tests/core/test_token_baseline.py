"""The optimal token baseline by hand and against a plain loop; its energies, and proxies of a
gradient's variance.
"""

import math

import pytest
import torch

from megatron_rl_corr.core.token_baseline import (
    gradient_energies,
    reward_sums,
    token_advantages,
    total_power,
    variance_proxies,
)

L = 4
"""Positions of a response."""


def advantages_of(rewards, energies, groups, counted=None, num_groups=2):
    """Of rows of energies, cumulative already: [N][n] nested lists, by the package."""
    rows = [(row, t) for row, of_row in enumerate(energies) for t in range(len(of_row))]
    counted = torch.tensor([counted is None or counted[row][t] for row, t in rows])
    cells = torch.tensor([groups[row] * L + t for row, t in rows])
    by_token = torch.tensor([rewards[row] for row, _ in rows])
    flat = torch.tensor([energies[row][t] for row, t in rows], dtype=torch.float64)
    sums = reward_sums(by_token, flat, counted, torch.where(counted, cells, 0), num_groups * L)
    made = token_advantages(by_token, sums, counted, cells, length=L)
    return dict(zip(rows, made.tolist(), strict=True))


def test_advantages_when_computed_by_hand_then_rewards_less_those_weighed_by_energy():
    # Group 0: rewards 1 and 0. B at position 0: (1 x 0.5 + 0 x 1.5) / 2 = 0.25; at 1: (1 x 2 + 0) / 4 = 0.5.
    # Group 1: rewards 2 and 6 with equal energies: B = 4.
    found = advantages_of([1.0, 0.0, 2.0, 6.0], [[0.5, 2.0, 2.5], [1.5, 2.0], [1.0], [1.0]], [0, 0, 1, 1])
    expected = {
        (0, 0): 0.75,
        (0, 1): 0.5,
        (0, 2): 1.0,
        (1, 0): -0.25,
        (1, 1): -0.5,
        (2, 0): -2.0,
        (3, 0): 2.0,
    }
    # The last token of row 0 has its position to itself: no baseline.
    assert found == pytest.approx(expected, abs=1e-7)


def test_advantages_when_a_token_does_not_count_then_nobody_sees_its_response_there_and_it_has_none():
    # At position 0 row 1 alone counts: no baseline. At position 1 all do: (2 x 1 + 4 x 3) / 6 = 14 / 6.
    counted = [[False, True], [True, True]]
    found = advantages_of([1.0, 3.0], [[1.0, 2.0], [2.0, 4.0]], [0, 0], counted, num_groups=1)
    expected = {(0, 0): 0.0, (0, 1): 1 - 14 / 6, (1, 0): 3.0, (1, 1): 3 - 14 / 6}
    assert found == pytest.approx(expected, abs=1e-6)


def test_advantages_when_a_rejected_response_has_no_reward_then_the_others_are_as_without_it():
    few = advantages_of([1.0, 3.0], [[1.0, 2.0], [2.0, 4.0]], [0, 0])
    counted = [[True] * 2, [True] * 2, [False] * 2]
    found = advantages_of([1.0, 3.0, math.nan], [[1.0, 2.0], [2.0, 4.0], [9.0, 9.0]], [0, 0, 0], counted)
    assert {place: value for place, value in found.items() if place[0] < 2} == few
    assert found[2, 0] == found[2, 1] == 0.0


def test_advantages_when_one_response_of_a_group_is_left_then_0_and_no_reward_without_a_baseline():
    # As group_mean has it. Group 1 has two, of which the second is longer: its end alone has no baseline.
    counted = [[True, True], [False], [True], [True, True]]
    found = advantages_of([1.0, 5.0, 2.0, 6.0], [[1.0, 2.0], [1.0], [1.0], [1.0, 2.0]], [0, 0, 1, 1], counted)
    assert found == {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 0.0, (2, 0): -2.0, (3, 0): 2.0, (3, 1): 6.0}


def test_advantages_when_all_rewards_of_a_group_are_equal_then_exactly_0_whatever_the_energies():
    generator = torch.Generator().manual_seed(0)
    for reward in (0.1, 1 / 3, -0.7, 123.456, 1e-30):
        energies = (torch.rand(7, L, generator=generator, dtype=torch.float64) * 100).cumsum(1).tolist()
        found = advantages_of([reward] * 7, energies, [0] * 7)
        assert set(found.values()) == {0.0}


def test_advantages_when_no_token_has_energy_then_against_the_plain_mean():
    # Tokens that were certain: their log-prob has no gradient, and no 0 / 0 either.
    found = advantages_of([1.0, 0.0, 0.5], [[0.0], [0.0], [0.0]], [0, 0, 0])
    assert [found[row, 0] for row in range(3)] == pytest.approx([0.5, -0.5, 0.0])
    # Nor do running sums that rounding has left below 0 turn a weight around.
    found = advantages_of([1.0, 0.0], [[-0.5], [1.0]], [0, 0])
    assert found[0, 0] == pytest.approx(1.0) and found[1, 0] == pytest.approx(0.0, abs=1e-7)


def test_reward_sums_when_by_hand_then_1e_8_is_added_and_what_does_not_count_adds_nothing():
    # Cell 1 has energies 3 and 0 with rewards 2 and 5; the token of cell 0 does not count.
    energies = torch.tensor([3.0, 0.0, 7.0], dtype=torch.float64)
    rewards, counted = torch.tensor([2.0, 5.0, math.nan]), torch.tensor([True, True, False])
    sums = reward_sums(rewards, energies, counted, torch.tensor([1, 1, 0]), 2)
    expected = [[0.0, 6 + 7e-8], [0.0, 3 + 2e-8], [0.0, 2.0]]
    torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=0)


def verl(rewards, steps, groups):
    """verl's estimator of responses without a gap, in plain Python: zero baseline where the
    longest is alone.
    """
    made = {}
    for group in set(groups):
        rows = [row for row, other in enumerate(groups) if other == group]
        for t in range(max(len(steps[row]) for row in rows)):
            there = [row for row in rows if len(steps[row]) > t]
            energy = {row: sum(steps[row][: t + 1]) for row in there}
            baseline = sum(rewards[row] * energy[row] for row in there) / (sum(energy.values()) + 1e-8)
            for row in there:
                made[row, t] = rewards[row] - (baseline if len(there) > 1 else 0.0)
    return made


def test_advantages_when_of_random_groups_then_those_of_verls_formula():
    generator = torch.Generator().manual_seed(1)
    lengths = [4, 2, 1, 4, 3, 3, 0, 4]
    steps = [(torch.rand(n, generator=generator, dtype=torch.float64) + 0.1).tolist() for n in lengths]
    rewards, groups = torch.rand(8, generator=generator).tolist(), [0, 0, 0, 1, 1, 1, 1, 1]
    energies = [[sum(of_row[: t + 1]) for t in range(len(of_row))] for of_row in steps]
    assert advantages_of(rewards, energies, groups) == pytest.approx(verl(rewards, steps, groups), abs=1e-6)


def test_energies_then_the_squared_norm_of_the_gradient_that_autograd_finds():
    logits = (torch.randn(6, 9, dtype=torch.float64) * 3).requires_grad_()
    labels = torch.tensor([0, 3, 8, 2, 2, 1])
    log_p = logits.log_softmax(1)
    chosen = log_p.gather(1, labels[:, None])[:, 0]
    [gradient] = torch.autograd.grad(chosen.sum(), [logits])
    found = gradient_energies(chosen.detach().float(), log_p.detach().exp().square().sum(1).float())
    torch.testing.assert_close(found.double(), gradient.square().sum(1), rtol=1e-5, atol=3e-7)


def test_energies_when_a_token_is_almost_certain_then_their_digits_stay_and_none_is_negative():
    # p = 1 - 2^-10, the rest on one other: 2 x 2^-20. 1 - 2 p + sum p^2 in float32 has the
    # rounding of 1, 6e-8.
    p = torch.tensor([1 - 2.0**-10], dtype=torch.float64)
    found = gradient_energies(p.log().float(), (p.square() + (1 - p).square()).float())
    assert found.item() == pytest.approx(2 * 2.0**-20, rel=0.05)
    logprobs = torch.tensor([-0.0, -1e-9, -1e-7, -3e-7])
    assert (gradient_energies(logprobs, torch.ones(4) - 1e-7) >= 0).all()


def test_total_power_when_by_hand_then_the_mean_over_sequences_of_their_tokens():
    # (1 x 2)^2 x 0.5 = 2; (0.5 x 2)^2 x 1 = 1; a token outside the loss may hold anything: 3
    # over two sequences.
    energies, advantages = torch.tensor([0.5, 1.0, math.nan]), torch.tensor([2.0, 2.0, 7.0])
    given = energies, advantages, torch.tensor([1.0, 0.5, math.nan]), torch.tensor([True, True, False])
    [(name, metric)] = total_power(*given, torch.tensor([True, True, False]), owner=True).items()
    assert metric.numbers(name, metric.values.tolist()) == {name: 1.5, "variance_proxy/sequences": 2.0}
    [other] = total_power(*given, torch.tensor([True, True, False]), owner=False).values()
    assert other.values.tolist() == [3.0, 0.0]  # its tokens, and no sequence


def test_variance_proxies_when_by_hand_then_signal_and_noise_of_the_mean():
    power = {"variance_proxy/proxy2_total_power": 10.0, "variance_proxy/sequences": 4.0}
    names = "variance_proxy/proxy1_signal_strength", "variance_proxy/proxy3_pure_noise"
    assert variance_proxies(power, 2.0) == dict(zip(names, (4.0, 2.0), strict=True))  # (10 - 4) / 3
    assert variance_proxies(power, 5.0) == dict(zip(names, (25.0, 0.0), strict=True))
    of_two = power | {"variance_proxy/sequences": 2.0}
    assert variance_proxies(of_two, 2.0) == dict(zip(names, (4.0, 6.0), strict=True))  # (10 - 4) / 1
    assert variance_proxies(power | {"variance_proxy/sequences": 1.0}, 2.0) == {names[0]: 4.0}
    assert variance_proxies(power, None) == variance_proxies({}, 2.0) == {}

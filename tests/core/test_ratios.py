"""The KL of "this token or another": by hand, near 0 and 1, and against a sum over whole vocabularies."""

import math

import pytest
import torch

from megatron_rl_corr.core.ratios import binary_kl


@pytest.mark.parametrize(
    "mu, p, kl",
    [
        (0.5, 0.5, 0.0),
        # 0.5 ln(0.5 / 0.25) + 0.5 ln(0.5 / 0.75) = 0.5 ln 2 - 0.5 ln 1.5
        (0.5, 0.25, 0.1438410),
        # 0.25 ln(0.25 / 0.5) + 0.75 ln(0.75 / 0.5)
        (0.25, 0.5, 0.1308120),
        # 0.9 ln 9 + 0.1 ln(1 / 9) = 0.8 ln 9
        (0.9, 0.1, 1.7577797),
    ],
)
def test_binary_kl_when_of_two_coins_then_by_hand(mu, p, kl):
    found = binary_kl(torch.tensor([mu]).log(), torch.tensor([p]).log())
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(kl, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "log_mu, log_p",
    [
        (-1e-6, -2.0),
        (-2.0, -1e-6),
        (-1e-5, -1e-3),
        (-60.0, -61.0),
        (-60.0, -1.0),
        (-1.0, -60.0),
        (-1.0, -1.00001),
    ],
)
def test_binary_kl_when_a_probability_is_near_0_or_1_then_its_digits_stay(log_mu, log_p):
    log_mu, log_p = torch.tensor([log_mu]), torch.tensor([log_p])
    a, b = log_mu.item(), log_p.item()
    # In terms of what does not round: others = 1 - e^a = -expm1(a).
    exact = math.exp(a) * (a - b) + -math.expm1(a) * math.log(math.expm1(a) / math.expm1(b))
    if abs(a - b) < 1e-4:  # that formula cancels; to second order the KL is D^2 mu / (1 - mu) / 2
        exact = (a - b) ** 2 * math.exp(a) / -math.expm1(a) / 2
    if a < -50 and b < -50:  # mu ln(mu / p) + p - mu
        exact = math.exp(a) * (a - b + math.expm1(b - a))
    assert binary_kl(log_mu, log_p).item() == pytest.approx(exact, rel=2e-5)


@pytest.mark.parametrize("log_mu, log_p", [(0.0, 0.0), (-1e-9, 0.0), (0.0, -1e-9)])
def test_binary_kl_when_both_round_to_1_then_0(log_mu, log_p):
    assert binary_kl(torch.tensor([log_mu]), torch.tensor([log_p])).item() == pytest.approx(0, abs=1e-8)


def test_binary_kl_when_one_probability_is_1_then_finite():
    # p = 1 - 2^-24: 0.5 ln 0.5 + 0.5 ln(0.5 2^24) = ln 0.5 + 12 ln 2 = 11 ln 2
    found = binary_kl(torch.tensor([math.log(0.5), 0.0]), torch.tensor([0.0, math.log(0.5)]))
    assert found[0].item() == pytest.approx(11 * math.log(2), rel=1e-6)
    assert found[1].item() == pytest.approx(math.log(2), rel=1e-5)


def test_binary_kl_when_the_whole_vocabulary_is_known_then_at_most_its_kl():
    generator = torch.Generator().manual_seed(0)
    mu, p = (torch.randn(200, 11, generator=generator).log_softmax(1) for _ in range(2))
    whole = (mu.exp() * (mu - p)).sum(1)
    assert (binary_kl(mu, p) <= whole[:, None] + 1e-6).all()

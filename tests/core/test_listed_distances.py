"""Bounds of distances from a list of ids: by hand, and against whole distributions in float64."""

import math

import pytest
import torch

from megatron_rl_corr.core.listed_distances import LEAST_OUTSIDE, listed_distances

INF = math.inf


def true_distances(q, p):
    """KL(q || p), KL(p || q) and the total variation of two whole distributions, in plain Python."""

    def kl(one, other):
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if a > 0]
        return INF if any(b == 0 for _, b in pairs) else sum(a * math.log(a / b) for a, b in pairs)

    return kl(q, p), kl(p, q), sum(abs(a - b) for a, b in zip(q, p, strict=True)) / 2


def of(q, p):
    found = listed_distances(torch.tensor([q]).double().log(), torch.tensor([p]).double().log())
    return {name: value[0].tolist() for name, value in vars(found).items()}


def test_two_ids_and_what_is_outside_then_the_numbers_by_hand():
    # q = 0.5, 0.2 and 0.3 outside; p = 0.4, 0.2 and 0.4 outside.
    found = of([0.5, 0.2], [0.4, 0.2])
    assert found == pytest.approx(
        {
            "kl": 0.5 * math.log(5 / 4) + 0.3 * math.log(3 / 4),  # 0.025267
            "reverse_kl": 0.4 * math.log(4 / 5) + 0.4 * math.log(4 / 3),  # 0.025816
            "least_tv": 0.05 + 0.05,
            "most_tv": 0.05 + 0.35,
            "mass": 0.7,
            "by_id": pytest.approx([0.05, 0.0]),
        }
    )


def drawn(case):
    """(q, p) [4, V] float64 of a random case, the case's number of listed ids, and its kind."""
    generator = torch.Generator().manual_seed(case)
    size = int(torch.randint(2, 40, (1,), generator=generator))
    logits = (1 + case % 7) * torch.randn(4, size, generator=generator, dtype=torch.float64)
    kind = ("near", "far", "exchanged", "biased", "no support", "same")[case % 6]
    other = {
        "near": logits + 1e-3 * torch.randn(4, size, generator=generator, dtype=torch.float64),
        "far": torch.randn(4, size, generator=generator, dtype=torch.float64),
        "exchanged": logits.roll(1, dims=1),
        "biased": logits + 5.0 * (torch.arange(size) == size // 2),
        "no support": logits.masked_fill(torch.arange(size) == 0, -INF),
        "same": logits.clone(),
    }[kind]
    return logits.softmax(1), other.softmax(1), int(torch.randint(1, size + 1, (1,), generator=generator))


@pytest.mark.parametrize("lists", ["likeliest", "any"])
def test_random_distributions_then_every_interval_contains_the_truth(lists):
    tight = 0
    for case in range(96):
        q, p, count = drawn(case)
        order = q.argsort(dim=1, descending=True)
        if lists == "any":
            order = torch.rand(q.shape, generator=torch.Generator().manual_seed(case)).argsort(dim=1)
        ids = order[:, :count]
        found = listed_distances(q.gather(1, ids).log(), p.gather(1, ids).log())
        for row in range(len(q)):
            kl, reverse, tv = true_distances(q[row].tolist(), p[row].tolist())
            assert -1e-12 <= found.kl[row] <= kl + 1e-12, case
            assert -1e-12 <= found.reverse_kl[row] <= reverse + 1e-12, case
            assert found.least_tv[row] - 1e-12 <= tv <= found.most_tv[row] + 1e-12, case
            assert found.by_id[row].sum() <= found.least_tv[row] + 1e-12
            tight += bool(found.most_tv[row] - found.least_tv[row] < 0.1)
    assert tight > 80  # the intervals are not all the trivial one


def test_list_when_it_is_the_whole_vocabulary_then_the_distances_themselves():
    for case in range(60):
        q, p, _ = drawn(case)
        found = listed_distances(q.log(), p.log())
        assert found.mass.tolist() == pytest.approx([1.0] * 4)
        for row in range(len(q)):
            tv = float((q[row] - p[row]).abs().sum()) / 2
            assert found.least_tv[row] == pytest.approx(tv, abs=1e-12)
            assert found.most_tv[row] == pytest.approx(tv, abs=1e-12)
            ratios = (p[row].log() - q[row].log()).abs()
            if ratios.max() < 20:
                kl, reverse, _ = true_distances(q[row].tolist(), p[row].tolist())
                assert found.kl[row] == pytest.approx(kl, rel=1e-9, abs=1e-12)
                assert found.reverse_kl[row] == pytest.approx(reverse, rel=1e-9, abs=1e-12)


def test_sum_of_a_list_when_it_is_rounded_then_nothing_is_outside():
    q = torch.full((1, 1000), 1e-3).log()  # float32: the sum is off by some 1e-8
    found = listed_distances(q, q + 3e-8)
    assert found.least_tv[0] < 1e-7 and found.kl[0] < 1e-12 and found.most_tv[0] < LEAST_OUTSIDE


@pytest.mark.parametrize(
    ("q", "p", "kl", "least_tv"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0, 0.0),  # an id that both give nothing
        ([0.5, 0.5], [1.0, 0.0], 0.5 * (math.log(0.5) + 20), 0.5),  # infinite: the ratio is bounded
        ([0.5], [1.0], 0.5 * math.log(0.5) + 0.5 * math.log(0.5 / LEAST_OUTSIDE), 0.5),
    ],
)
def test_masses_of_zero_then_finite_bounds(q, p, kl, least_tv):
    found = of(q, p)
    assert found["kl"] == pytest.approx(kl, abs=1e-4) and found["least_tv"] == pytest.approx(
        least_tv, abs=1e-5
    )

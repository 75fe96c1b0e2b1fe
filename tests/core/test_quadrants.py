"""Tokens and gradient by the signs of A and D: by hand, against plain Python, over microbatches."""

import math
import random

import pytest
import torch

from megatron_rl_corr.core.catalogue import QUADRANTS
from megatron_rl_corr.core.quadrants import quadrant_metrics
from megatron_rl_corr.reduce.collectives import merge

NAN = float("nan")


def metrics(d, advantages, pulls, mask):
    rollout = torch.full((len(d),), -4.0)
    given = rollout + torch.tensor(d), rollout, torch.tensor(advantages), torch.tensor(pulls)
    return quadrant_metrics(*given, torch.tensor(mask, dtype=torch.bool))


def test_quadrants_when_of_each_sign_then_by_hand():
    # good above, bad below (twice), good below, bad above; A = 0; D = 0; masked.
    d = [0.5, -0.5, -2.0, -1.0, 1.0, 3.0, 0.0, NAN]
    advantages = [1.0, -1.0, -2.0, 1.0, -1.0, 0.0, 1.0, 1.0]
    pulls = [0.5, -1.0, -3.0, 2.0, -2.5, 0.0, 1.0, NAN]  # |.| sums to 10
    found = metrics(d, advantages, pulls, [1] * 7 + [0])
    assert {name: metric.value() for name, metric in found.items()} == pytest.approx(
        {
            "quadrant/good_above": 1 / 7,
            "quadrant/bad_below": 2 / 7,
            "quadrant/good_below": 1 / 7,
            "quadrant/bad_above": 1 / 7,
            "quadrant/good_above_mass": 0.05,
            "quadrant/bad_below_mass": 0.4,
            "quadrant/good_below_mass": 0.2,
            "quadrant/bad_above_mass": 0.25,
        }
    )


def test_quadrants_when_no_token_pulls_then_no_share_of_the_gradient():
    found = metrics([0.5], [0.0], [0.0], [1])
    assert found["quadrant/good_above"].value() == 0 and math.isnan(found["quadrant/good_above_mass"].value())


@pytest.mark.parametrize("seed", range(5))
def test_quadrants_when_cut_into_microbatches_then_as_plain_python_over_all(seed):
    generator = random.Random(seed)
    tokens = [
        (generator.gauss(0, 1), generator.gauss(0, 1), generator.gauss(0, 1), generator.random() < 0.7)
        for _ in range(50)
    ]
    parts = [metrics(*zip(*part, strict=True)) for part in (tokens[:7], tokens[7:30], tokens[30:])]
    found = {name: metric.value() for name, metric in merge(parts).items()}
    kept = [token for token in tokens if token[3]]
    for name, (of_a, of_d) in QUADRANTS.items():
        mine = [token for token in kept if token[1] * of_a > 0 and token[0] * of_d > 0]
        assert found[f"quadrant/{name}"] == pytest.approx(len(mine) / len(kept))
        mass = sum(abs(token[2]) for token in mine) / sum(abs(token[2]) for token in kept)
        assert found[f"quadrant/{name}_mass"] == pytest.approx(mass, rel=1e-6)


@pytest.mark.parametrize(("name", "widens"), [(name, a * d > 0) for name, (a, d) in QUADRANTS.items()])
def test_quadrants_when_a_step_is_made_then_the_first_two_widen_the_gap(name, widens):
    of_a, of_d = QUADRANTS[name]
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    before = logits.log_softmax(0)[0]
    rollout = before.item() - of_d * 0.1
    (-of_a * before).backward()
    with torch.no_grad():
        after = (logits - 1e-3 * logits.grad).log_softmax(0)[0].item()
    assert (abs(after - rollout) > abs(before.item() - rollout)) == widens
    one = torch.tensor([1.0])
    found = quadrant_metrics(before[None], torch.tensor([rollout]), of_a * one, one, one > 0)
    assert [key for key, metric in found.items() if metric.value() == 1] == [
        f"quadrant/{name}",
        f"quadrant/{name}_mass",
    ]

"""Importance weights by hand: three levels, three modes, closed bounds."""

import math

import pytest
import torch

from megatron_rl_corr.core.weights import LOG_CLAMP, bound_weights, out_of_bounds, raw_weights

# Sequence 0: rho 2, 3; sequence 1: empty; sequence 2: rho 0.25.
LOG_RATIO = torch.tensor([math.log(2), math.log(3), math.log(0.25)])
SEQ_IDS = torch.tensor([0, 0, 2])
SUMS = torch.tensor([math.log(6), 0.0, math.log(0.25)], dtype=torch.float64)
COUNTS = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "level, expected",
    [
        ("token", [2.0, 3.0, 0.25]),
        ("sequence", [6.0, 6.0, 0.25]),  # 2 * 3
        ("geometric", [math.sqrt(6), math.sqrt(6), 0.25]),  # (2 * 3)^(1/2)
    ],
)
def test_raw_weights_when_computed_by_hand_then_equal(level, expected):
    weights = raw_weights(level, LOG_RATIO, SUMS, COUNTS, SEQ_IDS)
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert weights.dtype == torch.float32


def test_raw_weights_when_a_long_product_leaves_float32_then_it_is_clamped_not_infinite():
    # 1000 tokens of D = 0.2: e^200 overflows float32; the geometric mean is e^0.2 all the same.
    sums, counts, ids = torch.tensor([200.0, -200.0]), torch.tensor([1000.0, 1000.0]), torch.tensor([0, 1])
    product = raw_weights("sequence", torch.tensor([0.2, -0.2]), sums, counts, ids)
    assert product.tolist() == pytest.approx([math.exp(LOG_CLAMP), math.exp(-LOG_CLAMP)], rel=1e-5)
    geometric = raw_weights("geometric", torch.tensor([0.2, -0.2]), sums, counts, ids)
    assert geometric.tolist() == pytest.approx([math.exp(0.2), math.exp(-0.2)], rel=1e-6)


@pytest.mark.parametrize(
    "mode, lower, upper, expected",
    [
        ("truncate", None, 5.0, [0.4, 0.8, 5.0]),
        ("clip", 0.5, 5.0, [0.5, 0.8, 5.0]),
        ("mask", 0.5, 5.0, [0.0, 0.8, 0.0]),
    ],
)
def test_bound_weights_when_two_of_three_are_outside_then_each_modes_way(mode, lower, upper, expected):
    weights = torch.tensor([0.4, 0.8, 6.0])
    assert bound_weights(mode, weights, lower, upper).tolist() == pytest.approx(expected)
    outside = [False, False, True] if lower is None else [True, False, True]
    assert out_of_bounds(weights, lower, upper).tolist() == outside


def test_mask_when_a_weight_is_on_a_bound_then_kept_and_one_step_outside_it_is_not():
    below, above = math.nextafter(0.5, 0), math.nextafter(2.0, 3)
    lower, upper = torch.tensor(0.5), torch.tensor(2.0)
    weights = torch.stack([
        lower, torch.nextafter(lower, torch.tensor(0.0)), upper, torch.nextafter(upper, torch.tensor(3.0))
    ])
    assert bound_weights("mask", weights, 0.5, 2.0).tolist() == [0.5, 0.0, 2.0, 0.0]
    assert out_of_bounds(weights, 0.5, 2.0).tolist() == [False, True, False, True]
    # In float64 the step is finer, the rule the same.
    assert out_of_bounds(torch.tensor([below, above], dtype=torch.float64), 0.5, 2.0).tolist() == [True, True]


def test_level_and_mode_when_unknown_then_named():
    with pytest.raises(ValueError, match="unknown weight level 'turn'"):
        raw_weights("turn", LOG_RATIO, SUMS, COUNTS, SEQ_IDS)
    with pytest.raises(ValueError, match="unknown weight mode 'drop'"):
        bound_weights("drop", LOG_RATIO, 0.5, 2.0)

"""Importance weights by hand: four levels, three modes, closed bounds."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.ratios import LOG_CLAMP

# Sequence 0: rho 2, 3 in turn 0 and 0.5 in turn 1; sequence 1: empty; sequence 2: rho 0.25.
RHO = torch.tensor([2.0, 3.0, 0.5, 0.25])
SEQ_IDS = torch.tensor([0, 0, 0, 2])
TURN_IDS = torch.tensor([0, 0, 1, 0])


def weights_of(rho, level="token", mode="truncate", lower=None, upper=1e9, seq_ids=None, turn_ids=None):
    config = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_mode=mode, rollout_is_lower=lower, rollout_is_upper=upper
    )
    rollout = torch.full_like(rho, -1.0)
    seq_ids = torch.zeros(len(rho), dtype=torch.int64) if seq_ids is None else seq_ids
    return compute_correction(
        rho.log() - 1, rollout, torch.ones(len(rho)), seq_ids, num_sequences=3, config=config, turn_ids=turn_ids,
        num_turns=2,
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2.0, 3.0, 0.5, 0.25]),
        ("sequence", [3.0, 3.0, 3.0, 0.25]),  # 2 * 3 * 0.5
        ("geometric", [3 ** (1 / 3)] * 3 + [0.25]),
        ("turn", [6.0, 6.0, 0.5, 0.25]),
    ],
)
def test_weights_when_computed_by_hand_then_equal(level, expected):
    weights = weights_of(RHO, level, seq_ids=SEQ_IDS, turn_ids=TURN_IDS).weights
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert weights.dtype == torch.float32


def test_weights_when_a_long_product_leaves_float32_then_it_is_clamped_not_infinite():
    # 1000 tokens of D = 0.2: e^200 overflows float32; the geometric mean is e^0.2 all the same.
    rho = torch.full((1000,), math.exp(0.2))
    assert weights_of(rho, "sequence").weights[0].item() == pytest.approx(math.exp(LOG_CLAMP), rel=1e-5)
    assert weights_of(1 / rho, "sequence").weights[0].item() == pytest.approx(math.exp(-LOG_CLAMP), rel=1e-5)
    assert weights_of(rho, "geometric").weights[0].item() == pytest.approx(math.exp(0.2), rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "lower", "expected", "outside"),
    [
        ("truncate", None, [0.4, 0.8, 5.0], 1 / 3),
        ("clip", 0.5, [0.5, 0.8, 5.0], 2 / 3),
        ("mask", 0.5, [0.0, 0.8, 0.0], 2 / 3),
    ],
)
def test_bounds_when_two_of_three_are_outside_then_each_modes_way(mode, lower, expected, outside):
    correction = weights_of(torch.tensor([0.4, 0.8, 6.0]), mode=mode, lower=lower, upper=5.0)
    assert correction.weights.tolist() == pytest.approx(expected)
    assert correction.metrics["weight_out_of_bounds"].value() == pytest.approx(outside)
    assert correction.mask.all()  # a weight of 0 is no rejection


def test_mask_when_a_weight_is_on_a_bound_then_kept_and_outside_it_is_not():
    rho = torch.tensor([0.5, 0.4999, 2.0, 2.0001])
    weights = weights_of(rho, mode="mask", lower=0.5, upper=2.0).weights
    assert weights.tolist() == pytest.approx([0.5, 0.0, 2.0, 0.0], rel=1e-6)

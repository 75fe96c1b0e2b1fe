"""Evidence against a server: what rounding explains, by hand; bits; and the rate of false verdicts."""

import math

import numpy as np
import pytest

from megatron_rl_corr.features.push_probe.evidence import (
    DIFFERS_BITS,
    HEALTHY_OFF,
    MARGIN,
    ROUNDINGS,
    Rounding,
    TextRounding,
    answer_of,
    bits_of,
    is_off,
    off_by,
)

ROUNDING = Rounding(relative_error=2e-3, least=1e-4)


def test_rounding_of_a_text_then_median_and_upper_quantile_are_those_by_hand():
    # |moved| sorted: 1 1 2 2 3 3 4 4 5 5 thousandths. Of so short a text the 0.75 quantile counts,
    # between 7th and 8th.
    moved = np.array([[1, -2, 3, -4, 5], [-1, 2, -3, 4, -5]]) * 1e-3
    found = TextRounding.of(moved, ROUNDING)
    assert found.median == pytest.approx(3e-3) and found.upper == pytest.approx(4e-3)
    assert not found.tied.any()


def test_rounding_when_a_token_moves_farther_than_all_others_then_it_is_set_apart():
    moved = np.full((3, 20), 1e-3)
    moved[1, 7] = 0.9  # its router chose another expert in one of the simulations
    found = TextRounding.of(moved, ROUNDING)
    assert np.flatnonzero(found.tied).tolist() == [7] and found.upper == pytest.approx(1e-3)
    difference = np.full(20, 1e-3)
    difference[7] = 1.65
    assert off_by(difference, found) == pytest.approx(1.0)  # one token of a near tie says nothing


def test_rounding_when_most_tokens_stand_near_a_tie_then_none_is_set_apart():
    moved = np.full((3, 10), 1e-5)
    moved[:, :6] = 0.9
    assert not TextRounding.of(moved, Rounding(2e-3, 1e-6)).tied.any()


def test_rounding_when_the_policy_is_sure_then_the_least_counts():
    found = TextRounding.of(np.full((2, 4), 1e-12), ROUNDING)
    assert found.median == found.upper == 1e-4


def test_rounding_when_no_simulation_reaches_the_model_then_a_wide_bound():
    found = TextRounding.of(np.zeros((3, 4)), ROUNDING)  # 10 * 2e-3
    assert found.median == found.upper == pytest.approx(0.02) and MARGIN * found.median == pytest.approx(0.08)


@pytest.mark.parametrize(("factor", "off"), [(1.0, False), (3.9, False), (4.1, True), (50.0, True)])
def test_text_when_all_tokens_are_apart_then_off_beyond_the_margin(factor, off):
    expected = TextRounding(1e-3, 4e-3, np.zeros(10, dtype=bool))
    ratio = off_by(np.linspace(0, 2e-3, 10) * factor, expected)  # the median is 1e-3
    assert ratio == pytest.approx(factor) and is_off(ratio) == off


def test_text_when_one_token_in_seven_is_far_off_then_the_upper_quantile_tells():
    expected, difference = TextRounding(1e-3, 4e-3, np.zeros(70, dtype=bool)), np.full(70, 1e-3)
    difference[::7] = 0.1  # an expert in another's place: the tokens that go to it
    assert off_by(difference, expected) == pytest.approx(25)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_text_when_a_log_prob_is_not_finite_then_off(wrong):
    assert is_off(off_by(np.array([0.0, wrong]), TextRounding(1e-3, 1e-3, np.zeros(2, dtype=bool))))


def test_bound_of_the_user_then_a_text_is_off_beyond_it():
    expected = TextRounding.bound(0.5, 4)
    assert not is_off(off_by(np.full(4, 0.49), expected)) and is_off(off_by(np.full(4, 0.51), expected))


def test_bits_then_each_text_counts_as_by_hand():
    # off: log2(0.5 / (1/64)) = 5; not: log2(0.5 / (63/64)) = -0.977
    assert bits_of([9.0] * 3 + [1.0]) == pytest.approx(3 * 5 - 0.97728, abs=1e-4)
    assert [answer_of(ratios) for ratios in ([1.0] * 8, [9.0] + [1.0] * 9, [9.0, 1.0, 1.0], [9.0] * 4)] == [
        "equal",
        "numerics",
        "unclear",
        "differs",
    ]


def test_verdicts_of_a_healthy_server_then_false_ones_are_as_rare_as_stated():
    # A bound that is much lower, so that a simulation sees the rate: 2 ** bits is at least 8
    # in at most 1 of 8.
    draw, alarms, runs = np.random.default_rng(0), 0, 4000
    for _ in range(runs):
        off = draw.random(24) < HEALTHY_OFF
        steps = np.cumsum(np.where(off, 5.0, math.log2(0.5 / (1 - HEALTHY_OFF))))
        alarms += (steps >= 3).any()  # at whatever text one stops
    assert 0 < alarms / runs <= 1 / 8
    assert DIFFERS_BITS == 20


def test_number_types_then_a_coarser_one_explains_more():
    order = ["float32", "tf32", "float16", "bfloat16", "fp8", "int4"]
    for finer, coarser in zip(order, order[1:], strict=False):
        assert ROUNDINGS[finer].relative_error < ROUNDINGS[coarser].relative_error
        assert ROUNDINGS[finer].least <= ROUNDINGS[coarser].least
    for name, bits in {"float32": 24, "float16": 11, "bfloat16": 8}.items():  # of a significand
        exact = 2.0 ** -(bits + 1) / math.sqrt(3)
        assert exact < ROUNDINGS[name].relative_error < 16 * exact, name


def test_text_when_the_policy_is_sure_of_most_of_it_then_the_other_tokens_count():
    draw = np.random.default_rng(0)
    moves = np.concatenate([np.full(39, 1e-6), np.full(24, 2e-2)])
    expected = TextRounding.of(draw.standard_normal((4, 63)) * moves, Rounding(2.5e-3, 2e-4))
    assert expected.tied.sum() > 12
    for _ in range(200):
        rounding = draw.standard_normal(63) * moves
        assert not is_off(off_by(rounding, expected))
        assert is_off(off_by(rounding + 0.5 * expected.tied, expected))

"""What a metric makes of its reduced values, and how partials of one combine."""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce import collectives
from megatron_rl_corr.reduce.metrics import (
    Chi2,
    Difference,
    EffectiveSampleSize,
    JensenShannon,
    LeftOut,
    Max,
    MaxOfPresent,
    Mean,
    MeanOfDifference,
    MeanPlusOne,
    Min,
    NegativeMax,
    NegativeMean,
    NegativeMin,
    Pearson,
    Share,
    Std,
    Sum,
)


@pytest.mark.parametrize(
    "kind, values, expected",
    [
        (Sum, [7.0], 7.0),
        (Mean, [6.0, 4.0], 1.5),
        (Share, [1.0, 4.0], 0.25),
        (Share, [0.0, 0.0], 0.0),
        # 1, 1, 4: mean 2, squares 18 / 3 - 4 = 2
        (Std, [6.0, 18.0, 3.0], math.sqrt(2)),
        # 0.1 three times: the difference of the squares is rounding and must not be a negative root
        (Std, [0.1 + 0.1 + 0.1, 0.1**2 * 3, 3.0], 0.0),
        # 1, 1, 4: 36 / (3 * 18)
        (EffectiveSampleSize, [6.0, 18.0, 3.0], 2 / 3),
        # rho = 0.5, 1, 2: e = -0.5, 0, 1, their squares sum to 1.25; mean(rho^2) = 5.25 / 3
        (Chi2, [1.25, 0.5, 3.0], 0.75),
        # rho = 2: [2 ln(4/3) + ln(2/3)] / 2 = ln(4/3) / 2 + ln(8/9) / 2; e = 1, L = ln(3/2), D
        # = ln 2, one token
        (JensenShannon, [math.log(1.5), math.log(2), math.log(1.5), math.log(2), 1.0], math.log(32 / 27) / 2),
        (Difference, [7.0, 5.0], 2.0),
        (NegativeMean, [6.0, 4.0], -1.5),
        (NegativeMin, [-3.0], 3.0),
        (NegativeMax, [3.0], -3.0),
        (MeanPlusOne, [6.0, 4.0], 2.5),
        (LeftOut, [1.0, 4.0], 0.75),
        (MeanOfDifference, [6.0, 4.0, 4.0], 0.5),
        (MaxOfPresent, [0.0, 1.0], 0.0),
        # x = 1, 2, 3 and y = 2, 4, 6
        (Pearson, [6.0, 12.0, 14.0, 56.0, 28.0, 3.0], 1.0),
        (Pearson, [6.0, -12.0, 14.0, 56.0, -28.0, 3.0], -1.0),
        (Max, [-2.5], -2.5),
        (Min, [3.5], 3.5),
    ],
)
def test_finish_when_values_are_known_then_the_formulas_number(kind, values, expected):
    assert kind.finish(values) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    "kind, values",
    [
        (Mean, [0.0, 0.0]),
        (Std, [0.0, 0.0, 0.0]),
        (EffectiveSampleSize, [0.0, 0.0, 0.0]),
        (Chi2, [0.0, 0.0, 0.0]),
        (Pearson, [0.0] * 6),
        (Max, [-math.inf]),
        (Min, [math.inf]),
        (JensenShannon, [0.0] * 5),
        (NegativeMean, [0.0, 0.0]),
        (MeanPlusOne, [0.0, 0.0]),
        (LeftOut, [0.0, 0.0]),
        (MeanOfDifference, [0.0, 0.0, 0.0]),
        # Weights that are all 0 carry nothing: no effective sample either.
        (EffectiveSampleSize, [0.0, 0.0, 5.0]),
    ],
)
def test_finish_when_there_was_nothing_to_measure_then_nan_not_an_error(kind, values):
    assert math.isnan(kind.finish(values))


def test_value_when_one_rank_alone_then_its_own_number():
    assert Mean(torch.tensor([3.0, 2.0], dtype=torch.float64)).value() == 1.5


@pytest.mark.parametrize(
    ("served", "kept"),
    [
        ([-1.0, -1.0, -1.0, -1.0], 1.0),
        ([-1.0, -1.0, math.nan, math.nan], 0.5),
        ([-1.0, math.inf, -1.0, -math.inf], 0.5),
        ([math.nan] * 4, 0.0),
    ],
)
def test_kept_when_log_probs_are_null_then_their_tokens_lower_the_share(served, kept):
    correction = compute_correction(
        torch.full((5,), -1.0),
        torch.tensor([*served, math.nan]),
        torch.tensor([1, 1, 1, 1, 0]),
        torch.tensor([0, 0, 1, 1, 1]),
        num_sequences=2,
        config=RolloutCorrectionConfig(),
    )
    assert correction.metrics["kept_fraction"].value() == kept


def test_reduction_when_another_rank_has_more_and_less_then_sums_add_and_extrema_are_of_both(monkeypatch):
    # Of this rank: sum 1, max 5, min 2. Of the other: sum 10, max 7, min 3; a minimum travels negated.
    groups = []

    def played(values, group, op=dist.ReduceOp.SUM):
        groups.append(group)
        if op == dist.ReduceOp.SUM:
            return values.add_(torch.tensor([10.0]))
        return values.copy_(torch.maximum(values, torch.tensor([7.0, -3.0])))

    monkeypatch.setattr(collectives, "all_reduce", played)
    own = {"c": Sum(one(1.0)), "a": Max(one(5.0)), "b": Min(one(2.0))}
    assert collectives.all_reduce_metrics(own, "both") == {"c": 11.0, "a": 7.0, "b": 2.0}
    assert groups == ["both", "both"]


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)

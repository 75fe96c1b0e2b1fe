"""The rule of --rollout-correction auto, by hand."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.core.auto_weights import AutoWeights, MeasuredMismatch
from megatron_rl_corr.core.correction import compute_correction


@pytest.mark.parametrize(
    ("before", "ess", "mean_product", "after"),
    [
        # A level is left at one bound, and taken again at another.
        ("sequence", 0.5, 1.0, "sequence"),
        ("sequence", 0.4999, 1.0, "token"),
        ("token", 0.7999, 1.0, "token"),
        ("token", 0.8, 1.0, "sequence"),
        # All products are far from 1, and alike: ESS / n is 1.
        ("sequence", 1.0, 0.4999, "token"),
        ("sequence", 1.0, 2.0001, "token"),
        ("token", 1.0, 0.5, "sequence"),
        ("token", 1.0, 2.0, "sequence"),
        ("sequence", 1.0, math.nan, "token"),
        # No sequence has a valid token: nothing is known.
        ("sequence", math.nan, math.nan, "sequence"),
        ("token", math.nan, 1.0, "token"),
    ],
)
def test_after_when_a_batch_was_measured_then_the_level_of_the_next(before, ess, mean_product, after):
    assert AutoWeights(64, before).after(MeasuredMismatch(ess, mean_product)).level == after


@pytest.mark.parametrize(("sequences", "cap"), [(1, 2.0), (64, 2.0), (256, 4.0), (1024, 8.0), (4096, 16.0)])
def test_cap_when_updates_are_larger_then_it_grows_with_the_root(sequences, cap):
    assert AutoWeights(sequences, "token").cap == AutoWeights(sequences, "sequence").cap == cap


def test_corrected_when_a_level_is_taken_then_only_the_weights_change():
    rule = RejectionRule("token", "k3", None, 0.3)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0, rollout_rs=(rule,))
    for level in ("token", "sequence"):
        assert AutoWeights(1024, level).corrected(config) == RolloutCorrectionConfig(
            rollout_is=level, rollout_is_upper=8.0, rollout_rs=(rule,)
        )


def numbers_of(log_ratios):
    """The metrics, by their logged names, of sequences with these D of their tokens."""
    d = torch.tensor(log_ratios)
    correction = compute_correction(
        d.flatten() - 3,
        torch.full((d.numel(),), -3.0),
        torch.ones(d.numel()),
        torch.arange(len(d)).repeat_interleave(d.shape[1]),
        num_sequences=len(d),
        config=RolloutCorrectionConfig(),
    )
    found = {}
    for name, metric in correction.metrics.items():
        found |= metric.numbers(f"rollout_corr/{name}", metric.values.tolist())
    return found


def test_measured_when_taken_from_a_batchs_metrics_then_by_hand():
    # Products 1, 1, 4 and 1/4: 6.25 / 4 = 1.5625, ESS 39.0625 / (4 * 18.0625).
    two = 2 * math.log(2)
    found = MeasuredMismatch.of(numbers_of([[0.0, 0.0], [0.1, -0.1], [two, 0.0], [-two, 0.0]]))
    assert found.ess == pytest.approx(39.0625 / 72.25, rel=1e-6)
    assert found.mean_product == pytest.approx(1.5625, rel=1e-6)


@pytest.mark.parametrize(
    ("shift", "scale", "length"),
    [(-0.02, 0.0, 2000), (0.02, 0.0, 2000), (-0.02, 0.2, 20_000), (0.0, 0.9, 2000), (0.3, 0.6, 300)],
)
def test_after_when_products_are_alike_but_far_from_1_then_no_sequence_weights(shift, scale, length):
    generator = torch.Generator().manual_seed(0)
    d = shift - scale**2 / 2 + scale * torch.randn((64, length), generator=generator)
    found = MeasuredMismatch.of(numbers_of(d.tolist()))
    assert AutoWeights(64, "sequence").after(found).level == "token"

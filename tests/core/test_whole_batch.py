"""What acts on the whole batch: the filter on its KL, and diagnostics that change nothing."""

import dataclasses
import math

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction, compute_correction

NAN = float("nan")
# D = 0.1, (masked 9), -0.2, (no number); k3 = e^D - 1 - D = 0.0051709, 0.0187308, their mean 0.01195085.
LOG_RATIO = torch.tensor([0.1, 9.0, -0.2, NAN])
MASK = torch.tensor([1, 0, 1, 1])
SEQ_IDS = torch.tensor([0, 0, 1, 1])
REJECTING = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_mode="mask",
    rollout_is_lower=0.9,
    rollout_is_upper=2.0,
    rollout_rs=(RejectionRule("seq_mean", "ratio", 0.9, 1.1),),
)


def correct(config: RolloutCorrectionConfig, mask=MASK) -> Correction:
    return compute_correction(
        LOG_RATIO - 1, torch.full((4,), -1.0), mask, SEQ_IDS, num_sequences=3, config=config
    )


@pytest.mark.parametrize(("bound", "filtered"), [(0.0119, True), (0.012, False)])
def test_batch_filter_when_the_kl_passes_its_bound_then_nothing_is_kept_and_it_is_counted(bound, filtered):
    correction = correct(RolloutCorrectionConfig(rollout_batch_filter_kl=bound))
    assert correction.metrics["batch_filtered"].value() == filtered
    assert correction.kept_tokens.item() == (0 if filtered else 2)
    assert correction.valid_tokens.item() == 2
    assert correction.metrics["k3_kl"].value() == pytest.approx(0.01195085, rel=1e-5)


def test_batch_filter_when_it_rejects_then_it_looks_at_all_valid_tokens_not_at_the_kept():
    # The rule leaves neither: e^0.1 = 1.105 and e^-0.2 = 0.819. The KL is of both all the same.
    config = dataclasses.replace(REJECTING, rollout_batch_filter_kl=0.0119)
    assert correct(config).metrics["batch_filtered"].value() == 1
    assert (
        correct(dataclasses.replace(config, rollout_batch_filter_kl=0.012)).metrics["batch_filtered"].value()
        == 0
    )


def test_batch_filter_when_nothing_is_valid_then_nothing_to_filter():
    correction = correct(RolloutCorrectionConfig(rollout_batch_filter_kl=1e-3), mask=torch.zeros(4))
    assert correction.metrics["batch_filtered"].value() == 0 and correction.kept_tokens.item() == 0


def test_diagnostics_only_when_rules_would_act_then_all_is_measured_and_nothing_changed():
    acting = correct(dataclasses.replace(REJECTING, rollout_batch_filter_kl=0.0119))
    measuring = correct(dataclasses.replace(REJECTING, rollout_batch_filter_kl=0.0119, diagnostics_only=True))
    # w: 1.105 stays, 0.819 is outside [0.9, 2]; the rule rejects both sequences.
    assert acting.weights.tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, 0.0], rel=1e-6)
    assert acting.mask.tolist() == [False] * 4 and acting.kept_sequences.tolist() == [False] * 3
    assert measuring.weights.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert measuring.mask.tolist() == [True, False, True, False]
    assert measuring.kept_sequences.tolist() == [True, True, False]
    assert measuring.kept_tokens.item() == measuring.valid_tokens.item() == 2
    numbers = [{name: metric.value() for name, metric in c.metrics.items()} for c in (acting, measuring)]
    assert numbers[0] == pytest.approx(numbers[1], nan_ok=True)
    assert numbers[1]["kept_fraction"] == 0 and numbers[1]["batch_filtered"] == 1
    assert numbers[1]["weight_out_of_bounds"] == 0.5

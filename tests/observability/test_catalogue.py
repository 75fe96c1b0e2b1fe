"""The one table of metrics: complete, short, and with the levels that the alerts are known by."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.observability.catalogue import (
    GROUPS,
    catalogue,
    grouped,
    label_of,
    ordered,
    spec_of,
    usual_range,
)
from megatron_rl_corr.reduce.collectives import all_reduce_metrics

ROOT = Path(__file__).resolve().parents[2]


def test_meanings_when_compared_with_the_steps_metrics_then_every_one_is_described(healthy):
    assert [name for name in healthy if spec_of(name) is None] == []


def test_catalogue_when_shown_in_a_table_then_one_line_each_under_a_heading():
    for name, spec in catalogue().items():
        assert spec.doc and "\n" not in spec.doc and len(spec.doc) <= 90, name
        assert spec.group in GROUPS, name
        if spec.usual:
            # The live table prints label, value, range and this in one line of 110 characters.
            assert len(spec.usual.says) <= 66 and spec.usual.advice.endswith("."), name


@pytest.mark.parametrize(
    "name, text",
    [
        ("rollout_corr/weight_mean", "0.5 to 2"),
        ("rollout_corr/ess", "at least 0.3"),
        ("rollout_corr/k3_kl", "at most 0.01"),
        ("rollout_corr/kl", "-0.01 to 0.01"),
        ("rollout_corr/chi2_token", "at most 1"),
        ("rollout_corr/nonfinite_tokens", "0"),
        ("skipped", "0"),
        ("rollout_corr/chi2_geo", "at most 1"),
        ("rollout_corr/batch_filtered", "0"),
    ],
)
def test_usual_range_when_written_then_these_words(name, text):
    assert str(usual_range(name)) == text


def test_meanings_when_compared_with_the_corrections_metrics_then_the_same_names():
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_upper=2.0,
        rollout_rs=(RejectionRule("seq_mean", "k3", upper=0.1),),
        rollout_m2_threshold=0.04,
        rollout_batch_filter_kl=0.01,
    )
    logprobs, ids = torch.tensor([-1.0, -2.0]), torch.tensor([0, 1])
    measured = compute_correction(
        logprobs,
        logprobs,
        torch.ones(2),
        ids,
        num_sequences=2,
        config=config,
        turn_ids=ids,
        engine_ids=ids,
        engines=("sglang", "vllm"),
        token_lags=ids,
    ).metrics
    names = {f"rollout_corr/{name}" for name in all_reduce_metrics(measured, None)}
    assert {name for name in names if spec_of(name) is None} == set()
    described = [name for name in catalogue() if name.startswith("rollout_corr/")]
    described = [name for name in described if "/quadrant/" not in name]  # of the loss, with the advantages
    assert {name for name in described if not name.endswith("/")} - names == set()
    # Every family of theirs has a member.
    families = [name for name in described if name.endswith("/")]
    assert len(families) == 6 and all(any(name.startswith(family) for name in names) for family in families)


def test_clamped_twins_when_collected_then_each_follows_its_unclamped_metric():
    names = list(catalogue())
    twins = {name for name in names if name.endswith("_clamped")}
    assert (
        twins == {f"{name}_clamped" for name, spec in catalogue().items() if spec.clamped}
        and len(twins) == 16
    )
    assert all(names[names.index(name) - 1] == name.removesuffix("_clamped") for name in twins)
    assert spec_of("rollout_corr/kl_clamped").formula == "D clamped to [-11.0, 2.61]"


def test_spec_of_when_the_metric_belongs_to_a_family_then_the_familys():
    assert "rejection rule" in spec_of("rollout_corr/rejected_fraction/seq_mean_k3").doc
    assert spec_of("my/own") is None and usual_range("my/own") is None and label_of("my/own") == "my/own"


def test_ordered_when_some_are_unknown_then_by_group_and_those_last():
    names = [
        "zeta",
        "grad_norm",
        "alpha",
        "rollout/failed/protocol",
        "reward/mean",
        "step",
        "rollout_corr/ess",
    ]
    assert ordered(names) == [
        "step",
        "reward/mean",
        "rollout_corr/ess",
        "grad_norm",
        "rollout/failed/protocol",
        "alpha",
        "zeta",
    ]
    assert list(grouped(names)) == [
        "Run",
        "Rewards and responses",
        "Importance weights",
        "Loss and gradient",
        "Sampling",
        "Others",
    ]


def test_catalogue_when_collected_then_without_importing_megatron():
    code = (
        "import sys; from megatron_rl_corr.observability.catalogue import catalogue; catalogue(); "
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "[]\n", result.stderr

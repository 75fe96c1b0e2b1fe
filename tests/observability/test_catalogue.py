"""The one table of metrics: complete, short, and with the levels that the alerts are known by."""

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.observability.catalogue import MEANINGS, PREFIXES, label_of, meaning_of, usual_range
from megatron_rl_corr.observability.clamped import CLAMPS
from megatron_rl_corr.parallel.reduce import all_gather_metrics


def test_meanings_when_compared_with_the_steps_metrics_then_every_one_is_described(healthy):
    assert [name for name in healthy if meaning_of(name) is None] == []


def test_meanings_when_shown_in_a_table_then_one_line_each():
    for name, meaning in (MEANINGS | PREFIXES).items():
        assert meaning.text and "\n" not in meaning.text and len(meaning.text) <= 90, name
        if meaning.usual:
            # The live table prints label, value, range and this in one line of 110 characters.
            assert len(meaning.usual.says) <= 66 and meaning.usual.remedy.endswith("."), name


@pytest.mark.parametrize(
    "name, text",
    [
        ("rollout_corr/weight_mean", "0.5 to 2"), ("rollout_corr/ess", "at least 0.3"),
        ("rollout_corr/k3_kl", "at most 0.01"), ("rollout_corr/kl", "-0.01 to 0.01"),
        ("rollout_corr/chi2_token", "at most 1"), ("rollout_corr/nonfinite_tokens", "0"), ("skipped", "0"),
        ("rollout_corr/chi2_geo", "at most 1"), ("rollout_corr/batch_filtered", "0"),
    ],
)
def test_usual_range_when_written_then_these_words(name, text):
    assert str(usual_range(name)) == text


def test_meanings_when_compared_with_the_corrections_metrics_then_the_same_names():
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=(RejectionRule("seq_mean", "k3", upper=0.1),),
        rollout_m2_threshold=0.04, rollout_batch_filter_kl=0.01,
    )
    logprobs, ids = torch.tensor([-1.0, -2.0]), torch.tensor([0, 1])
    measured = compute_correction(
        logprobs, logprobs, torch.ones(2), ids, num_sequences=2, config=config, turn_ids=ids
    ).metrics
    names = {f"rollout_corr/{name}" for name in all_gather_metrics(measured, None)}
    assert {name for name in names if meaning_of(name) is None} == set()
    assert {name for name in MEANINGS if name.startswith("rollout_corr/")} - names == set()
    # Every family of theirs has a member.
    families = [prefix for prefix in PREFIXES if prefix.startswith("rollout_corr/")]
    assert all(any(name.startswith(prefix) for name in names) for prefix in families)


def test_clamps_when_compared_with_the_metrics_then_each_has_its_unclamped_mean_before_it():
    names = list(MEANINGS)
    clamped = {name for name in names if name.endswith("_clamped")}
    assert clamped == {f"{name}_clamped" for name in CLAMPS} and len(clamped) == 16
    assert all(names[names.index(name) - 1] == name.removesuffix("_clamped") for name in clamped)


def test_meaning_of_when_the_metric_belongs_to_a_family_then_the_familys():
    assert "rejection rule" in meaning_of("rollout_corr/rejected_fraction/seq_mean_k3").text
    assert meaning_of("my/own") is None and usual_range("my/own") is None and label_of("my/own") == "my/own"

"""A run's summary and alerts, from runs whose answers are plain."""

import math

import pytest

from megatron_rl_corr.observability.alerts import Summary, alert_steps, find_alerts, metric_names, summarise
from megatron_rl_corr.observability.catalogue import spec_of


def test_summarise_when_eight_steps_then_means_over_the_first_and_last_five(make_steps):
    rows = make_steps(8)
    rows[3] |= {"rollout_corr/log_ratio_abs_max": 4.5, "rollout_corr/k3_kl": 1.234e-3 + 8e-3}
    summary = summarise(rows)
    # Rewards are k/8 for k = 1..8: (1+2+3+4+5)/5/8 = 3/8 and (4+5+6+7+8)/5/8 = 6/8.
    assert (summary.steps, summary.first_reward, summary.last_reward) == (8, 0.375, 0.75)
    assert summary.max_abs_log_ratio == 4.5
    assert math.isclose(summary.mean_kl, 1.234e-3 + 8e-3 / 8)
    assert summary.weight_version == 7


def test_summarise_when_nothing_was_recorded_or_finite_then_none():
    summary = summarise([{"step": 1, "reward/mean": math.nan}])
    assert summary == Summary(1, None, None, None, None, None)


def test_find_alerts_when_the_run_is_healthy_then_none(make_steps):
    assert find_alerts(make_steps(3)) == [] and alert_steps(make_steps(3)) == []


def test_find_alerts_when_a_metric_left_its_range_then_worst_value_steps_and_remedy(make_steps):
    rows = make_steps(6)
    for step, mean in ((2, 0.4), (3, 2.25), (5, 0.2)):
        rows[step - 1]["rollout_corr/weight_mean"] = mean
    (alert,) = find_alerts(rows)
    # Distances from [0.5, 2]: 0.1, 0.25 and 0.3; the last is the worst.
    assert alert.sentence == (
        "weight was 0.2 at worst, usually 0.5 to 2, on 3 of 6 steps, first at step 2: "
        "the correction rescales the whole gradient."
    )
    assert "token or geometric weights" in alert.advice
    assert alert_steps(rows) == [2, 3, 5]


def test_find_alerts_when_values_are_nan_then_found_for_metrics_with_and_without_a_range(make_steps):
    rows = make_steps(4)
    rows[1]["rollout_corr/ess"] = 0.1
    rows[2]["rollout_corr/ess"] = math.nan
    rows[2]["my/own"] = math.inf
    sentences = [alert.sentence for alert in find_alerts(rows)]
    assert sentences == [
        "ESS was nan at worst, on 2 of 4 steps, first at step 2: "
        "a number overflowed, or there was no value to average.",
        "my/own was inf at worst, on 1 of 1 steps, first at step 3: "
        "a number overflowed, or there was no value to average.",
    ]


@pytest.mark.parametrize(
    "name",
    ["ledger/decode/as_temperature", "ledger/dist/tv_least", "rollout_corr/quadrant/good_above_mass"],
)
def test_find_alerts_when_nothing_of_a_metrics_kind_was_there_then_none_but_infinite_is_one(make_steps, name):
    rows = make_steps(2)
    rows[1][name] = math.nan
    assert spec_of(name) is not None and find_alerts(rows) == [] and alert_steps(rows) == []
    rows[1][name] = math.inf
    assert alert_steps(rows) == [2]


def test_metric_names_when_some_are_unknown_then_they_come_last():
    rows = [{"zeta": 1, "step": 1}, {"step": 2, "alpha": 1, "grad_norm": 1.0, "reward/mean": 1.0}]
    assert metric_names(rows) == ["step", "reward/mean", "grad_norm", "alpha", "zeta"]

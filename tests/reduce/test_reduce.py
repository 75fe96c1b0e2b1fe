"""Metrics over microbatches and ranks are those of one process, in two collectives and one host read."""

import math

import pytest
import torch

from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce.collectives import all_reduce_metrics, merge
from megatron_rl_corr.reduce.metrics import Max, Mean, Min, Std, Sum


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_merge_when_microbatches_are_of_unlike_size_then_no_mean_of_means():
    # 1 of 1 and 0 of 3: a quarter, where the mean of the two means would be a half.
    parts = [
        {"share": Mean(tensor(1, 1)), "top": Max(tensor(-2)), "least": Min(tensor(4)), "n": Sum(tensor(1))},
        {"share": Mean(tensor(0, 3)), "top": Max(tensor(-5)), "least": Min(tensor(7)), "n": Sum(tensor(3))},
    ]
    merged = {name: metric.value() for name, metric in merge(parts).items()}
    assert merged == {"share": 0.25, "top": -2, "least": 4, "n": 4}
    # A generator is as good as a list, one microbatch as good as several.
    assert merge(iter(parts[:1]))["share"].value() == 1
    assert merge([]) == {}


def test_merge_when_a_microbatch_was_empty_then_it_changes_nothing():
    parts = [
        {"std": Std(tensor(6, 18, 3)), "top": Max(tensor(-2))},
        {"std": Std(tensor(0, 0, 0)), "top": Max(tensor(-math.inf))},
    ]
    merged = merge(parts)
    assert merged["std"].value() == pytest.approx(math.sqrt(2)) and merged["top"].value() == -2


def test_merge_when_microbatches_hold_unlike_metrics_then_their_names():
    with pytest.raises(ValueError, match=r"microbatches hold unlike metrics: \['b', 'c'\]"):
        merge([{"a": Sum(tensor(1)), "b": Sum(tensor(1))}, {"a": Sum(tensor(1)), "c": Sum(tensor(1))}])


def test_metrics_when_there_are_many_metrics_then_the_host_reads_once(monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or original(self))
    metrics = {f"m{i}": Mean(tensor(i, 2)) for i in range(20)} | {
        "top": Max(tensor(3)),
        "low": Min(tensor(-3)),
    }
    numbers = all_reduce_metrics(metrics, None)
    assert numbers == {f"m{i}": i / 2 for i in range(20)} | {"top": 3, "low": -3}
    assert len(reads) == 1
    assert all_reduce_metrics({}, None) == {}


def test_metrics_when_over_ranks_and_microbatches_then_those_of_one_process(ranks):
    # The worker dealt the sequences to ranks and microbatches, some of which had none.
    batch = ranks[0]["inputs"]["batch"]
    whole = compute_correction(
        batch["train"],
        batch["rollout"],
        batch["mask"],
        batch["seq_ids"],
        num_sequences=8,
        config=ranks[0]["microbatches"]["config"],
    )
    expected = all_reduce_metrics(whole.metrics, None)
    assert expected["sequences"] == 7 and expected["nonfinite_tokens"] > 0 and expected["weight_std"] > 0
    for rank in ranks:
        assert rank["microbatches"]["metrics"] == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_collectives_when_a_step_is_reported_then_one_for_sums_and_one_for_extrema(ranks):
    for rank in ranks:
        assert rank["microbatches"]["collectives"] == ["allreduce_"] * 2
        assert len(rank["microbatches"]["metrics"]) >= 19

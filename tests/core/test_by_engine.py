"""The mismatch of each rollout engine's samples: by hand, and the same however the tokens are split."""

import math

import pytest
import torch

from megatron_rl_corr.reduce.collectives import merge
from tests.core.parted_tokens import metrics

ENGINES = ("sglang", "vllm", "sglang+vllm")
# Of two samples, the first from one engine and the second from another.
BY = torch.tensor([0, 0, 1, 1, 1])


def numbers(found):
    values = {name: metric.value() for name, metric in found.items() if name.startswith("by_engine/")}
    return {name.removeprefix("by_engine/"): value for name, value in values.items()}


def test_mismatch_of_each_engine_then_its_numbers_are_those_by_hand():
    found = numbers(metrics(engine_ids=BY, engines=ENGINES))
    assert found["sglang/tokens"] == found["vllm/tokens"] == 2
    # D of sglang's tokens: 0, 0.5; of vllm's: -0.25, 0
    assert found["sglang/kl"] == -0.25 and found["vllm/kl"] == 0.125
    assert found["sglang/k3_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2, rel=1e-12)
    assert found["vllm/k3_kl"] == pytest.approx((math.exp(-0.25) - 0.75) / 2, rel=1e-12)
    assert found["sglang/log_ratio_abs_mean"] == 0.25 and found["vllm/log_ratio_abs_mean"] == 0.125
    assert found["sglang/log_ratio_abs_max"] == 0.5 and found["vllm/log_ratio_abs_max"] == 0.25
    assert found["sglang+vllm/tokens"] == 0 and math.isnan(found["sglang+vllm/log_ratio_abs_max"])


def test_mismatch_of_each_engine_when_tokens_are_split_then_the_parts_add_up():
    whole = numbers(metrics(engine_ids=BY, engines=ENGINES))
    parts = [
        metrics(part, engine_ids=BY[part], engines=ENGINES)
        for part in (slice(0, 1), slice(1, 3), slice(3, 5))
    ]
    found = numbers(merge(parts))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name


def test_mismatch_when_all_samples_have_one_engine_then_nothing_is_told_by_engine():
    assert numbers(metrics()) == {}

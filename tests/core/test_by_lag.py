"""The mismatch of tokens by how many pushes ago they were sampled: by hand, naively, and
however they are split.
"""

import math
import random

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce.collectives import merge
from tests.core import naive
from tests.core.parted_tokens import metrics

# Two samples; a push came after the first token of the second. The last token is not trained.
LAGS = torch.tensor([3, 2, 1, 0, 0])


def numbers(found):
    return {name: metric.value() for name, metric in found.items() if name.startswith("by_lag/")}


def test_mismatch_by_lag_when_worked_out_by_hand_then_each_token_counts_at_its_own():
    found = numbers(metrics(token_lags=LAGS))
    # D = 0, 0.5 of lags 3 and 2; -0.25 of lag 1; 0 of lag 0
    assert [found[f"by_lag/{lag}/tokens"] for lag in ("0", "1", "2+")] == [1, 1, 2]
    assert [found[f"by_lag/{lag}/log_ratio_abs_mean"] for lag in ("0", "1", "2+")] == [0, 0.25, 0.25]
    assert [found[f"by_lag/{lag}/kl"] for lag in ("0", "1", "2+")] == [0, 0.25, -0.25]
    assert found["by_lag/1/k3_kl"] == pytest.approx(math.exp(-0.25) - 0.75, rel=1e-12)
    assert found["by_lag/2+/k3_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2, rel=1e-12)


def test_mismatch_by_lag_when_no_token_is_that_old_then_it_has_no_number():
    found = numbers(metrics(token_lags=torch.zeros(5, dtype=torch.int64)))
    assert found["by_lag/0/tokens"] == 4 and found["by_lag/1/tokens"] == found["by_lag/2+/tokens"] == 0
    assert math.isnan(found["by_lag/2+/k3_kl"])


def test_mismatch_by_lag_when_tokens_are_split_then_the_parts_add_up():
    whole = numbers(metrics(token_lags=LAGS))
    parts = [metrics(part, token_lags=LAGS[part]) for part in (slice(0, 1), slice(1, 3), slice(3, 5))]
    assert numbers(merge(parts)) == pytest.approx(whole, rel=1e-12, nan_ok=True)


def test_mismatch_when_lags_are_not_known_then_nothing_is_told_by_lag():
    assert numbers(metrics()) == {}


@pytest.mark.parametrize("with_turns", [False, True])
def test_metrics_when_parted_by_lag_and_turn_then_all_of_the_naive_correction(with_turns):
    draw, tokens = random.Random(5), 60
    batch = naive.Batch(
        train=[naive.single(-draw.random() * 6) for _ in range(tokens)],
        rollout=[naive.single(-draw.random() * 6) for _ in range(tokens)],
        mask=[draw.random() < 0.8 for _ in range(tokens)],
        seq_ids=[draw.randrange(6) for _ in range(tokens)],
        num_sequences=6,
        turn_ids=[draw.randrange(3) for _ in range(tokens)],
        advantages=[1.0] * tokens,
        lags=[draw.randrange(5) for _ in range(tokens)],
    )
    batch.rollout[7] = batch.train[7]
    batch.mask[7] = True
    config = RolloutCorrectionConfig()
    expected = naive.correct(batch, config, with_turns=with_turns).metrics
    found = compute_correction(
        torch.tensor(batch.train),
        torch.tensor(batch.rollout),
        torch.tensor(batch.mask),
        torch.tensor(batch.seq_ids),
        num_sequences=6,
        config=config,
        turn_ids=torch.tensor(batch.turn_ids) if with_turns else None,
        token_lags=torch.tensor(batch.lags),
    ).metrics
    numbers = {
        name: value
        for key, metric in found.items()
        for name, value in metric.numbers(key, metric.values.tolist()).items()
    }
    assert numbers == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True)
    assert numbers["exact_fraction"] > 0 and 1 / 6 <= numbers["ess_sequences"] < 1

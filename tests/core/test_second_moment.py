"""M2PO's mask by hand: which tokens go, for which bound, and that several ranks cut at one place."""

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.ratios import TokenRatios
from megatron_rl_corr.core.rejection import second_moment_mask

NAN = float("nan")
# D^2 = 0.09, 0.01, 1, 0.04 at the valid tokens; running means from the smallest: 0.01, 0.025,
# 0.0466667, 0.285.
LOG_RATIO = torch.tensor([0.3, -0.1, 5.0, 1.0, NAN, -0.2])
MASK = torch.tensor([1, 1, 0, 1, 1, 1])
SEQ_IDS = torch.tensor([0, 0, 0, 2, 2, 2])


@pytest.mark.parametrize(
    ("bound", "kept"),
    [
        (0.009, []),
        (0.011, [1]),
        (0.024, [1]),
        (0.026, [1, 5]),
        (0.04, [1, 5]),
        (0.046, [1, 5]),
        (0.047, [0, 1, 5]),
        (0.28, [0, 1, 5]),
        (0.29, [0, 1, 3, 5]),
    ],
)
def test_second_moment_when_bounded_then_the_largest_go_until_the_mean_is_within(bound, kept):
    correction = compute_correction(
        LOG_RATIO - 1,
        torch.full((6,), -1.0),
        MASK,
        SEQ_IDS,
        num_sequences=3,
        config=RolloutCorrectionConfig(rollout_m2_threshold=bound),
    )
    assert [t for t, keeps in enumerate(correction.mask.tolist()) if keeps] == kept
    assert correction.metrics["rejected_fraction/m2"].value() == 1 - len(kept) / 4
    # A rule about tokens takes no sequence.
    assert correction.kept_sequences.tolist() == [True, False, True]


def test_second_moment_when_squares_differ_by_1_percent_then_they_are_told_apart():
    # D^2 = 1 and 1.012, each in a bin of its own; the mean of both is 1.006.
    rollout = torch.full((2,), -2.0)
    ratios = TokenRatios.of(rollout + torch.tensor([1.0, 1.012**0.5]), rollout, torch.ones(2), {})
    for bound, kept in ((0.999, [0, 0]), (1.003, [1, 0]), (1.007, [1, 1])):
        assert second_moment_mask(ratios, bound, None).tolist() == kept


def test_second_moment_when_the_policies_agree_then_all_stay():
    logprobs = torch.tensor([-1.0, -2.0, -3.0])
    correction = compute_correction(
        logprobs,
        logprobs,
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=RolloutCorrectionConfig(rollout_m2_threshold=1e-9),
    )
    assert correction.mask.all()


def test_second_moment_when_tokens_are_on_two_ranks_then_one_cut():
    # Rank 0 holds D = 0.3, -0.1 and rank 1 D = 1, -0.2. Alone, rank 0 would keep both under a bound of 0.05,
    # and rank 1 keep -0.2; together 0.3 stays under 0.05, and goes under 0.046.
    halves = [[0.3, -0.1], [1.0, -0.2]]
    histograms = []

    class Recording:
        def all_reduce_dp_cp(self, histogram):
            histograms.append(histogram.clone())
            return histogram

    class Summed:
        def all_reduce_dp_cp(self, histogram):
            return histograms[0] + histograms[1]

    def kept(log_ratio, bound, groups):
        ratios = TokenRatios.of(torch.tensor(log_ratio) - 1, torch.full((2,), -1.0), torch.ones(2), {})
        return second_moment_mask(ratios, bound, groups).tolist()

    for half in halves:
        kept(half, 0.05, Recording())
    for bound, expected in ((0.05, [[1, 1], [0, 1]]), (0.046, [[0, 1], [0, 1]])):
        assert [kept(half, bound, Summed()) for half in halves] == expected

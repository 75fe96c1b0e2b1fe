"""Samples of several sequences (episodes) in advantages and in means over sequences, by hand."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import check_branches
from megatron_rl_corr.core.advantages import KINDS, group_advantages
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.segments import sums_of_episodes

NAN = math.nan
# Group 0: an episode of 3 sequences beside two of 1; group 1: two of 2 and 1.
EPISODES = torch.tensor([0, 0, 0, 1, 2, 3, 3, 4])
GROUPS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
REWARDS = torch.tensor([3.0, 3.0, 3.0, 0.0, 1.5, 1.0, 3.0, 0.0])
TOKENS = torch.tensor([2.0, 1.0, 4.0, 3.0, 5.0, 1.0, 1.0, 2.0], dtype=torch.float64)
ALL = torch.ones(8, dtype=torch.bool)


def advantages(kind, kept=None, **how):
    made = group_advantages(
        REWARDS.clone(),
        GROUPS,
        num_groups=2,
        kind=kind,
        in_baseline=kept,
        episode_ids=EPISODES,
        tokens=TOKENS,
        **how,
    )
    return made.tolist()


def test_group_mean_when_an_episode_has_three_sequences_then_it_counts_once():
    # group 0: (3 + 0 + 1.5) / 3 = 1.5, not (9 + 1.5) / 5; group 1: episodes 2 and 0
    assert advantages("group_mean") == [1.5, 1.5, 1.5, -1.5, 0.0, 0.0, 2.0, -1.0]


def test_grpo_when_an_episode_has_three_sequences_then_the_deviation_is_of_episodes():
    first, second = math.sqrt((1.5**2 + 1.5**2) / 3), 1.0
    expected = [1.5 / first] * 3 + [-1.5 / first, 0.0, 0.0, 2.0 / second, -1.0 / second]
    assert advantages("grpo") == pytest.approx(expected, rel=1e-5)


def test_rloo_when_an_episode_has_three_sequences_then_the_others_are_episodes():
    # of the first three the others are 0 and 1.5; of sequence 5 and 6, which are one episode, it is 0
    assert advantages("rloo") == [2.25, 2.25, 2.25, -2.25, 0.0, 1.0, 3.0, -2.0]


def test_batch_mean_when_an_episode_has_three_sequences_then_it_counts_once():
    # (3 + 0 + 1.5 + 2 + 0) / 5, of both groups
    assert advantages("batch_mean") == pytest.approx((REWARDS - 1.3).tolist())


def test_raw_when_episodes_have_several_sequences_then_each_its_own():
    assert advantages("raw") == REWARDS.tolist()


def test_whitened_when_episodes_have_several_sequences_then_each_token_counts_once():
    rows = [
        v for v, n in zip([1.5] * 3 + [-1.5, 0.0, 0.0, 2.0, -1.0], TOKENS, strict=True) for _ in range(int(n))
    ]
    mean = sum(rows) / len(rows)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in rows) / (len(rows) - 1) + 1e-8)
    expected = [(v - mean) / deviation for v in (1.5, 1.5, 1.5, -1.5, 0.0, 0.0, 2.0, -1.0)]
    assert advantages("reinforce_plus_plus_baseline") == pytest.approx(expected, rel=1e-6)


def test_baseline_when_a_sequence_is_rejected_then_its_episode_counts_with_the_others():
    kept = torch.tensor([False, True, True, True, True, False, True, True])
    # group 1: episode 3 counts with 3 alone: mean 1.5
    assert advantages("group_mean", kept) == [1.5, 1.5, 1.5, -1.5, 0.0, -0.5, 1.5, -1.5]


def test_baseline_when_all_sequences_are_rejected_then_the_episode_is_out_of_it():
    kept = torch.tensor([False, False, False, True, True, True, True, False])
    # group 0: 0 and 1.5; group 1: episode 3 alone, whose sequences have nobody to compare with
    assert advantages("group_mean", kept)[3:5] == [-0.75, 0.75]
    assert advantages("rloo", kept)[3:] == [-1.5, 1.5, 0.0, 0.0, -2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_when_rejected_ones_are_nan_then_others_do_not_see_them(kind):
    kept = torch.tensor([True, False, True, True, True, True, True, False])
    rewards = torch.where(kept, REWARDS, NAN)
    how = {"num_groups": 2, "kind": kind, "in_baseline": kept, "episode_ids": EPISODES, "tokens": TOKENS}
    made = group_advantages(rewards, GROUPS, **how)
    assert torch.equal(made[kept], group_advantages(REWARDS, GROUPS, **how)[kept])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [None, torch.tensor([True, False, True, True, True, False, False, True])])
def test_groups_when_parted_over_ranks_then_those_of_one(kind, kept):
    """Two ranks, of which the first has episodes 0, 3 and the second 1, 2, 4."""
    of_ranks = [torch.tensor([0, 1, 2, 5, 6]), torch.tensor([3, 4, 7])]
    tables = []

    def made(collect):
        found = []
        for rank, rows in enumerate(of_ranks):
            own = EPISODES[rows].unique(return_inverse=True)[1]
            found.append(
                group_advantages(
                    REWARDS[rows],
                    GROUPS[rows],
                    num_groups=2,
                    kind=kind,
                    in_baseline=None if kept is None else kept[rows],
                    all_reduce=collect(rank, "groups"),
                    tokens=TOKENS[rows],
                    all_reduce_batch=collect(rank, "batch"),
                    episode_ids=own,
                )
            )
        return torch.cat(found)

    sums = {}
    for stage in ("groups", "batch"):  # the second needs the first's sums

        def adding(rank, what, stage=stage):
            def collective(table):
                if what in sums:
                    return sums[what]
                if what == stage:
                    tables.append(table)
                return table

            return collective

        tables.clear()
        made(adding)
        if tables:
            sums[stage] = tables[0] + tables[1]
    parted = made(lambda rank, what: lambda table: sums[what])
    assert parted.tolist() == pytest.approx(
        torch.tensor(advantages(kind, kept))[torch.cat(of_ranks)].tolist(), rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_episodes_when_each_has_one_sequence_then_every_bit_as_without(kind):
    generator = torch.Generator().manual_seed(0)
    rewards, tokens = torch.rand(12, generator=generator), torch.arange(1.0, 13.0, dtype=torch.float64)
    groups, kept = torch.arange(3).repeat_interleave(4), torch.rand(12, generator=generator) > 0.3
    how = {"num_groups": 3, "kind": kind, "in_baseline": kept, "tokens": tokens}
    with_ids = group_advantages(rewards, groups, **how, episode_ids=torch.arange(12))
    assert torch.equal(with_ids, group_advantages(rewards, groups, **how))


def corrected(aggregation, denominator, episode_ids, lost):
    """Four sequences of 2, 1, 3 and 2 tokens, of episodes 0, 0, 1, 2; tokens `lost` have a ratio of 10."""
    lengths = torch.tensor([2, 1, 3, 2])
    seq_ids = torch.arange(4).repeat_interleave(lengths)
    rollout = torch.zeros(8)
    rollout[lost] = -math.log(10)
    config = RolloutCorrectionConfig(
        loss_aggregation=aggregation,
        loss_denominator=denominator,
        loss_scale_length=5.0 if aggregation.endswith("norm") else None,
        rollout_rs=(RejectionRule("seq_max", "ratio", 0.5, 2.0),),
    )
    correction = compute_correction(
        torch.zeros(8),
        rollout,
        torch.ones(8),
        seq_ids,
        num_sequences=4,
        config=config,
        episode_ids=episode_ids,
    )
    return token_coefficients(correction, seq_ids, config).double().tolist()


IDS = torch.tensor([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("aggregation", "denominator", "episode_ids", "expected"),
    [
        # All three episodes count; the lost sequence 1 is in the lengths of its episode.
        ("seq-mean-token-mean", "valid", IDS, [1 / 9, 1 / 9, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("seq-mean-token-mean", "kept", IDS, [1 / 6, 1 / 6, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("seq-mean-token-mean", "kept", None, [1 / 6, 1 / 6, 0, 1 / 9, 1 / 9, 1 / 9, 1 / 6, 1 / 6]),
        ("seq-mean-token-mean", "valid", None, [1 / 8, 1 / 8, 0, 1 / 12, 1 / 12, 1 / 12, 1 / 8, 1 / 8]),
        ("seq-mean-token-sum", "valid", IDS, [1 / 3, 1 / 3, 0, *[1 / 3] * 5]),
        ("seq-mean-token-sum", "valid", None, [1 / 4, 1 / 4, 0, *[1 / 4] * 5]),
        ("seq-mean-token-sum-norm", "valid", IDS, [1 / 15, 1 / 15, 0, *[1 / 15] * 5]),
        ("token-mean", "valid", IDS, [1 / 8, 1 / 8, 0, *[1 / 8] * 5]),
        ("token-mean", "kept", IDS, [1 / 7, 1 / 7, 0, *[1 / 7] * 5]),
    ],
)
def test_coefficients_when_an_episode_has_two_sequences_then_means_take_it_as_one(
    aggregation, denominator, episode_ids, expected
):
    assert corrected(aggregation, denominator, episode_ids, [2]) == pytest.approx(expected, rel=1e-6)


def test_coefficients_when_all_of_an_episode_is_rejected_then_kept_means_leave_it_out():
    assert corrected("seq-mean-token-mean", "kept", IDS, [0, 2]) == pytest.approx(
        [0, 0, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]
    )
    assert corrected("seq-mean-token-sum", "valid", IDS, [0, 2]) == pytest.approx([0, 0, 0, *[1 / 3] * 5])


def test_sums_of_episodes_when_fewer_than_sequences_then_zeros_behind_them():
    assert sums_of_episodes(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 1])).tolist() == [
        1.0,
        6.0,
        0.0,
    ]


def test_advantage_by_token_when_samples_have_several_sequences_then_refused_by_name():
    check_branches(RolloutCorrectionConfig(advantage="grpo"))
    with pytest.raises(ValueError, match="^`advantage` otb"):
        check_branches(RolloutCorrectionConfig(advantage="otb"))

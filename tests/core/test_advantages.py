"""Group-relative advantages by hand; rejected rows leave the baseline and may hold anything."""

import itertools
import math

import pytest
import torch

from megatron_rl_corr.config.losses import WHITENED
from megatron_rl_corr.core.advantages import KINDS, group_advantages

NAN = float("nan")
# Group 1: rewards 1, 2, 6; group 0: rewards 3, 5.
REWARDS, GROUPS = torch.tensor([1.0, 3.0, 2.0, 5.0, 6.0]), torch.tensor([1, 0, 1, 0, 1])


def test_group_mean_when_groups_interleave_and_differ_in_size_then_each_its_own_mean():
    # means 4 and 3
    advantages = group_advantages(REWARDS, GROUPS, num_groups=2, kind="group_mean")
    assert advantages.tolist() == [-2.0, -1.0, -1.0, 1.0, 3.0]
    assert advantages.dtype == torch.float32


def test_grpo_when_computed_by_hand_then_over_the_population_deviation():
    # group 0: std 1; group 1: variance (4 + 1 + 9) / 3
    deviation = math.sqrt(14 / 3)
    advantages = group_advantages(REWARDS, GROUPS, num_groups=2, kind="grpo")
    assert advantages.tolist() == pytest.approx(
        [-2 / deviation, -1.0, -1 / deviation, 1.0, 3 / deviation], rel=1e-5
    )


@pytest.fixture(params=[6.0, 1e30, NAN])
def rejected(request):
    """(rewards, the rows that count): the last one, which is not among these, has any reward."""
    rewards = torch.cat([REWARDS[:4], torch.tensor([request.param])])
    return rewards, torch.tensor([True, False, True, True, False])


def test_baseline_when_a_row_is_rejected_then_the_others_do_not_see_it(rejected):
    # Group 1 is left with 1 and 2: mean 1.5, deviation 0.5. Group 0 with 5 alone: advantage 0.
    rewards, kept = rejected
    mean = group_advantages(rewards, GROUPS, num_groups=2, kind="group_mean", in_baseline=kept)
    assert mean[[0, 2, 3]].tolist() == [-0.5, 0.5, 0.0]
    grpo = group_advantages(rewards, GROUPS, num_groups=2, kind="grpo", in_baseline=kept)
    assert grpo[[0, 2, 3]].tolist() == pytest.approx([-1.0, 1.0, 0.0], rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "group_mean", "rloo"])
def test_group_when_every_row_is_rejected_then_zero(kind):
    kept = torch.tensor([False, True, False, True, False])
    rewards = torch.tensor([NAN, 3.0, 2.0, 5.0, 6.0])
    advantages = group_advantages(rewards, GROUPS, num_groups=3, kind=kind, in_baseline=kept)
    apart = 2.0 if kind == "rloo" else 1.0  # from each other, or from their mean
    assert advantages.tolist() == pytest.approx([0.0, -apart, 0.0, apart, 0.0], rel=1e-5)


@pytest.mark.parametrize("kind", ["gae", "otb"])
def test_kind_when_unknown_or_of_tokens_then_named(kind):
    with pytest.raises(
        ValueError, match=f"advantage must be one of grpo, group_mean, rloo, raw, .*, got .{kind}."
    ):
        group_advantages(REWARDS, GROUPS, num_groups=2, kind=kind)


def test_rloo_when_groups_differ_in_size_then_against_the_mean_of_the_others():
    # Group 1: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2. Group 0: 3 - 5, 5 - 3.
    advantages = group_advantages(REWARDS, GROUPS, num_groups=2, kind="rloo")
    assert advantages.tolist() == [-3.0, -2.0, -1.5, 2.0, 4.5]


def test_rloo_when_a_row_is_rejected_then_it_is_nobodys_other(rejected):
    rewards, kept = rejected
    advantages = group_advantages(rewards, GROUPS, num_groups=2, kind="rloo", in_baseline=kept)
    # Group 1: 1 - 2 and 2 - 1; group 0 has 5 alone, with nothing to compare; the rejected 3
    # is held against 5.
    assert advantages[:4].tolist() == [-1.0, -2.0, 1.0, 0.0]


def test_raw_when_rows_are_rejected_then_rewards_as_they_are():
    kept = torch.zeros(5, dtype=torch.bool)
    advantages = group_advantages(REWARDS.double(), GROUPS, num_groups=2, kind="raw", in_baseline=kept)
    assert advantages.tolist() == [1.0, 3.0, 2.0, 5.0, 6.0] and advantages.dtype == torch.float32


def test_batch_mean_when_a_row_is_rejected_then_the_mean_is_of_the_others(rejected):
    rewards, kept = rejected
    advantages = group_advantages(rewards, GROUPS, num_groups=2, kind="batch_mean", in_baseline=kept)
    # (1 + 2 + 5) / 3, of both groups.
    assert advantages[:4].tolist() == pytest.approx([1 - 8 / 3, 3 - 8 / 3, 2 - 8 / 3, 5 - 8 / 3])
    none = group_advantages(rewards, GROUPS, num_groups=2, kind="batch_mean", in_baseline=kept & False)
    assert not none.any()


@pytest.mark.parametrize("kind", ["grpo", "group_mean", "rloo"])
def test_advantages_when_all_rewards_of_a_group_are_equal_then_exactly_0_whatever_their_sum_rounds_to(kind):
    # 0.1 has no exact binary form: a mean in float32 would leave 7e-9 / 1e-6. Float64 holds a
    # float32 times the size.
    for size, reward in itertools.product((3, 5, 6, 7, 12), (0.1, 0.3, -0.7, 123.456)):
        rewards = torch.full((2 * size,), reward)
        rewards[size] = torch.nextafter(rewards[size], torch.tensor(1e9))
        ids = torch.arange(2).repeat_interleave(size)
        advantages = group_advantages(rewards, ids, num_groups=2, kind=kind)
        assert not advantages[:size].any(), (size, reward)
        assert advantages[size] > 0 > advantages[size + 1], "the smallest difference of float32 is one"


# Those of the whole batch: tests/reduce/test_advantages.py, over real ranks.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*WHITENED, "batch_mean")])
def test_advantages_when_a_group_is_parted_and_a_row_rejected_then_those_of_one_process(kind):
    # Group 0 has rows on both ranks, and one of them is rejected; group 1 is on the second alone.
    rewards = torch.tensor([1.0, 0.25, 0.5, float("nan"), 2.0, 3.0])
    ids, kept = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([True, True, True, False, True, True])
    whole = group_advantages(rewards, ids, num_groups=2, kind=kind, in_baseline=kept)
    halves = [slice(0, 2), slice(2, 6)]
    tables = []

    def keep(table):
        tables.append(table)
        return table

    for half in halves:
        group_advantages(
            rewards[half], ids[half], num_groups=2, kind=kind, in_baseline=kept[half], all_reduce=keep
        )
    assert len(tables) == (0 if kind == "raw" else 2)
    parts = [
        group_advantages(
            rewards[half],
            ids[half],
            num_groups=2,
            kind=kind,
            in_baseline=kept[half],
            all_reduce=lambda table: sum(tables),
        )
        for half in halves
    ]
    torch.testing.assert_close(torch.cat(parts), whole, equal_nan=True, rtol=1e-6, atol=1e-7)


def test_reinforce_plus_plus_when_computed_by_hand_then_over_tokens_of_the_whole_batch():
    # Rewards 1, 3, 2, 5, 6 with 1, 2, 1, 0, 1 tokens: 1, 3, 3, 2, 6, of mean 3 and variance (4 + 0
    # + 0 + 1 + 9) / 4.
    tokens = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    found = group_advantages(REWARDS, GROUPS, num_groups=2, kind="reinforce_plus_plus", tokens=tokens)
    deviation = math.sqrt(14 / 4)
    assert found.tolist() == pytest.approx(
        [-2 / deviation, 0.0, -1 / deviation, 2 / deviation, 3 / deviation]
    )
    # Less the groups' means, 3 and 4: 1 - 3, 3 - 4 on two tokens, 2 - 3 and 6 - 3, of mean -0.4.
    values, mean = [-2.0, -1.0, -1.0, -1.0, 3.0], -0.4
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    found = group_advantages(
        REWARDS, GROUPS, num_groups=2, kind="reinforce_plus_plus_baseline", tokens=tokens
    )
    assert found.tolist() == pytest.approx([(v - mean) / deviation for v in (-2.0, -1.0, -1.0, 1.0, 3.0)])


@pytest.mark.parametrize("kind", WHITENED)
def test_reinforce_plus_plus_when_a_row_is_rejected_then_nothing_of_it_is_counted(kind):
    tokens, kept = (
        torch.tensor([3.0, 1.0, 2.0, 4.0, 5.0], dtype=torch.float64),
        torch.tensor([1, 1, 1, 1, 0]).bool(),
    )
    few = group_advantages(REWARDS[:4], GROUPS[:4], num_groups=2, kind=kind, tokens=tokens[:4])
    for rejected_reward in (6.0, 1e30, NAN):
        rewards = torch.cat([REWARDS[:4], torch.tensor([rejected_reward])])
        found = group_advantages(rewards, GROUPS, num_groups=2, kind=kind, tokens=tokens, in_baseline=kept)
        assert found[:4].tolist() == few.tolist()


@pytest.mark.parametrize("kind", WHITENED)
def test_reinforce_plus_plus_when_all_rewards_of_the_batch_are_equal_then_exactly_0(kind):
    generator = torch.Generator().manual_seed(0)
    for reward in (0.1, 1 / 3, -0.7, 123.456, 1e-30):
        rewards, ids = torch.full((512,), reward), torch.arange(512) // 8
        tokens = torch.randint(1, 30000, (512,), generator=generator).double()
        found = group_advantages(rewards, ids, num_groups=64, kind=kind, tokens=tokens)
        assert found.count_nonzero() == 0


@pytest.mark.parametrize("kind", WHITENED)
def test_reinforce_plus_plus_when_tokens_are_missing_or_none_then_refused_or_finite(kind):
    with pytest.raises(ValueError, match=f"advantage {kind} is whitened over tokens; pass tokens"):
        group_advantages(REWARDS, GROUPS, num_groups=2, kind=kind)
    found = group_advantages(
        REWARDS, GROUPS, num_groups=2, kind=kind, tokens=torch.zeros(5, dtype=torch.float64)
    )
    assert found.isfinite().all()  # no token is left to train


def test_reinforce_plus_plus_when_groups_have_one_sample_then_against_the_batch():
    rewards, tokens = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.ones(4, dtype=torch.float64)
    found = group_advantages(
        rewards, torch.arange(4), num_groups=4, kind="reinforce_plus_plus", tokens=tokens
    )
    assert found.tolist() == pytest.approx([0.5 * 3**0.5, -(0.5 * 3**0.5), -(0.5 * 3**0.5), 0.5 * 3**0.5])

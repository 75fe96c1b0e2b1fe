"""Which sequences share a microbatch: the arithmetic, by hand and on many draws."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.mcore.batch.deal import destinations
from megatron_rl_corr.mcore.batch.packing import (
    PackLimits,
    attention_share,
    balanced_packs,
    check_packed_branches,
    first_fit,
    karmarkar_karp,
)
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch


def test_karmarkar_karp_when_two_parts_then_the_largest_difference_first():
    # 8 and 7 part (spread 1), 6 and 5 part (spread 1), 4 joins the smaller side of 8|7: 8 | 7+4; ...
    # by hand: 16 | 14.
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum(parts, [])) == [0, 1, 2, 3, 4]
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_karmarkar_karp_when_many_lengths_then_parts_are_equal_to_a_few_percent_and_nothing_is_lost():
    draw = random.Random(0)
    costs = [draw.lognormvariate(5, 1) for _ in range(64)]
    parts = karmarkar_karp(costs, 4)
    sums = [sum(costs[i] for i in part) for part in parts]
    assert sorted(sum(parts, [])) == list(range(64))
    assert max(sums) / (sum(sums) / 4) < 1.01
    assert karmarkar_karp(costs, 4) == parts


def test_karmarkar_karp_when_sizes_must_be_equal_then_they_are_and_sums_nearly():
    # 9|7 and 6|1 part with spreads 2 and 5: joined the other way round, 9 + 1 against 7 + 6.
    assert karmarkar_karp([9, 7, 6, 1], 2, equal_sizes=True) == [[0, 3], [1, 2]]
    draw = random.Random(2)
    costs = [draw.lognormvariate(5, 1) for _ in range(64)]
    parts = karmarkar_karp(costs, 8, equal_sizes=True)
    sums = [sum(costs[i] for i in part) for part in parts]
    assert sorted(sum(parts, [])) == list(range(64)) and {len(part) for part in parts} == {8}
    assert max(sums) / (sum(sums) / 8) < 1.01


def test_first_fit_when_lengths_are_unequal_then_longest_first_into_the_first_pack_with_room():
    # 7 opens a pack of 10; 6 does not fit, opens another; 4 fits behind 6; 3 behind 7; 2 opens the third.
    assert first_fit([3, 7, 4, 6, 2], 10) == [[0, 1], [2, 3], [4]]


def test_balanced_packs_when_cost_and_limit_disagree_then_the_limit_holds():
    draw = random.Random(1)
    for _ in range(200):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(1, 40))]
        limits = PackLimits(draw.randint(30, 60), attention_share=draw.choice([0.0, 0.1, 10.0]))
        needed = len(first_fit(lengths, limits.max_tokens))
        for count in {needed, min(needed + 3, len(lengths)), len(lengths)}:
            packs = balanced_packs(lengths, count, limits)
            assert sorted(sum(packs, [])) == list(range(len(lengths))) and len(packs) == count
            assert all(0 < sum(lengths[i] for i in pack) <= limits.max_tokens for pack in packs)


def test_balanced_packs_when_there_is_room_then_by_cost_and_not_by_tokens():
    # One sequence of 8 costs 8 + 64 / 2 = 40, as much as eight of 2 (2 + 4 / 2 = 4 each) and two more.
    lengths, limits = [8, *[2] * 10], PackLimits(20, attention_share=1.0)
    assert balanced_packs(lengths, 2, limits) == [[0], list(range(1, 11))]
    assert limits.cost(8) == 40 and limits.cost(2) == 4


@pytest.mark.parametrize(("experts", "width"), [(None, 10), (8, 2 * 3 + 5)])
def test_attention_share_when_heads_and_layers_are_known_then_by_their_operations(experts, width):
    args = SimpleNamespace(
        num_attention_heads=4,
        kv_channels=2,
        group_query_attention=True,
        num_query_groups=2,
        swiglu=True,
        ffn_hidden_size=10,
        num_experts=experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=3,
        num_layers=2,
        moe_shared_expert_intermediate_size=5,
        hidden_size=4,
        padded_vocab_size=20,
    )
    # Queries and output 4 x 16, keys and values 4 x 8, three matrices 4 x width; half of the
    # vocabulary's 4 x 20.
    assert attention_share(args) == pytest.approx(2 * 8 / (4 * (16 + 8 + 3 * width) + 40))


def test_destinations_when_replicas_have_unequal_samples_then_equal_cost_and_what_can_stay_stays():
    # 9 + 8 against 2 + 1: 9 + 1 and 8 + 2, of which the replica of the long ones keeps the longer.
    assert destinations([[9, 8], [2, 1]], PackLimits(100)) == [[0, 1], [1, 0]]


def test_destinations_when_lengths_are_log_normal_then_ranks_differ_by_less_than_five_percent():
    draw = random.Random(3)
    lengths = [[min(int(draw.lognormvariate(6, 0.9)), 4096) for _ in range(8)] for _ in range(8)]
    limits = PackLimits(8192, attention_share=3e-4)
    costs = [0.0] * 8
    for row, goes in zip(lengths, destinations(lengths, limits), strict=True):
        for length, replica in zip(row, goes, strict=True):
            costs[replica] += limits.cost(length)
    before = [sum(map(limits.cost, row)) for row in lengths]
    mean = sum(costs) / 8
    assert max(costs) / mean < 1.05 < max(before) / mean


def test_destinations_when_exchanges_of_pairs_balance_then_all_others_stay():
    # 30 against 20, and 25: the first gives its 9 to the second for a 4.
    lengths = [[9, 8, 7, 6], [4, 5, 5, 6], [7, 6, 6, 6]]
    assert destinations(lengths, PackLimits(100)) == [[1, 0, 0, 0], [0, 1, 1, 1], [2, 2, 2, 2]]
    assert destinations([[5, 5], [4, 6], [3, 7]], PackLimits(100)) == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("replicas, samples, most_moved", [(16, 256, 0.04), (32, 64, 0.08), (256, 64, 0.08)])
def test_destinations_when_batches_are_large_then_few_tokens_move_and_costs_are_within_a_half_percent(
    replicas, samples, most_moved
):
    draw, limits = random.Random(replicas), PackLimits(65536, attention_share=3e-5)
    lengths = [
        [min(int(draw.lognormvariate(8.5, 0.9)), 65536) for _ in range(samples)] for _ in range(replicas)
    ]
    goes, costs, moved = destinations(lengths, limits), [0.0] * replicas, 0
    for source, row in enumerate(lengths):
        for length, target in zip(row, goes[source], strict=True):
            costs[target] += limits.cost(length)
            moved += length if target != source else 0
    assert max(costs) <= 1.005 * sum(costs) / replicas
    assert moved <= most_moved * sum(map(sum, lengths))
    assert [sum(row.count(replica) for row in goes) for replica in range(replicas)] == [samples] * replicas


def test_balanced_packs_when_another_replica_has_more_sequences_then_the_last_are_empty():
    assert balanced_packs([5, 3], 4, PackLimits(10)) == [[0], [1], [], []]


def test_destinations_when_samples_have_several_sequences_then_their_own_squares_cost():
    # Of 8 tokens each: one sequence costs 8 + 64 / 2, two of 4 cost 8 + 32 / 2, eight of 1 cost 8 + 8 / 2.
    limits, lengths = PackLimits(100, attention_share=1.0), [[8, 8], [8, 8]]
    assert destinations(lengths, limits) == [[0, 0], [1, 1]]
    assert destinations(lengths, limits, [[64, 64], [8, 32]]) in ([[0, 1], [0, 1]], [[1, 0], [0, 1]])


def test_padded_rows_when_samples_may_have_several_sequences_then_refused_by_name():
    check_packed_branches(PackLimits(100))
    with pytest.raises(ValueError, match="^--rollout-pad-sequences"):
        check_packed_branches(None)


def sequence(sample, branch, tokens, prompt=0):
    """Of so many positions."""
    return Trajectory(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=torch.tensor([1, 2]),
        output_ids=torch.full((tokens - 1,), 7 + sample),
        rollout_logprobs=torch.full((tokens - 1,), -1.0),
        finish_reason="length" if branch == 1 else "stop",
        weight_versions=(VersionSpan("0", 0, tokens - 1),),
        cached_tokens=0,
        server="http://none",
        branch=branch,
    )


EPISODES = [
    sequence(0, 0, 2),
    sequence(0, 1, 3),
    sequence(1, 0, 4),
    sequence(0, 0, 2, 1),
    sequence(0, 1, 5, 1),
]


def batch_of(trajectories, rewards, **how):
    return RolloutBatch.from_trajectories(trajectories, torch.tensor(rewards), length=8, version=0, **how)


def test_batch_when_samples_have_several_sequences_then_their_episodes_are_numbered():
    batch = batch_of(EPISODES, [1.0, 3.0, 5.0, 0.5, 0.5], with_episodes=True, mask_truncated=True)
    assert batch.episodes.tolist() == batch.episode_ids.tolist() == [0, 0, 1, 2, 2]
    assert (batch.num_sequences, batch.num_episodes) == (5, 3)
    assert batch.episode_means(batch.rewards.double()).tolist() == [2.0, 5.0, 0.5]
    assert batch.episode_sums(batch.rewards.double()).tolist() == [4.0, 5.0, 1.0]
    assert batch.in_loss.tolist() == [True, False, True, True, False]  # each sequence by itself
    assert batch.mean_ids is batch.episode_ids and replace(batch, means_of="sequence").mean_ids is None


def test_samples_of_when_episodes_are_drawn_then_all_their_sequences_in_that_order():
    batch = batch_of(EPISODES, [0.0] * 5, with_episodes=True)
    samples = batch.samples_of([2, 0])
    assert samples.tolist() == [3, 4, 0, 1]
    part = batch.part(samples)
    assert part.episodes.tolist() == part.episode_ids.tolist() == [0, 0, 1, 1] and part.num_episodes == 2
    assert part.group_ids.tolist() == [1, 1, 0, 0] and part.lengths.tolist() == [2, 5, 2, 3]
    assert part.part([1]).episodes.tolist() == [0]


def test_batch_when_each_sample_is_a_sequence_then_nothing_of_episodes_is_known():
    batch = batch_of(EPISODES, [1.0, 3.0, 5.0, 0.5, 0.5])
    assert batch.episodes is None and batch.episode_ids is None and batch.num_episodes == 5
    rewards = batch.rewards.double()
    assert batch.episode_means(rewards) is rewards and batch.samples_of([3, 1]).tolist() == [3, 1]

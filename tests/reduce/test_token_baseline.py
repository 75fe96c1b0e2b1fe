"""The optimal token baseline over replicas and context-parallel ranks, in rows and packed: that
of a plain loop.
"""

import numpy as np
import pytest
import torch

from megatron_rl_corr.core.token_baseline import POWER, SEQUENCES
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.context import SequenceChunks
from tests.reduce.conftest import run_ranks
from tests.reduce.token_baseline_worker import GROUP, LAYOUTS, LENGTH, ONLY_BASELINE, samples


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What each rank found."""
    return run_ranks("token_baseline_worker.py", tmp_path_factory.mktemp("token_baseline"))


def naive():
    """({(sample, position): advantage} of tokens in the loss, mean power, sequences): token by
    token, in float64.
    """
    made = {
        name: value.double().numpy() if name not in ("sampled", "mask") else value.numpy()
        for name, value in samples().items()
    }
    steps = {}  # (sample, number of the sampled token) -> (place, energy so far)
    for sample in range(len(made["rewards"])):
        energy, number = 0.0, 0
        for at in range(LENGTH):
            if not made["sampled"][sample, at]:
                continue
            weight, counts = made["weights"][sample, at], made["mask"][sample, at]
            if sample == ONLY_BASELINE:
                weight, counts = 1.0, not np.isnan(made["energies"][sample, at])
            if counts:
                energy += weight**2 * made["energies"][sample, at]
                steps[sample, number] = at, energy
            number += 1
    advantages, power = {}, 0.0
    for (sample, number), (at, _) in steps.items():
        group = range(sample // GROUP * GROUP, sample // GROUP * GROUP + GROUP)
        there = {other: steps[other, number][1] + 1e-8 for other in group if (other, number) in steps}
        baseline = sum(made["rewards"][other] * energy for other, energy in there.items()) / sum(
            there.values()
        )
        advantage = made["rewards"][sample] - (baseline if len(there) > 1 else 0.0)
        if made["mask"][sample, at]:
            advantages[sample, at] = advantage
            power += (made["weights"][sample, at] * advantage) ** 2 * made["energies"][sample, at]
    sequences = len({sample for sample, _ in advantages})
    assert 10 < sequences < 15 and len(advantages) > 60
    return advantages, power / sequences, sequences


@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_and_power_when_spread_over_ranks_then_those_of_a_plain_loop(saved, layout, way):
    expected, power, sequences = naive()
    cp, dp = LAYOUTS[layout]
    found = {}
    for rank in saved[: cp * dp]:
        own, at, advantages, numbers, collectives = rank[layout, way]
        assert advantages.dtype == torch.float32
        for place, value in zip(
            zip(own.tolist(), at.tolist(), strict=True), advantages.tolist(), strict=True
        ):
            assert place not in found, "a token is on one context-parallel rank"
            found[place] = value
        assert numbers[POWER] == pytest.approx(power, rel=1e-6) and numbers[SEQUENCES] == sequences
        # Running sums over cp, then the groups' sums: over all ranks where groups are parted, else over cp.
        parted = way == "packed" and dp > 1
        assert collectives == ["allreduce_"] * ((cp > 1) + (parted or cp > 1))
    in_loss = {place: value for place, value in found.items() if place in expected}
    assert in_loss == pytest.approx(expected, abs=1e-6)
    # Rejected tokens have none.
    others = {
        place: value for place, value in found.items() if place not in expected and place[0] != ONLY_BASELINE
    }
    assert len(others) > 10 and set(others.values()) == {0.0}


def test_chunks_of_a_rank_then_those_of_the_zigzag():
    # Rank 1 of 2 has positions 2 to 5 of 8, and of 4 the middle two: chunks 1 and 2 of each.
    groups = ParallelGroups()
    seq_ids = torch.tensor([0, 0, 0, 0, 1, 1])
    alone = SequenceChunks.of(np.array([0, 4, 6]), seq_ids, groups)
    assert alone.numbers.tolist() == [0, 0, 0, 0, 1, 1] and alone.firsts.tolist() == [0, 0, 0, 0, 4, 4]
    values = torch.tensor([[1.0, 2.0, 0.0, 4.0, 5.0, 6.0]], dtype=torch.float64)
    assert alone.running_sums_of_sequences(values, groups).tolist() == [[1.0, 3.0, 3.0, 7.0, 5.0, 11.0]]

    class SecondOfTwo(ParallelGroups):
        cp_size, cp_rank = 2, 1

    cut = SequenceChunks.of(np.array([0, 4, 6]), seq_ids, SecondOfTwo())
    assert cut.numbers.tolist() == [1, 1, 2, 2, 5, 6] and cut.firsts.tolist() == [0, 0, 2, 2, 4, 5]


def test_running_sums_when_one_number_dwarfs_the_others_then_each_sequence_and_chunk_has_its_own():
    # 2.4e17 is the square of the weight e^20, which a bound of 1e9 lets pass.
    ids, starts = torch.tensor([0, 1, 1, 2, 2, 2]), np.array([0, 1, 3, 6])
    values = torch.tensor([[2.4e17, 0.5, 0.25, 0.75, 0.125, 1.0]], dtype=torch.float64)
    alone = SequenceChunks.of(starts, ids, ParallelGroups())
    assert alone.running_sums_of_sequences(values, ParallelGroups()).tolist() == [
        [2.4e17, 0.5, 0.75, 0.75, 0.875, 1.875]
    ]

    class FirstOfTwo(ParallelGroups):
        cp_size, cp_rank = 2, 0

        def all_reduce_cp(self, sums):  # the other rank's: the chunks in the middle
            return sums + torch.tensor([[0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)

    groups = FirstOfTwo()
    cut = SequenceChunks.of(np.array([0, 4]), torch.zeros(4, dtype=torch.int64), groups)
    values = torch.tensor([[1.0, 2.0, 0.5, 2.4e17]], dtype=torch.float64)
    assert cut.running_sums_of_sequences(values, groups).tolist() == [[1.0, 3.0, 4.25, 2.4e17]]

"""A correction over context and data parallel ranks is that of one process."""

import pytest
import torch

from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce.collectives import all_gather_stacked, all_reduce_metrics

CUTS = ["zigzag", "contiguous"]


@pytest.fixture(scope="module")
def one_process(ranks):
    batch = ranks[0]["inputs"]["batch"]
    return compute_correction(
        batch["train"],
        batch["rollout"],
        batch["mask"],
        batch["seq_ids"],
        num_sequences=8,
        config=ranks[0]["config"],
    )


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_when_laid_together_then_every_token_once_and_some_sequence_on_one_rank_only(ranks, cut):
    seq_ids = ranks[0]["inputs"]["batch"]["seq_ids"]
    positions = [rank["correction"][cut]["positions"] for rank in ranks]
    assert torch.cat(positions).sort().values.tolist() == list(range(len(seq_ids)))
    # Sequence 1 has one token: the second context rank has nothing of it.
    assert 1 in seq_ids[positions[0]] and 1 not in seq_ids[positions[1]]


@pytest.mark.parametrize("cut", CUTS)
def test_correction_when_sequences_are_split_then_weights_and_masks_of_one_process(ranks, cut, one_process):
    # What is compared says something: the rules keep some and reject some, the bounds bind.
    assert 0 < one_process.kept_tokens < one_process.valid_tokens < len(one_process.valid)
    assert one_process.kept_sequences.sum() not in (0, 7)
    for index, rank in enumerate(ranks):
        part = rank["correction"][cut]
        mine = part["positions"]
        torch.testing.assert_close(part["weights"], one_process.weights[mine], rtol=1e-6, atol=0)
        assert part["mask"].tolist() == one_process.mask[mine].tolist()
        assert part["valid"].tolist() == one_process.valid[mine].tolist()
        replica = slice(4 * (index // 2), 4 * (index // 2) + 4)
        assert part["kept_sequences"].tolist() == one_process.kept_sequences[replica].tolist()
        assert part["valid_tokens"].item() == one_process.valid_tokens.item()
        assert part["kept_tokens"].item() == one_process.kept_tokens.item()


@pytest.mark.parametrize("cut", CUTS)
def test_metrics_when_sequences_are_split_then_all_of_one_process(ranks, cut, one_process):
    expected = all_reduce_metrics(one_process.metrics, None)
    assert expected["sequences"] == 7  # of eight one is empty
    for rank in ranks:
        assert rank["correction"][cut]["metrics"] == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("cut", CUTS)
def test_collectives_when_a_batch_is_corrected_then_one_over_each_group_and_two_to_report(ranks, cut):
    for rank in ranks:
        assert len(rank["correction"][cut]["collectives"]) == 2
        assert len(rank["correction"][cut]["reporting"]) == 2


def test_gather_when_over_a_pair_then_its_ranks_in_order(ranks):
    assert ranks[0]["gather"].tolist() == ranks[1]["gather"].tolist() == [[[0, 0]], [[1, 10]]]
    assert ranks[2]["gather"].tolist() == ranks[3]["gather"].tolist() == [[[2, 20]], [[3, 30]]]


def test_gather_when_to_one_rank_then_the_members_in_their_order_and_nothing_on_others(ranks):
    got = {name: found.tolist() for name, found in ranks[2]["gather to"].items()}
    assert got == {
        "all": [[[3], [30]], [[0], [0]], [[2], [20]], [[1], [10]]],
        "some": [[[1], [10]], [[3], [30]]],
        "own": [[[2], [20]]],
    }
    assert all(found is None for rank in (0, 1, 3) for found in ranks[rank]["gather to"].values())


def test_gather_when_alone_then_a_view():
    alone = torch.tensor([1.0, 2.0])
    gathered = all_gather_stacked(alone, None)
    assert gathered.tolist() == [[1.0, 2.0]] and gathered.data_ptr() == alone.data_ptr()

"""The ids that tokens were drawn from, as flat and as padded tensors, and what a trajectory refuses."""

import pytest
import torch

from megatron_rl_corr.rollout import Support, Trajectory, VersionSpan

INT = {"dtype": torch.int32}
# Three tokens, drawn from {7, 1}, {0} and {3, 9, 8}.
SUPPORT = Support(torch.tensor([7, 1, 0, 3, 9, 8], **INT), torch.tensor([2, 1, 3], **INT))


def trajectory(tokens, support):
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.zeros(tokens, dtype=torch.int64),
        rollout_logprobs=torch.zeros(tokens),
        finish_reason="length",
        weight_versions=(VersionSpan("v1", 0, tokens),),
        cached_tokens=0,
        server="http://rollout-3:30000",
        support=support,
    )


def test_padded_when_sets_are_of_unequal_length_then_each_in_its_row_and_minus_1_behind():
    padded = SUPPORT.padded(4)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[7, 1, -1, -1], [0, -1, -1, -1], [3, 9, 8, -1]]


def test_padded_when_as_wide_as_the_longest_set_then_accepted_and_narrower_refused():
    assert SUPPORT.longest == 3
    assert SUPPORT.padded(3).tolist() == [[7, 1, -1], [0, -1, -1], [3, 9, 8]]
    with pytest.raises(ValueError, match="width must be at least the 3 ids of the longest set, got 2"):
        SUPPORT.padded(2)


def test_padded_when_there_is_no_token_then_no_row():
    empty = Support(torch.empty(0, **INT), torch.empty(0, **INT))
    assert empty.longest == 0 and empty.padded(5).shape == (0, 5) and empty.padded(0).shape == (0, 0)


@pytest.mark.parametrize(
    "ids, lengths, named",
    [
        (torch.tensor([7, 1]), torch.tensor([2], **INT), "ids must be 1-d torch.int32, got 1-d torch.int64"),
        (torch.tensor([7, 1], **INT), torch.tensor([[2]], **INT), "lengths must be 1-d torch.int32, got 2-d"),
        (torch.tensor([7, 1], **INT), torch.tensor([3], **INT), "lengths that sum to 3 have 2 ids"),
        (torch.tensor([7, 1], **INT), torch.tensor([2, 0], **INT), "lengths must be at least 1, got 0"),
        (torch.tensor([7, 1], **INT), torch.tensor([3, -1], **INT), "lengths must be at least 1, got -1"),
    ],
)
def test_support_when_ids_and_lengths_disagree_then_refused(ids, lengths, named):
    with pytest.raises(ValueError, match=named):
        Support(ids, lengths)


def test_trajectory_when_its_support_has_a_set_for_each_token_then_taken_and_otherwise_refused():
    assert trajectory(3, SUPPORT).support is SUPPORT
    with pytest.raises(ValueError, match="2 output_ids have a support of 3 sets"):
        trajectory(2, SUPPORT)

"""Names of weight versions carry the start of the trainer."""

import pytest
import torch

from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout import versions


def test_name_when_a_trainer_starts_again_then_the_same_number_has_another_name():
    first, second = versions.new_run_id(), versions.new_run_id()
    assert versions.name(first, 50) != versions.name(second, 50)
    assert versions.number(versions.name(first, 50)) == versions.number(versions.name(second, 50)) == 50


def test_number_when_the_name_is_a_bare_number_then_itself():
    assert versions.number("7") == 7


@pytest.mark.parametrize("name", ["default", "5f2c91ab-", "5f2c91ab-7b", ""])
def test_number_when_a_name_has_none_then_refused(name):
    with pytest.raises(ValueError, match="has no number: versions are called <id>-<number>"):
        versions.number(name)


def test_lags_when_a_push_came_within_a_response_then_each_token_has_that_of_its_own_version():
    spans = VersionSpan("5f2c91ab-4", 0, 2), VersionSpan("5f2c91ab-6", 2, 3), VersionSpan("5f2c91ab-8", 3, 4)
    sample = Trajectory(
        0,
        0,
        torch.tensor([1]),
        torch.tensor([2, 3, 4, 5]),
        torch.zeros(4),
        "stop",
        spans,
        0,
        "http://127.0.0.1:1",
    )
    # The trainer has version 7, and a server that is ahead of it has no negative lag.
    assert versions.token_lags(sample, 7).tolist() == [3, 3, 1, 0]

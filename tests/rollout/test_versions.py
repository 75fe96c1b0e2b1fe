"""Names of weight versions carry the start of the trainer."""

import pytest

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

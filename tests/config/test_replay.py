"""What has no effect in a replay of saved samples is refused, also where a feature owns it."""

import pytest

from megatron_rl_corr.config.fields import options_of
from megatron_rl_corr.config.problems import problems_of
from megatron_rl_corr.config.run import IDLE_TOPICS, RunConfig


@pytest.mark.parametrize("given", [{"group_filter": "spread", "group_filter_measured": 0.1}])
def test_replay_when_groups_are_filtered_then_every_option_of_it_is_named(given):
    with pytest.raises(ValueError) as refused:
        RunConfig(replay="samples", hf_checkpoint="model", **given)
    said = [str(one) for one in problems_of(refused.value)]
    assert [text.partition(" ")[0].strip("`") for text in said] == list(given)
    assert all("has no effect with `replay`" in text for text in said)


def test_idle_options_then_those_of_sampling_and_of_features_that_need_servers():
    idle = {name for topic in IDLE_TOPICS for name in options_of(topic)}
    assert {"eval_prompts", "group_filter_measured", "probe_push", "group_filter"} <= idle

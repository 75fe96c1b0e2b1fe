"""How many ranks the servers bring into the broadcast group."""

import pytest

from megatron_rl_corr.rollout.errors import RolloutProtocolError
from megatron_rl_corr.weight_sync.update_group import count_ranks

ONE = {"tp_size": 4, "pp_size": 2, "dp_size": 1, "enable_dp_attention": False}


def test_ranks_of_two_servers_of_tp4_pp2_then_eight_each():
    assert count_ranks(["http://a", "http://b"], [ONE, ONE]) == 8


def test_ranks_when_dp_attention_shares_the_tensor_ranks_then_they_are_not_counted_again():
    assert count_ranks(["http://a"], [{**ONE, "dp_size": 4, "enable_dp_attention": True}]) == 8


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({**ONE, "tp_size": 2}, "http://b .* it has 4 ranks and http://a has 8; give all servers the same"),
        ({**ONE, "dp_size": 2}, "http://b .* it runs --dp-size 2 replicas; start as many servers and name each"),
    ],
)
def test_ranks_when_servers_differ_or_hide_replicas_then_refused_by_name(second, words):
    with pytest.raises(RolloutProtocolError, match=words):
        count_ranks(["http://a", "http://b"], [ONE, second])

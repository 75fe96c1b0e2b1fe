"""A failure ends all ranks: its error on the first that has one, PeerFailure on others; what is
done before that.
"""

import pytest

from megatron_rl_corr.reduce.failure import FailureWatch

PEER = "PeerFailure: another rank failed; its message says why"


def test_failure_when_no_rank_has_one_then_all_go_on(ranks):
    assert [rank["failures"][0] for rank in ranks] == ["went on"] * 4


def test_failure_when_one_rank_has_one_then_it_raises_its_own_and_the_others_a_peers(ranks):
    assert [rank["failures"][1] for rank in ranks] == [PEER, PEER, "ValueError: rank 2 has no disk", PEER]


def test_failure_when_two_ranks_have_one_then_only_the_first_tells_it(ranks):
    assert [rank["failures"][2] for rank in ranks] == [PEER, "ValueError: rank 1 has no disk", PEER, PEER]


def test_done_when_one_rank_is_not_then_false_on_all_and_true_when_it_is(ranks):
    assert [rank["failures"][3:] for rank in ranks] == [[False, True]] * 4


@pytest.mark.parametrize(
    "error", [RuntimeError("the loop thread is closed"), OSError("disk"), ValueError("closed")]
)
def test_clean_up_when_one_of_several_fails_then_the_others_run_and_it_is_named(error, caplog):
    watch, done = FailureWatch(), []

    def fails():
        raise error

    for clean_up in (lambda: done.append("before"), fails, lambda: done.append("behind")):
        watch.on_failure(clean_up)
    watch.clean_up()
    assert done == ["before", "behind"] and str(error) in caplog.text


def test_clean_up_when_a_session_has_ended_then_what_it_left_to_do_is_forgotten():
    watch, done = FailureWatch(), []
    watch.on_failure(lambda: done.append("old servers"))
    watch.forget()
    watch.on_failure(lambda: done.append("new servers"))
    watch.clean_up()
    assert done == ["new servers"]


def test_ranks_when_one_asks_for_a_turn_then_all_take_it_while_they_wait(ranks):
    # rank 1 asks at the first two meetings; rank 0's result comes at the fourth
    assert [rank["turns"] for rank in ranks] == [
        [1, None, 2],
        [11, None, 2],
        [None, None, 2],
        [None, None, 2],
    ]

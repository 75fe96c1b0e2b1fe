"""A failure ends all ranks: its error on the first rank that has one, PeerFailure on every other."""

PEER = "PeerFailure: another rank failed; its message says why"


def test_failure_when_no_rank_has_one_then_all_go_on(ranks):
    assert [rank["failures"][0] for rank in ranks] == ["went on"] * 4


def test_failure_when_one_rank_has_one_then_it_raises_its_own_and_the_others_a_peers(ranks):
    assert [rank["failures"][1] for rank in ranks] == [PEER, PEER, "ValueError: rank 2 has no disk", PEER]


def test_failure_when_two_ranks_have_one_then_only_the_first_tells_it(ranks):
    assert [rank["failures"][2] for rank in ranks] == [PEER, "ValueError: rank 1 has no disk", PEER, PEER]


def test_done_when_one_rank_is_not_then_false_on_all_and_true_when_it_is(ranks):
    assert [rank["failures"][3:] for rank in ranks] == [[False, True]] * 4

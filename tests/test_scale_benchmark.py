"""benchmarks/scale.py: what a push of thousands of ranks asks for stays within its bounds, counted on one
rank of a job of 2,048 that trains a model of 1T.
"""

import pytest

from benchmarks.scale import BUCKET, ROOT, USERS, counted_rank, gathered, paused_s, push_of_changes
from tests.tiers import matrix

U3 = USERS["U3"]
MIB = 2**20
BUCKET_BYTES = 2048 * MIB
EMBEDDING_BYTES = 163840 * 7168 * 2
MOST_HELD = 2 * BUCKET_BYTES + EMBEDDING_BYTES + 512 * MIB
"""Of a sender beside its own shards: a bucket that travels, one that is filled, a parameter that comes, and
what is kept to be verified.
"""


@pytest.fixture(scope="module")
def sender():
    return counted_rank(U3, 0, ROOT)


def test_push_when_a_stage_is_sent_then_all_but_the_senders_own_comes_to_it_and_to_no_other(sender):
    other = counted_rank(U3, U3["parallel"]["expert"] - 1, ROOT)
    assert sender["sends"] and not other["sends"]
    # 3 layers, of which 2 have experts; every expert of 64 ranks, and what 4 tensor ranks share.
    experts = 2 * 384 * 3 * 2048 * 7168 * 2
    assert sender["sent_to_servers"] == gathered(sender) + sender["own_bytes"]
    assert sender["groups"]["receive over expert"]["received"] == experts * 63 // 64
    assert other["held"] == 0 and gathered(other) == 0
    assert other["groups"]["send over expert"]["sent"] == experts // 64
    assert not any(name.startswith("all-gather over") for name in [*sender["groups"], *other["groups"]])


def test_push_when_a_stage_is_sent_then_the_sender_holds_two_buckets_and_a_parameter(sender):
    assert sender["held"] <= MOST_HELD


def test_push_when_there_are_256_servers_then_few_requests_and_small_collectives(sender):
    buckets, rest = divmod(sender["requests"][BUCKET], U3["servers"])
    assert rest == 0 and buckets <= sender["sent_to_servers"] / BUCKET_BYTES * 1.1 + 2
    assert sum(sender["requests"].values()) <= U3["servers"] * (buckets + 15)
    assert sender["groups"]["all-reduce over world"]["received"] < 4096


def test_seconds_when_sending_goes_on_beside_gathering_then_the_longer_of_both():
    push = {"bytes": 50e9, "gathered": 25e9, "interpreter_s": 1.5, "requests": 1000, "request_s": 0.001}
    # At 400 Gb/s 1 s to send, 0.5 s + 1.5 s to gather and convert, 1 s to ask.
    assert paused_s(push | {"overlaps": True}, 400) == pytest.approx(3.0)
    assert paused_s(push | {"overlaps": False}, 400) == pytest.approx(4.0)


def test_push_of_changes_when_two_percent_changed_then_six_bytes_for_each_and_no_gather_in_the_pause():
    push = {"bytes": 1e12, "buckets": 500, "requests": 256 * 515, "request_s": 1e-4, "overlaps": True}
    changes = push_of_changes(push, U3, 0.02)
    assert changes["bytes"] == pytest.approx(0.06e12)
    # 3.75 GB of each of 16 stages in 2 buckets of 2 GiB, and its end; 15 rounds of any push, 2 of changes.
    assert changes["requests"] == 256 * (15 + 16 * 2 + 16 + 2)
    # 1.2 s to send at 400 Gb/s, 1.664 s to ask.
    assert paused_s(changes, 400) == pytest.approx(1.2 + 1.664)


@matrix
@pytest.mark.parametrize("user", USERS)
def test_push_when_counted_for_every_user_then_within_the_same_bounds(user):
    given = USERS[user]
    stage_ranks = given["parallel"]["world"] // given["parallel"]["pipeline"]
    for stage in {0, given["parallel"]["pipeline"] - 1}:
        rank = counted_rank(given, stage * stage_ranks, ROOT)
        assert rank["sends"] and gathered(rank) < rank["sent_to_servers"]
        assert rank["held"] <= MOST_HELD

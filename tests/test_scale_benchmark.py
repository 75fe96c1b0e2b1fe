"""benchmarks/scale.py: what a push and a batch of thousands of ranks ask for stays within its bounds, counted
on one rank of a job of 2,048 that trains a model of 1T.
"""

import pytest

from benchmarks.scale import (
    BATCH_WORKER,
    BUCKET,
    ROOT,
    USERS,
    counted_rank,
    gathered,
    paused_s,
    push_of_changes,
    received_bytes,
    sent_bytes,
)
from tests.tiers import long, matrix

pytestmark = matrix

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


def test_seconds_when_processes_announce_then_a_share_of_the_requests_and_what_the_sender_does_for_each():
    push = {"bytes": 0, "gathered": 0, "interpreter_s": 0, "overlaps": True}
    push |= {"buckets": 10, "servers": 256, "requests": 10 * 256 + 100, "request_s": 1e-3}
    push["announced"] = {"processes": 8, "bucket_s": 2e-3, "request_s": 0.5e-3}
    # 100 ms of others, and 10 times 2 ms and 32 requests of half a millisecond.
    assert paused_s(push, 400) == pytest.approx(0.1 + 10 * (0.002 + 0.016))


def test_push_of_changes_when_two_percent_changed_then_six_bytes_for_each_and_no_gather_in_the_pause():
    push = {"bytes": 1e12, "buckets": 500, "requests": 256 * 515, "request_s": 1e-4, "overlaps": True}
    changes = push_of_changes(push, U3, 0.02)
    assert changes["bytes"] == pytest.approx(0.06e12)
    # 3.75 GB of each of 16 stages in 2 buckets of 2 GiB, and its end; 15 rounds of any push, 2 of changes.
    assert changes["requests"] == 256 * (15 + 16 * 2 + 16 + 2) and changes["buckets"] == 16 * 3
    # 1.2 s to send at 400 Gb/s, 1.664 s to ask.
    assert paused_s(changes, 400) == pytest.approx(1.2 + 1.664)


@long
@pytest.mark.parametrize("user", USERS)
def test_push_when_counted_for_every_user_then_within_the_same_bounds(user):
    given = USERS[user]
    stage_ranks = given["parallel"]["world"] // given["parallel"]["pipeline"]
    for stage in {0, given["parallel"]["pipeline"] - 1}:
        rank = counted_rank(given, stage * stage_ranks, ROOT)
        assert rank["sends"] and gathered(rank) < rank["sent_to_servers"]
        assert rank["held"] <= MOST_HELD


SHORT = {"tokens": 256}
"""Samples as many as in the job, and a 256th as long."""
ROUTES = 8 * 2
"""Bytes of a token's routes in one layer: 8 of 384 experts."""
ROWS = 16 * 1024
"""Bytes of what is known once of each of 256 samples, and of the counts of a batch, at most."""


@pytest.fixture(scope="module")
def leader():
    return counted_rank(U3 | SHORT, 0, ROOT, BATCH_WORKER)


@pytest.fixture(scope="module")
def last():
    stages, world = U3["parallel"]["pipeline"], U3["parallel"]["world"]
    return counted_rank(U3 | SHORT, (stages - 1) * world // stages, ROOT, BATCH_WORKER)


def test_batch_when_it_is_dealt_out_then_few_samples_move(leader):
    assert leader["is_leader"] and 0 < leader["samples_moved"] < 0.05
    dealt, replica = sent_bytes(leader)
    assert dealt < 0.05 * replica


def test_batch_when_a_leader_sends_it_then_each_slice_once_and_few_of_them_are_held(leader):
    # 60 layers with experts on 16 stages: at most 4 on one.
    tokens, share = leader["tokens_of_replica"], leader["tokens_of_replica"] / 2
    _, replica = sent_bytes(leader)
    # All routes; ids to the first stage, 4 columns of 4 bytes to the last; its own slice to its tensor ranks.
    slices = tokens * (60 * ROUTES + 4 + 16) + share * (4 * ROUTES + 4)
    assert replica < 1.02 * slices + 4 * ROWS
    # The batch on the host, 45 bytes a token; its own slice, one that is made and one that travels.
    assert leader["held"] < 45 * tokens + share * (3 * 4 * ROUTES + 16) + 16 * ROWS


@long
def test_batch_when_a_stage_has_neither_embedding_nor_logits_then_it_gets_routes_alone():
    middle = counted_rank(U3 | SHORT, U3["parallel"]["world"] // 16, ROOT, BATCH_WORKER)
    share = middle["tokens_of_replica"] / 2
    assert received_bytes(middle["without_routes"]) < ROWS
    assert received_bytes(middle["groups"]) < 1.02 * share * 4 * ROUTES + ROWS
    # Its own routes, and where its tokens lie.
    assert middle["held"] < 1.02 * share * (4 * ROUTES + 16) + 2 * ROWS


def test_batch_when_a_stage_has_logits_then_it_gets_its_own_tokens_once(last):
    share = last["tokens_of_replica"] / 2
    assert last["is_last"] and received_bytes(last["without_routes"]) < 1.02 * share * 16 + ROWS
    assert last["held"] < 1.02 * share * (3 * ROUTES + 45 + 16) + 2 * ROWS


def test_correction_when_there_are_1000_metrics_more_then_as_many_collectives_of_few_bytes(last):
    few, many = (last["correction"][more]["groups"] for more in ("0", "1000"))
    calls = {"all-reduce over context": 1, "all-reduce over data x context": 4}
    assert {name: one["calls"] for name, one in few.items()} == calls
    assert {name: one["calls"] for name, one in many.items()} == calls
    # Five numbers of each sample of the replica, whatever its tokens.
    assert few["all-reduce over context"]["bytes"] == many["all-reduce over context"]["bytes"] == 5 * 8 * 256
    over_all = "all-reduce over data x context"
    assert few[over_all]["bytes"] < 16384 and many[over_all]["bytes"] == few[over_all]["bytes"] + 8000


def test_correction_when_there_are_8_times_the_ranks_then_the_same_collectives_and_groups_more(last):
    given = U3["parallel"]
    world = given["world"] * 8
    more = counted_rank(
        U3 | SHORT | {"parallel": given | {"world": world}},
        (given["pipeline"] - 1) * world // given["pipeline"],
        ROOT,
        BATCH_WORKER,
    )
    before, after = (one["correction"]["0"]["groups"] for one in (last, more))
    assert {name: one["calls"] for name, one in after.items()} == {
        name: one["calls"] for name, one in before.items()
    }
    grown = {name: after[name]["bytes"] - before[name]["bytes"] for name in after}
    # Three numbers of each group of prompts: of 16 x 32 groups, and of 128 x 32.
    assert grown == {"all-reduce over context": 0, "all-reduce over data x context": 112 * 32 * 24}

"""The protocol of a push between two ranks that are senders: what each asks, in which order,
and how it fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("push_worker.py")
ROOT = WORKER.parents[2]
OPEN = ["start v", "begin"]
DONE = ["deliver v", "end v", "checksums"]
COUNT = "check_all_sent"


CASES = (
    "right",
    "late",
    "last",
    "dies",
    "refuses",
    "breaks",
    "full",
    "lost",
    "slow",
    "long",
    "page",
    "pages",
    "stuck",
    "over",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """told[rank][case]: what was raised, and what was asked. One pair of processes runs all cases."""
    store, env = tmp_path_factory.mktemp("push") / "store", os.environ | {"PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), store, *CASES],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], answers
    return [json.loads(out) for out, _ in answers]


@pytest.fixture
def push(told):
    """push(case): what was raised and what was asked, of rank 0 and of rank 1."""
    return lambda case: [rank[case] for rank in told]


def test_push_then_every_rank_sends_its_stage_and_rank_0_leads(push):
    (raised, first), (raised_1, second) = push("right")
    assert raised is raised_1 is None
    sends = ["send p to ab", "send q to ab", "finish"]
    compared = ["compare sums of ab", "expect v"]
    assert first == ["find", "use ab", *OPEN, *sends, COUNT, *DONE, *compared, "resume"]
    assert second == ["use ab", "send r to ab", "send s to ab", "finish", COUNT, *compared]


def test_push_when_a_rank_is_slow_to_expect_the_version_then_the_servers_resume_after_it(push):
    (raised, first), (raised_1, second) = push("late")
    assert raised is raised_1 is None
    assert first[-1] == "resume" and second[-1] == "expect v"


@pytest.mark.parametrize("case", ["slow", "long"])
def test_push_when_checksums_or_a_stage_take_longer_than_a_collective_may_wait_then_it_goes_on(push, case):
    (raised, first), (raised_1, second) = push(case)
    assert raised is raised_1 is None
    assert first[-3:] == ["compare sums of ab", "expect v", "resume"] and second[-1] == "expect v"


@pytest.mark.parametrize(
    ("case", "sent"),
    [
        ("dies", ["send r to ab"]),
        ("last", ["send r to ab", "send s to ab"]),
        ("stuck", ["send r to ab"]),  # it answers who asks for its weights' name
    ],
)
def test_push_when_a_server_dies_then_all_is_sent_again_to_the_other_and_nobody_raises(push, case, sent):
    (raised, first), (raised_1, second) = push(case)
    assert raised is raised_1 is None
    again = ["send p to a", "send q to a", "finish"]
    assert first == [
        "find",
        "use ab",
        *OPEN,
        "send p to ab",
        "send q to ab",
        "finish",
        "find",
        "use a",
        *OPEN,
        *again,
        COUNT,
        *DONE,
        "compare sums of a",
        "expect v",
        "resume",
    ]
    assert second == [
        "use ab",
        *sent,
        "finish",
        "use a",
        "send r to a",
        "send s to a",
        "finish",
        COUNT,
        "compare sums of a",
        "expect v",
    ]


def test_push_when_one_answer_is_a_proxys_page_then_all_is_sent_once_more_to_both_and_nobody_raises(push):
    (raised, first), (raised_1, second) = push("page")
    assert raised is raised_1 is None
    sends = ["send p to ab", "send q to ab", "finish"]
    compared = ["compare sums of ab", "expect v"]
    assert first == [
        "find",
        "use ab",
        *OPEN,
        *sends,
        "find",
        "use ab",
        *OPEN,
        *sends,
        COUNT,
        *DONE,
        *compared,
        "resume",
    ]
    assert second == [
        "use ab",
        "send r to ab",
        "finish",
        "use ab",
        "send r to ab",
        "send s to ab",
        "finish",
        COUNT,
        *compared,
    ]


def test_push_when_repeated_then_the_rank_that_knows_why_tells_it(told):
    # "last", "dies", "page", "pages" and "stuck" fail at rank 1
    assert [rank["repeated"] for rank in told] == [0, 5]


def test_push_when_the_page_comes_again_then_the_run_ends_with_the_servers_name(push):
    (raised, first), (raised_1, second) = push("pages")
    assert raised.startswith("PeerFailure")
    assert raised_1.startswith("UnreadableAnswer: rollout server b broke the protocol of /update: <html>")
    assert first.count("find") == 3 and first[-1] == "abandon" and second.count("send r to ab") == 2


@pytest.mark.parametrize(
    ("case", "words", "abandon"),
    [
        ("refuses", "RolloutServerError: rollout server b answered POST /update with HTTP 500", "abandon"),
        ("breaks", "RolloutServerError: rollout server b did not answer", "abandon, broken"),
        ("full", "OSError: no space left", "abandon"),
        ("over", "RolloutServerError: rollout server b did not answer", "abandon"),
        (
            "lost",
            "RolloutProtocolError: rollout server a broke the protocol of /weights_checker: x differs",
            "abandon",
        ),
    ],
)
def test_push_when_it_cannot_go_on_then_the_cause_is_told_once_and_rank_0_lets_the_servers_go(
    push, case, words, abandon
):
    (raised, first), (raised_1, second) = push(case)
    assert raised.startswith("PeerFailure") and raised_1.startswith(words)
    assert first[-1] == abandon and "resume" not in first
    assert not any(call.startswith(("abandon", "expect")) for call in second)

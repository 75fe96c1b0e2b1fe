"""Rank 0's look at the servers of a fleet that changes: a check that hangs, a restart that was seen twice.
Runs of real servers are in tests/faults/test_fleet.py.
"""

import threading
import time
from argparse import Namespace

import pytest

from megatron_rl_corr.mcore import membership
from megatron_rl_corr.mcore.membership import Candidates

A, B, SLOW = "http://a:1", "http://b:1", "http://slow:1"


class Client:
    """The run's, of these servers; another one knows its own."""

    def __init__(self, urls):
        self.base_urls, self.left_out, self.expected_version, self.is_updating = tuple(urls), [], "v-2", False

    def another(self, urls):
        return Client(urls)

    def close(self):
        """Nothing is open."""


class Listed:
    """What the sources say: `urls`."""

    known, unread = True, {}

    def __init__(self, *urls):
        self.urls = urls

    def look(self):
        return self.urls


def candidates(client, listed):
    options = Namespace(servers_poll_s=0.01, servers_wait_s=60, servers_file=("servers.txt",))
    source = Namespace(client=client, loop=Namespace(call=lambda value: value), tokenizer=None, prompts=None)
    return Candidates(options, source, listed)


@pytest.fixture
def hangs(monkeypatch):
    """(set once the check of SLOW has begun; what it waits for, until the test has ended)."""
    begun, goes_on = threading.Event(), threading.Event()

    def check_joining(client, options, **how):
        (url,) = client.base_urls
        if url == SLOW:
            begun.set()
            goes_on.wait()
        return {url: "sglang"}

    monkeypatch.setattr(membership, "check_joining", check_joining)
    yield begun, goes_on
    goes_on.set()


def wait_for(happened):
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_servers_when_the_check_of_one_hangs_then_others_leave_and_join(hangs):
    client, listed, (begun, goes_on) = Client([A]), Listed(A), hangs
    looks = candidates(client, listed)
    looks.look()
    looks.start()
    try:
        listed.urls = (A, SLOW)
        wait_for(begun.is_set)
        listed.urls = (B, SLOW)
        wait_for(lambda: looks.leaving() and looks._checked)
        change = looks.change()
        assert (change.leaving, change.joining) == ((A,), {B: "sglang"})
        client.base_urls = (B,)
        looks.end_change()
        goes_on.set()
        wait_for(lambda: looks._checked)
        assert looks.change().joining == {SLOW: "sglang"}
    finally:
        goes_on.set()
        looks.close()


def test_start_when_the_check_of_one_hangs_then_the_others_begin_and_it_joins_once_it_is_like_them(
    hangs, monkeypatch
):
    monkeypatch.setattr(membership, "OTHERS_S", 0.2)
    client, (_, goes_on), asked = Client([]), hangs, []
    check = membership.check_joining

    def asking(client, options, *, found, **how):
        asked.append((client.base_urls, found))
        return check(client, options, found=found, **how)

    monkeypatch.setattr(membership, "check_joining", asking)
    looks = candidates(client, Listed(A, SLOW))
    first = looks.first()
    assert first == {A: "sglang"}
    client.base_urls, looks.found = (A,), "what the first servers are"
    looks.start()
    try:
        goes_on.set()
        wait_for(lambda: looks._checked)
        assert looks.change().joining == {SLOW: "sglang"} and first == {A: "sglang"}
        assert asked[-1] == ((SLOW,), looks.found)
    finally:
        looks.close()


def test_start_when_all_checks_end_then_all_begin():
    looks = candidates(Client([]), Listed(A, B))
    looks._check = lambda url: time.sleep(0.05 if url == A else 0.3) or looks._checked.update({url: "sglang"})
    assert looks.first() == {A: "sglang", B: "sglang"}


def test_check_when_it_fails_in_a_way_that_no_server_explains_then_the_run_learns_of_it(hangs, monkeypatch):
    def fails(*args, **how):
        raise KeyError("ours")

    monkeypatch.setattr(membership, "check_joining", fails)
    looks = candidates(Client([]), Listed(A))
    looks.start()
    try:
        wait_for(looks.asks)
        with pytest.raises(KeyError, match="ours"):
            looks.change()
    finally:
        looks.close()


def test_server_when_its_restart_was_seen_as_it_was_let_go_then_it_does_not_leave_again():
    client = Client([A])
    client.left_out, looks = [A], candidates(client, Listed(A))
    looks.look()

    class Control:
        def reported_versions(self, *, timeout_s):
            looks._lost[A] = "v-2"  # of the look before
            assert looks.change().lost == (A,)
            client.left_out = []  # it is let go, and has joined anew by the time that the answer comes
            return ("default",)

    client.control = lambda urls: Control()
    looks._look_for_restarted()
    assert looks.change().lost == ()

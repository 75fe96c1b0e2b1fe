"""How long a request of a push may take, and which servers are stuck by it."""

import math
import pickle

import pytest

from megatron_rl_corr.engines import push_bounds
from megatron_rl_corr.engines.errors import PushTooLong, RolloutServerError
from megatron_rl_corr.engines.push_bounds import PushBounds

A = "http://a:1"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(push_bounds, "time", clock)
    return clock


@pytest.fixture
def bounds(clock):
    """Of a push of 100 s that begins at 1000."""
    made = PushBounds()
    made.begin(100.0)
    return made


def limit_of(bounds, own_s=600.0):
    with bounds.bounding(A, "/x", own_s) as limit_s:
        return limit_s


def timed_out(bounds, own_s=600.0, *, timed_out=True):
    with bounds.bounding(A, "/x", own_s):
        raise RolloutServerError(A, "/x", None, "timed out", timed_out=timed_out)


# Half of 100 s is over at 50; a tenth of it, 10 s, is what each request has; at 100 all is over.
@pytest.mark.parametrize(
    ("at", "own_s", "limit_s"),
    [(0, 600, 50), (20, 600, 30), (45, 600, 10), (60, 600, 10), (95, 600, 5), (20, 3, 3), (95, 3, 3)],
)
def test_limit_of_a_request_then_what_is_left_of_half_a_tenth_of_all_or_its_own(
    bounds, clock, at, own_s, limit_s
):
    clock.now += at
    assert limit_of(bounds, own_s) == limit_s


def test_limit_in_a_later_attempt_then_half_of_what_is_left(bounds, clock):
    clock.now += 40
    bounds.begin_attempt()  # 60 s are left
    assert limit_of(bounds) == 30
    clock.now += 55
    bounds.begin_attempt()  # 5 s
    assert limit_of(bounds) == 5


def test_request_when_no_time_is_left_then_the_push_took_too_long_by_name(bounds, clock):
    clock.now += 100
    assert bounds.is_over
    with pytest.raises(PushTooLong, match="http://a:1: the push was not over within `push_timeout_s` 100 s"):
        limit_of(bounds)
    assert not bounds.stuck


@pytest.mark.parametrize(
    ("at", "own_s", "is_stuck"),
    [
        (0, 600, True),  # it had 50 s
        (60, 600, True),  # it had a tenth of all
        (95, 600, False),  # it had 5 s
        (95, 3, True),  # as much as it may ever take
    ],
)
def test_request_when_it_times_out_then_the_server_is_stuck_if_it_had_its_share(
    bounds, clock, at, own_s, is_stuck
):
    clock.now += at
    with pytest.raises(RolloutServerError if is_stuck else PushTooLong):
        timed_out(bounds, own_s)
    assert bounds.stuck == ({A} if is_stuck else set())


def test_request_when_its_connection_breaks_then_the_server_is_not_stuck(bounds):
    with pytest.raises(RolloutServerError):
        timed_out(bounds, timed_out=False)
    assert not bounds.stuck


def test_bounds_then_open_between_begin_and_close_alone_and_the_next_push_blames_none(bounds):
    with pytest.raises(RolloutServerError):
        timed_out(bounds)
    assert bounds.is_open
    bounds.close()
    assert not bounds.is_open and not bounds.is_over and limit_of(bounds) == 600
    bounds.begin(7.0)
    assert bounds.is_open and not bounds.stuck and limit_of(bounds) == 3.5


def test_bounds_before_any_push_then_nothing_is_bounded():
    made = PushBounds()
    assert not made.is_open and not made.is_over and made.end == math.inf


def test_errors_when_pickled_then_the_same():
    late = pickle.loads(pickle.dumps(PushTooLong(A, "/x", 5.0)))
    silent = pickle.loads(pickle.dumps(RolloutServerError(A, "/x", None, "timed out", timed_out=True)))
    assert (late.url, late.endpoint, late.limit_s) == (A, "/x", 5.0) and str(late) == str(
        PushTooLong(A, "/x", 5.0)
    )
    assert silent.timed_out

"""Slots of servers: who gets the next one, who waits, and what an outage and a return change."""

import asyncio
import gc
import random
import sys
import weakref

import pytest

from megatron_rl_corr.engines.errors import RolloutOutage, RolloutServerError
from megatron_rl_corr.rollout import server_pool
from megatron_rl_corr.rollout.server_pool import ServerPool
from tests.virtual_time import run

URLS = ["http://a:1", "http://b:1"]


def pool_of(urls=URLS, *, most=8, per_server=None, outage_s=0.05):
    return ServerPool(urls, max_outstanding=most, max_per_server=per_server, outage_timeout_s=outage_s)


def dead(server):
    return RolloutServerError(server.url, "/generate", None, "connection refused")


async def is_waiting(task):
    await asyncio.sleep(0.01)
    return not task.done()


class Sent:
    """What a request has sent, as a bucket of weights."""


def failed_to_send(sent):
    """The error of a request that had it, raised from another one as a transport does."""
    try:
        raise OSError("connection reset")
    except OSError:
        raise RolloutServerError(URLS[0], "/update", None, "connection reset") from None


@pytest.mark.parametrize("how", ["left out", "abandoned"])
def test_error_when_a_server_keeps_it_then_its_words_and_nothing_of_what_was_sent(how):
    async def scenario():
        [a, _] = (pool := pool_of()).servers
        sent = Sent()
        lives = weakref.ref(sent)
        try:
            failed_to_send(sent)
        except RolloutServerError as error:
            pool.leave_out(a, error) if how == "left out" else a.abandon(error)
            words = str(error)
        del sent
        assert lives() is None
        assert str(a.cause if how == "left out" else a.silence) == words

    gc.collect()
    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


def test_take_when_servers_are_unequal_then_the_one_with_fewer_outstanding_and_at_a_tie_the_less_asked():
    async def scenario():
        pool = pool_of()
        a, b = pool.servers
        assert [await pool.take() for _ in range(4)] == [a, b, a, b]
        pool.give_back(b)
        pool.give_back(b)
        # 2 and 0 in flight: two for b; then a tie of 2, and b was asked 4 times, a twice.
        assert [await pool.take() for _ in range(3)] == [b, b, a]

    run(scenario())


def test_take_when_a_server_is_to_be_avoided_then_only_if_another_has_a_slot():
    async def scenario():
        pool = pool_of(per_server=2)
        a, b = pool.servers
        assert [await pool.take(avoid={a.url}) for _ in range(3)] == [b, b, a]

    run(scenario())


def test_take_when_a_server_is_preferred_then_unless_it_is_crowded_full_or_left_out():
    async def scenario():
        pool = pool_of(most=40, per_server=12)
        a, b = pool.servers
        # up to 2 * (0 + 4) at its side, and one
        assert [await pool.take(prefer=b.url) for _ in range(9)] == [b] * 9
        assert await pool.take(prefer=b.url) is a
        assert await pool.take(prefer=b.url) is b  # 9 of 2 * (1 + 4)
        for _ in range(11):
            await pool.take(prefer=a.url)
        assert (a.outstanding, b.outstanding) == (12, 10)
        assert await pool.take(prefer=a.url) is b  # a has no slot
        pool.give_back(b)
        pool.leave_out(b, dead(b))
        pool.give_back(a)
        assert await pool.take(prefer=b.url) is a
        pool.rejoin(b)
        assert await pool.take(prefer="http://gone:1") is b

    run(scenario())


@pytest.mark.parametrize("bounds", [{"most": 2}, {"per_server": 1}])
def test_take_when_every_slot_is_taken_then_waits_in_line_for_one_that_is_given_back(bounds):
    async def scenario():
        pool = pool_of(**bounds)
        a, b = await pool.take(), await pool.take()
        first, second = asyncio.create_task(pool.take()), asyncio.create_task(pool.take())
        assert await is_waiting(first) and await is_waiting(second)
        pool.give_back(b)
        assert await first is b and await is_waiting(second)
        pool.give_back(a)
        assert await second is a
        assert (a.outstanding, b.outstanding) == (1, 1)

    run(scenario())


def test_take_when_the_one_who_was_woken_is_cancelled_then_the_slot_goes_to_the_next():
    async def scenario():
        pool = pool_of(URLS[:1], most=1)
        server = await pool.take()
        first, second = asyncio.create_task(pool.take()), asyncio.create_task(pool.take())
        assert await is_waiting(first)
        pool.give_back(server)
        first.cancel()
        assert await asyncio.wait_for(second, 1) is server

    run(scenario())


def test_take_when_a_server_is_left_out_then_the_others_only_until_it_rejoins():
    async def scenario():
        pool = pool_of()
        a, b = pool.servers
        pool.leave_out(a, dead(a))
        assert pool.left_out == [a] and [await pool.take() for _ in range(2)] == [b, b]
        pool.rejoin(a)
        assert pool.left_out == [] and a.joined == 1 and await pool.take() is a

    run(scenario())


def test_take_when_no_server_is_left_then_waits_for_the_outage_timeout_and_says_why_for_each():
    async def scenario():
        pool = pool_of()
        for server in pool.servers:
            pool.leave_out(server, dead(server))
        pool.servers[1].refused = RolloutServerError(URLS[1], "/health", 503, "starting")
        for _ in range(2):  # the second does not wait any more
            with pytest.raises(RolloutOutage) as error:
                await asyncio.wait_for(pool.take(), 2)
        said = str(error.value)
        assert said.startswith(
            "none of 2 rollout servers is left to sample from: rollout server http://a:1 did not"
        )
        assert "http://b:1 did not answer POST /generate: connection refused" in said
        assert said.endswith("; asked again: starting")
        pool.rejoin(pool.servers[1])
        assert await pool.take() is pool.servers[1]

    run(scenario())


def test_take_when_a_server_rejoins_within_the_outage_timeout_then_nobody_hears_of_it():
    async def scenario():
        pool = pool_of()
        for server in pool.servers:
            pool.leave_out(server, dead(server))
        waiting = asyncio.create_task(pool.take())
        assert await is_waiting(waiting)
        pool.rejoin(pool.servers[0])
        assert await waiting is pool.servers[0]
        await asyncio.sleep(0.1)  # past the timeout of the outage that was
        assert await pool.take() is pool.servers[0]

    run(scenario())


def test_hold_when_no_server_is_left_then_no_outage_before_its_time_has_passed_anew():
    async def scenario():
        pool = pool_of(URLS[:1])
        pool.leave_out(pool.servers[0], dead(pool.servers[0]))
        pool.hold()
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(0.15)
        assert not waiting.done()
        pool.release()
        with pytest.raises(RolloutOutage):
            await asyncio.wait_for(waiting, timeout=20)

    run(scenario())


def test_pool_when_a_server_joins_then_asked_as_often_as_the_others():
    async def scenario():
        pool = pool_of(most=8)
        a, b = pool.servers
        for _ in range(3):
            pool.give_back(await pool.take())
        pool.add(["http://c:1"])
        c = pool.servers[2]
        # asked 2 and 1 times; the new one as often as the one that was asked least
        assert [server.asked for server in (a, b, c)] == [2, 1, 1]
        assert [await pool.take() for _ in range(4)] == [b, c, a, b]

    run(scenario())


def test_pool_when_a_server_is_removed_then_no_more_requests_and_its_own_end():
    async def scenario():
        pool = pool_of(most=2)
        a, b = await pool.take(), await pool.take()
        assert pool.remove({a.url}) == [a] and pool.servers == [b] and a.removed
        waiting = asyncio.create_task(pool.take())
        assert await is_waiting(waiting)  # its request still counts among all
        pool.leave_out(a, dead(a))  # it fails: nobody is left out for it
        pool.give_back(a)
        assert await waiting is b and pool.left_out == []
        assert (a.outstanding, b.outstanding, pool.outstanding) == (0, 2, 2)

    run(scenario())


def test_pool_when_it_has_no_server_then_waits_for_one_or_for_the_outage():
    async def scenario():
        pool = pool_of(outage_s=5.0)
        pool.remove(set(URLS))
        waiting = asyncio.create_task(pool.take())
        await asyncio.sleep(4.0)
        assert not waiting.done()
        pool.add(["http://c:1"])
        assert (await waiting).url == "http://c:1"
        pool.remove({"http://c:1"})
        began = asyncio.get_running_loop().time()
        with pytest.raises(RolloutOutage, match="no rollout server to sample from for too long"):
            await pool.take()
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0)

    run(scenario())


def test_pool_when_begun_without_servers_then_waits_for_the_first():
    async def scenario():
        pool = pool_of([], outage_s=5.0)
        waiting = asyncio.create_task(pool.take())
        assert await is_waiting(waiting)
        pool.add(URLS)
        assert (await waiting).url in URLS

    run(scenario())


async def in_flight_at(speeds, most, count=1500):
    """Mean of requests in flight at each server, over the later half of `count` requests of 50 to 150 tokens.

    speeds: tokens a second of one request at each.
    """
    loop, flying, lengths, seen = asyncio.get_running_loop(), set(), random.Random(0), []
    pool = pool_of(most=most)

    async def ask(server, tokens):
        began = loop.time()
        await asyncio.sleep(tokens / speeds[server.place])
        server.answers += 1
        pool.note_speed(server, tokens, loop.time() - began)
        pool.give_back(server)

    for _ in range(count):
        task = asyncio.create_task(ask(await pool.take(), lengths.randint(50, 150)))
        flying.add(task)
        task.add_done_callback(flying.discard)
        seen.append([server.outstanding for server in pool.servers])
    await asyncio.gather(*flying)
    return [sum(column) / len(column) for column in zip(*seen[count // 2 :], strict=True)]


def test_slots_when_a_server_is_slow_then_it_gets_fewer():
    # of 24 in flight n are at the slow one, which has a third of the speed: 3 (n + 1) = 24 - n + 1, n = 5.5
    slow, fast = run(in_flight_at([10.0, 30.0], 24))
    assert slow == pytest.approx(5.5, abs=1.0) and slow + fast == pytest.approx(24, abs=0.5)


@pytest.mark.parametrize("other", [28.0, 25.0])
def test_slots_when_speeds_are_nearly_equal_then_as_many(other):
    slow, fast = run(in_flight_at([other, 30.0], 24))
    assert slow == pytest.approx(fast, abs=0.5)


def test_slots_when_a_server_hardly_moves_then_it_keeps_an_eighth_of_a_share():
    # 8 (n + 1) = 90 - n + 1, n = 9.2; a share of 1/30 would leave it 2
    slow, _ = run(in_flight_at([1.0, 30.0], 90, 4000))
    assert slow == pytest.approx(9.2, abs=2.0)


def test_wanted_when_requests_wait_then_servers_that_they_would_keep_busy():
    async def scenario():
        pool = pool_of(most=5, per_server=2)
        assert pool.servers_wanted == 0
        waiting = [asyncio.create_task(pool.take()) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert pool.servers_wanted == 2  # 4 in flight at 2 each
        waiting += [asyncio.create_task(pool.take()) for _ in range(6)]
        await asyncio.sleep(0.01)
        assert pool.waiting == 6 and pool.servers_wanted == 3  # of 10 at most 5 may be in flight
        for task in waiting:
            task.cancel()

    run(scenario())


def test_slots_when_a_server_was_slow_for_a_while_then_it_is_asked_again():
    # with 4 in flight a share of 1/5 is none: its first request is as much as 5 at the other
    async def scenario():
        loop, flying, asked = asyncio.get_running_loop(), set(), []
        pool = pool_of(most=4)
        first = pool.servers[0]

        async def ask(server):
            began = loop.time()
            await asyncio.sleep(100 / (6.0 if server is first and began < 200 else 30.0))
            server.answers += 1
            pool.note_speed(server, 100, loop.time() - began)
            pool.give_back(server)

        for _ in range(3000):
            server = await pool.take()
            asked.append((loop.time(), server is first))
            task = asyncio.create_task(ask(server))
            flying.add(task)
            task.add_done_callback(flying.discard)
        await asyncio.gather(*flying)
        return asked

    asked = run(scenario())
    slow = [its for at, its in asked if 100 < at < 200]
    later = [its for at, its in asked if at > 400]
    assert 1 <= sum(slow) <= 3  # one in a minute
    assert sum(later) == pytest.approx(len(later) / 2, rel=0.05)


def test_idle_time_when_read_by_another_thread_at_any_line_then_it_never_goes_back():
    # a counter that goes back is a restart to whoever reads it
    async def scenario():
        read, clock, others = [], [0.0], sys.gettrace()

        def note(frame, event, argument):
            if frame.f_code in (ServerPool.take.__code__, ServerPool.give_back.__code__):
                read.append(pool.idle_s)
            return note

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(server_pool.time, "monotonic", lambda: clock[0])
            pool = pool_of()
            try:
                for _ in range(3):
                    clock[0] += 5
                    sys.settrace(note)
                    server = await pool.take()
                    sys.settrace(others)
                    clock[0] += 100
                    sys.settrace(note)
                    pool.give_back(server)
                    sys.settrace(others)
            finally:
                sys.settrace(others)
        assert len(read) > 20 and read == sorted(read) and read[-1] == 15

    run(scenario())


def test_abandon_when_a_request_has_reached_its_own_limit_and_does_not_know_yet_then_the_others_end_too():
    """A scope that has expired refuses a new time, until its task has had its turn."""

    async def ended(scopes, name, limit_s):
        try:
            async with asyncio.timeout(limit_s) as scope:
                scopes[scope] = 0.0
                await asyncio.sleep(60)
        except TimeoutError:
            return name

    async def scenario():
        server = server_pool.Server("http://a:1")
        late = asyncio.create_task(ended(server.scopes, "late", 0.01))
        other = asyncio.create_task(ended(server.scopes, "other", None))
        while not any(scope.expired() for scope in server.scopes):
            await asyncio.sleep(0)
        assert not late.done()
        server.abandon(RolloutServerError("http://a:1", "/generate", None, "it went"))
        return await asyncio.gather(late, other)

    assert asyncio.run(scenario()) == ["late", "other"]


@pytest.mark.parametrize("sent_in_the_pause", [False, True])
def test_limit_of_a_request_when_weights_are_sent_meanwhile_then_that_time_does_not_count(sent_in_the_pause):
    async def answered(server, pool, limit_s, *, after_s):
        """As a request does that is answered after so long."""
        try:
            async with asyncio.timeout(limit_s) as scope:
                server.scopes[scope] = 0.0
                if pool.held:
                    server.stop_timeouts()
                try:
                    await asyncio.sleep(after_s)
                finally:
                    del server.scopes[scope]
                return "answered"
        except TimeoutError:
            return round(asyncio.get_running_loop().time(), 3)

    async def scenario():
        pool = pool_of(["http://a:1"])
        [server] = pool.servers
        if sent_in_the_pause:
            pool.hold()
        early = asyncio.create_task(answered(server, pool, 10.0, after_s=1e6))
        well = asyncio.create_task(answered(server, pool, 10.0, after_s=7204.0))
        await asyncio.sleep(4.0)
        pool.hold()
        pool.hold()  # harmless twice
        await asyncio.sleep(7200.0)
        pool.release()
        pool.release()
        return await asyncio.gather(early, well)

    # 4 s before the pause of 7200 s and 6 behind it; or all 10 behind it
    assert run(scenario()) == [7214.0 if sent_in_the_pause else 7210.0, "answered"]


def test_abandon_when_weights_are_sent_meanwhile_then_the_request_ends_at_once():
    async def scenario():
        pool = pool_of(["http://a:1"])
        [server] = pool.servers

        async def asked():
            async with asyncio.timeout(10.0) as scope:
                server.scopes[scope] = 0.0
                await asyncio.sleep(1e6)

        request = asyncio.create_task(asked())
        await asyncio.sleep(1.0)
        pool.hold()
        server.abandon(RolloutServerError("http://a:1", "/generate", None, "it went"))
        pool.release()  # gives it no time again
        with pytest.raises(TimeoutError):
            await request
        return asyncio.get_running_loop().time()

    assert run(scenario()) == pytest.approx(1.0, abs=1e-3)

"""Which servers a weight update goes to: who answers, who was started anew, when the broadcast
group is made anew.
"""

import asyncio
import concurrent.futures
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.push_bounds import PushBounds
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync import servers as servers_file
from megatron_rl_corr.weight_sync import updatable
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from megatron_rl_corr.weight_sync.servers import (
    ABSENT,
    LEAVING,
    LEFT,
    LOST,
    READY,
    RESTARTED,
    Changing,
    WeightServers,
)
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Recorder:
    """Stands for a client and for the control of some of its servers: notes who is asked what."""

    engine_of, keyed_cache, info = (
        staticmethod(lambda url: load_engine("sglang")),
        False,
        {"disable_radix_cache": True},
    )

    def __init__(self, urls, versions, asked):
        self.base_urls, self.versions, self.asked = tuple(urls), versions, asked
        self.expected, self.release, self.left_out = None, "0.5.23", []

    def control(self, urls):
        part = Recorder(urls, self.versions, self.asked)
        part.release = self.release
        return part

    async def reported_versions(self):
        return [self.versions[url] for url in self.base_urls]

    versions_for_update = reported_versions

    async def expect_pause(self):
        self.expected = "a pause"

    async def expect_version(self, version, *, restarted=(), missed=()):
        self.expected, self.restarted, self.missed = version, sorted(restarted), sorted(missed)

    async def server_info(self):
        return [{"version": self.release} | self.info for _ in self.base_urls]

    async def pause_generation(self, mode):
        self.asked.append(mode)

    async def reopen_weight_update(self, tensors, **options):
        self.asked.append("begin")

    async def update_weight_version(self, version):
        self.asked.append(version)

    async def leave_weights_update_group(self, name, *, timeout_s):
        self.asked += [(name, (url,)) for url in self.base_urls]
        gone = RolloutServerError(self.base_urls[0], "/destroy_weights_update_group", 400, "no such group")
        return [gone for url in self.base_urls if self.versions[url] == "default"]


@pytest.fixture
def client():
    return Recorder([A, B, C], {A: "1", B: "1", C: "1"}, [])


class Group:
    """Stands for a group of some servers."""

    def __init__(self, name, client, *urls):
        self.name, self.urls = name, urls
        self.leave = lambda: client.asked.append((name, "trainer"))


def submitted(coroutine):
    """A question that is answered at once."""
    future = concurrent.futures.Future()
    future.set_result(asyncio.run(coroutine))
    return future


def made(client, **options):
    loop = SimpleNamespace(call=asyncio.run, submit=submitted)
    return WeightServers(client, loop, DistributedTransport(client.control, loop, backend="gloo"), **options)


@pytest.fixture
def servers(client):
    """After an update to version 1 that made a group of each."""
    return updated(client)


def updated(client, **options):
    servers = made(client, **options)
    servers.use(servers.find())
    servers.transport._groups = [Group(name, client, url) for name, url in zip("abc", (A, B, C), strict=True)]
    servers.expect("1")
    return servers


def test_find_when_one_is_gone_and_one_restarted_then_each_has_its_state(client, servers):
    client.versions |= {B: None, C: "default"}
    assert servers.find() == [READY, ABSENT, RESTARTED]
    assert client.expected == "1"


def test_find_when_a_server_is_gone_for_a_moment_then_it_is_asked_again(client, servers, monkeypatch):
    monkeypatch.setattr(updatable, "PAUSE_S", 0.01)
    answers = [RolloutServerError(A, "/model_info", 502, "a proxy"), [None, "1", "1"], ["1", "1", "1"]]

    async def reported():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client.versions_for_update = reported
    assert servers.find() == [READY] * 3 and not answers


def test_find_when_a_server_is_gone_for_good_then_that_is_told_once_an_update_and_no_later_one_waits(
    client, servers, monkeypatch
):
    monkeypatch.setattr(updatable, "PATIENCE_S", 0.02)
    told = []
    monkeypatch.setattr(EVENTS, "tell", lambda kind, *why, **facts: told.append((kind, facts["server"])))
    client.versions[B] = None
    for _ in range(2):  # a push and its repetition
        servers.use(servers.find())
    assert told == [("server_missed_update", B)]
    servers.expect("1")
    monkeypatch.setattr(updatable, "PATIENCE_S", 3600.0)
    servers.find()
    assert told == [("server_missed_update", B)] * 2


@pytest.mark.parametrize(("samples", "missed"), [(True, [B]), (False, [])])
def test_expect_when_a_server_missed_the_update_then_only_a_rank_that_samples_leaves_it_out(
    client, samples, missed
):
    # One that is left out is probed and told of until it is back, which N ranks need not do.
    servers = WeightServers(client, SimpleNamespace(call=asyncio.run), WeightTransport(), samples=samples)
    client.versions[B] = None
    servers.use(servers.find())
    servers.expect("1")
    assert (client.expected, client.missed) == ("1", missed)


def test_find_before_the_first_update_then_every_version_will_do(client):
    client.versions |= {A: "default", B: "x"}
    assert made(client).find() == [READY] * 3


def test_find_when_a_trainer_was_killed_in_a_push_then_the_server_is_named(client, caplog):
    client.versions[B] = "unfinished 7"
    assert made(client).find() == [READY] * 3
    assert (
        f"SGLang server {B} has weights 'unfinished 7': a trainer was killed while it sent them"
        in caplog.text
    )


class Paused(Recorder):
    """Servers that are healthy once they have been told to go on."""

    def control(self, urls):
        return Paused(urls, self.versions, self.asked)

    async def continue_generation(self):
        self.asked.append(("continue", *self.base_urls))

    async def wait_healthy(self, timeout_s):
        self.asked.append(("wait", *self.base_urls))
        if {("continue", url) for url in self.base_urls if self.versions[url] is not None} - set(self.asked):
            await asyncio.sleep(timeout_s)
            raise RolloutServerError(self.base_urls[0], "/health", 503, "it is paused")


def test_wait_when_servers_were_left_paused_then_those_of_usual_names_are_told_to_go_on_first():
    """Unfinished: the first push resumes it. Named as usual: its trainer was killed before it
    began, or at the end.
    """
    asked = []
    versions = {A: "unfinished 7", B: "7", C: None}
    asyncio.run(updatable.wait_updatable(Paused([A, B, C], versions, asked), 5.0))
    assert asked == [("continue", B), ("wait", B, C)]


def test_begin_when_an_update_is_refused_then_the_weights_are_called_as_before(client):
    class Refusing(Recorder):
        def control(self, urls):
            return Refusing(urls, self.versions, self.asked)

        async def reopen_weight_update(self, tensors, **options):
            raise RolloutServerError(A, "/begin_weight_update", 400, "x has another shape")

        async def update_weight_version(self, version):
            self.asked.append((version, *self.base_urls))

    client = Refusing([A, B], {A: "1", B: "unfinished 3"}, [])
    servers = WeightServers(client, SimpleNamespace(call=asyncio.run), WeightTransport())
    servers.use(servers.find())
    servers.start("7")
    with pytest.raises(RolloutServerError, match="another shape"):
        servers.begin()
    assert client.asked == ["retract", ("unfinished 7", A, B), ("1", A), ("unfinished 3", B)]


def groups(servers):
    return [group.name for group in servers.transport._groups]


def test_use_when_nothing_changed_then_the_groups_stay(client, servers):
    servers.use([READY, READY, READY])
    assert groups(servers) == ["a", "b", "c"] and client.asked == []
    assert client.expected == "a pause"


@pytest.mark.parametrize(
    "states, updated, kept",
    [
        ([READY, ABSENT, READY], (A, C), ["a", "c"]),
        ([READY, RESTARTED, READY], (A, B, C), ["a", "c"]),
        ([ABSENT, RESTARTED, READY], (B, C), ["c"]),
    ],
)
def test_use_when_a_server_left_or_was_restarted_then_its_group_alone_is_left(
    client, servers, states, updated, kept
):
    servers.use(states)
    assert servers.urls == updated and groups(servers) == kept
    # they do not answer, or know none
    assert client.asked == [(name, "trainer") for name in "abc" if name not in kept]
    servers.expect("2")
    anew = {url for url, state in zip((A, B, C), states, strict=True) if state == RESTARTED}
    assert client.missed == sorted({A, B, C} - set(updated))
    assert client.restarted == sorted(anew)  # it may have been started with other flags
    servers.use([READY] * 3)
    servers.expect("3")
    assert client.missed == client.restarted == []


def test_use_after_a_failed_bucket_then_a_server_that_is_well_leaves_the_group_that_failed(client, servers):
    servers.transport._failed = [servers.transport._groups.pop(1)]
    servers.use([READY] * 3)
    assert client.asked == [("b", (B,))] and servers.transport._failed == []


@pytest.mark.parametrize(
    "states, asked", [([READY, ABSENT, READY], (A, C)), ([READY, READY, RESTARTED], (A, B))]
)
def test_use_when_servers_share_a_group_and_one_left_or_came_then_those_that_have_it_leave_it(
    client, servers, states, asked
):
    servers.transport._share, servers.transport._groups = True, [Group("g", client, A, B, C)]
    servers.use(states)
    assert groups(servers) == [] and client.asked == [*(("g", (url,)) for url in asked), ("g", "trainer")]


def test_close_when_a_server_has_lost_its_group_then_the_others_are_asked_all_the_same(client, servers):
    client.versions[A] = "default"
    servers.close()
    assert client.asked == [
        ("a", (A,)),
        ("a", "trainer"),
        ("b", (B,)),
        ("b", "trainer"),
        ("c", (C,)),
        ("c", "trainer"),
    ]


def test_close_when_a_broadcast_was_broken_off_then_nobody_is_asked_and_the_trainer_keeps_its_half(
    client, servers
):
    servers.transport.broken = True
    servers.close()
    assert client.asked == []


def test_begin_in_place_when_a_server_has_no_such_argument_then_it_counts_as_not_set(client):
    loop = SimpleNamespace(call=asyncio.run)
    servers = WeightServers(client, loop, WeightTransport(), pause_mode="in_place")
    with pytest.raises(
        RolloutProtocolError, match="needs a server started with --disable-overlap-schedule; start"
    ):
        servers.begin()


@pytest.mark.parametrize(
    "keyed, info, missing",
    [
        (False, {}, "--disable-overlap-schedule --disable-radix-cache;"),
        (True, {}, "with --disable-overlap-schedule;"),
        (False, {"disable_overlap_schedule": True}, "with --disable-radix-cache;"),
        # What is behind the radix cache may know a prefix by its tokens alone.
        (
            True,
            {"disable_overlap_schedule": True, "enable_hierarchical_cache": True},
            "with --disable-radix-cache;",
        ),
    ],
)
def test_begin_in_place_when_a_cache_would_outlive_its_weights_then_refused(
    client, monkeypatch, keyed, info, missing
):
    client.keyed_cache = keyed
    monkeypatch.setattr(Recorder, "info", info)
    servers = WeightServers(
        client, SimpleNamespace(call=asyncio.run), WeightTransport(), pause_mode="in_place"
    )
    servers.use([READY] * 3)
    with pytest.raises(RolloutProtocolError, match=missing):
        servers.begin()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_free_cached_when_on_a_gpu_then_closed_handles_first_and_else_nothing(monkeypatch, on_gpu):
    called = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: called.append("closed handles"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("cached blocks"))
    ColocatedServers.free_cached()
    assert called == (["closed handles", "cached blocks"] if on_gpu else [])


STORES = {
    "hicache_storage_backend": ("file", "--hicache-storage-backend file"),
    "enable_lmcache": (True, "--enable-lmcache"),
    "enable_flexkv": (True, "--enable-flexkv"),
    "enable_unified_cache_external_linker": (True, "--enable-unified-cache-external-linker"),
    "radix_cache_backend": ("flexkv", "--radix-cache-backend flexkv"),
}
"""Read from the wheel of 0.5.23: what /flush_cache removes nothing from."""


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
@pytest.mark.parametrize("name", STORES)
def test_begin_when_keys_outside_the_server_would_outlive_their_weights_then_refused_in_every_mode(
    client, monkeypatch, name, mode
):
    client.keyed_cache, (value, flag) = True, STORES[name]
    monkeypatch.setattr(
        Recorder, "info", {"disable_overlap_schedule": True, "enable_hierarchical_cache": False}
    )
    servers = WeightServers(client, SimpleNamespace(call=asyncio.run), WeightTransport(), pause_mode=mode)
    servers._check_pause()  # that server would be paused
    monkeypatch.setattr(Recorder, "info", Recorder.info | {name: value})
    with pytest.raises(
        RolloutProtocolError, match=f"{A} .*outside its own memory \\({flag}\\).*start it without"
    ):
        servers.begin()
    assert client.asked == []


def test_begin_when_the_second_cache_is_the_hosts_memory_then_accepted_as_a_flush_clears_it(
    client, monkeypatch
):
    monkeypatch.setattr(
        Recorder, "info", {"enable_hierarchical_cache": True, "hicache_storage_backend": None}
    )
    WeightServers(client, SimpleNamespace(call=asyncio.run), WeightTransport())._check_pause()


@pytest.mark.parametrize("release", ["0.5.19", "0.5.20", "0.5.20.post1"])
def test_begin_when_a_server_cannot_flush_under_retracted_requests_then_refused_before_it_is_stopped(
    client, release
):
    """Read from the wheels: flush_cache asks is_fully_idle() until 0.5.20, which counts
    requests that wait.
    """
    client.release, loop = release, SimpleNamespace(call=asyncio.run)
    servers = WeightServers(client, loop, WeightTransport(), samples_ahead=True)
    with pytest.raises(
        RolloutProtocolError, match=f"SGLang {release} can't drop .* SGLang 0.5.21 or newer, or use"
    ):
        servers.begin()
    assert client.asked == []


@pytest.mark.parametrize(
    ("release", "options"),
    [
        ("0.5.21", {"samples_ahead": True}),
        ("0.5.19", {}),
        ("main", {"samples_ahead": True}),
        ("0.5.19", {"samples_ahead": True, "pause_mode": "abort"}),
    ],
)
def test_begin_when_no_request_waits_at_a_flush_or_the_server_can_then_it_is_stopped(
    client, release, options
):
    client.release, loop = release, SimpleNamespace(call=asyncio.run)
    servers = WeightServers(client, loop, WeightTransport(), **options)
    servers.start("7")
    servers.begin()
    assert client.asked == [options.get("pause_mode", "retract"), "unfinished 7", "begin"]


def test_name_when_memory_is_changing_then_that_is_known_and_the_version_too():
    name = updatable.changing("7")
    assert updatable.is_changing(name) and not updatable.is_changing("7")
    assert updatable.weights_of(name) == updatable.weights_of(updatable.released("7")) == "7"


class Changed(Recorder):
    """A client whose servers come and go."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.retired = []

    async def retire(self, urls, drain_s, why):
        self.retired.append((sorted(urls), drain_s, why))
        self.base_urls = tuple(url for url in self.base_urls if url not in urls)


@pytest.fixture
def changing(monkeypatch):
    """(client, its servers after an update to version 1, addresses that are to leave)"""
    monkeypatch.setattr("megatron_rl_corr.weight_sync.servers.dist.get_rank", lambda: 0)
    monkeypatch.setattr(updatable, "PATIENCE_S", 0.01)
    leaving = []
    client = Changed([A, B, C], {A: "1", B: "1", C: "1"}, [])
    return client, updated(client, changing=Changing(30.0, lambda: leaving)), leaving


def test_use_when_servers_change_then_those_without_the_last_weights_and_unlisted_ones_leave(changing):
    client, servers, leaving = changing
    leaving.append(A)
    client.versions |= {B: "default"}
    states = servers.find()
    assert states == [LEAVING, RESTARTED, READY]
    servers.use(states)
    # who leaves may end its samples; one that was restarted has none
    assert client.retired == [([A], 30.0, LEFT), ([B], 0.0, LOST)]
    assert client.base_urls == servers.urls == (C,)
    servers.expect("2")
    assert (client.restarted, client.missed) == ([], [])
    assert [name for name, _ in client.asked] == ["a", "b"]  # their groups alone are left


def test_find_when_servers_change_and_none_answers_then_all_leave_and_it_is_no_failure(changing):
    client, servers, _ = changing

    async def reported():
        raise RolloutServerError(A, "/model_info", None, "connection refused")

    client.versions_for_update = reported
    states = servers.find()
    assert states == [ABSENT] * 3
    servers.use(states)
    assert client.base_urls == servers.urls == () and servers.find() == []
    servers.expect("2")
    assert client.expected == "2"


def test_use_when_a_server_left_and_joined_since_then_its_group_is_made_anew(changing):
    client, servers, _ = changing
    servers.note_admitted([B])  # it is at its address again, and knows nothing of the group
    servers.use(servers.find())
    assert [group.name for group in servers.transport._groups] == ["a", "c"]
    assert not servers.same_as_before  # so changes alone are not sent
    servers.use(servers.find())
    assert [group.name for group in servers.transport._groups] == ["a", "c"]


class Holders:
    """Stands for the way to servers, of whose weights' holders those in `hang` do not answer."""

    def __init__(self, hang):
        self.hang, self.asked = hang, []

    async def send(self, url, request, *, timeout_s):
        self.asked.append((url, request.endpoint, timeout_s))
        if url in self.hang:
            raise RolloutServerError(url, request.endpoint, None, "timed out after 30 s", timed_out=True)
        return 200, b"{}"


def pushing(client, servers, hang):
    client.push_bounds, client.push_timeout_s, client.fleet = PushBounds(), 100.0, Holders(hang)
    servers.begin_push()
    return client.fleet


def late(url):
    return RolloutServerError(url, "/update", None, "timed out after 5 s", timed_out=True)


def test_stuck_then_those_whom_this_push_waited_for_by_its_bounds_or_by_the_error_it_failed_with(
    client, servers
):
    pushing(client, servers, [])
    client.push_bounds.stuck.add(C)
    assert servers.stuck(late(A)) == [True, False, True]
    assert servers.stuck(RolloutServerError(A, "/update", None, "it broke")) == [False, False, True]
    assert servers.stuck(OSError("no space")) == [False, False, True]


def test_find_when_a_server_is_stuck_in_a_push_then_absent_until_what_holds_its_weights_answers(
    client, servers, monkeypatch
):
    told = []
    monkeypatch.setattr(EVENTS, "tell", lambda kind, why, **facts: told.append((kind, why, facts["server"])))
    holders = pushing(client, servers, [B])
    servers.leave_out_stuck([False, True, False])
    assert servers.find() == [READY, ABSENT, READY] and not holders.asked
    words = "it answers, but the process that holds its weights does not"
    assert told == [("server_missed_update", words, B)]
    servers.expect("1")
    for _ in range(2):  # later pushes
        servers.begin_push()
        assert servers.find() == [READY, ABSENT, READY]
    assert holders.asked == [(B, "/server_info", 30.0)] * 2
    holders.hang = []
    servers.begin_push()
    assert servers.find() == [READY] * 3
    servers.begin_push()
    assert servers.find() == [READY] * 3 and len(holders.asked) == 3


class SlowHolders(Holders):
    """One whose answers come when the test lets them."""

    def __init__(self):
        super().__init__([])
        self.answers = asyncio.Event()

    async def send(self, url, request, *, timeout_s):
        await self.answers.wait()
        return await super().send(url, request, timeout_s=timeout_s)


@pytest.fixture
def behind_a_thread(client, servers, monkeypatch):
    """(the servers, of which B was stuck in the last push; the slow way to them; what lets it answer)."""
    monkeypatch.setattr(servers_file, "BRIEF_S", 0.01)
    pushing(client, servers, [])
    servers.leave_out_stuck([False, True, False])
    with LoopThread() as loop:
        servers._loop, client.fleet = loop, SlowHolders()
        yield servers, client.fleet, lambda: loop._loop.call_soon_threadsafe(client.fleet.answers.set)


def test_find_when_a_holder_answers_late_then_its_server_is_taken_in_by_the_next_push(behind_a_thread):
    servers, holders, let_answer = behind_a_thread
    for _ in range(2):
        servers.begin_push()
        assert servers.find() == [READY, ABSENT, READY]  # no push waits for it
    [question] = servers._asked_holders.values()  # the second push did not ask again
    let_answer()
    assert question.result(60) is None
    servers.begin_push()
    assert servers.find() == [READY] * 3 and holders.asked == [(B, "/server_info", 30.0)]


def test_find_when_a_question_has_failed_since_then_the_holder_is_asked_anew(behind_a_thread):
    servers, holders, let_answer = behind_a_thread
    holders.hang = [B]
    servers.begin_push()
    assert servers.find() == [READY, ABSENT, READY]
    [question] = servers._asked_holders.values()
    let_answer()
    assert question.result(60) is not None
    holders.hang = []
    servers.begin_push()
    servers.find()
    concurrent.futures.wait(servers._asked_holders.values(), 60)  # where it was slower than a push waits
    servers.begin_push()
    assert servers.find() == [READY] * 3 and len(holders.asked) == 2


def test_find_when_only_servers_with_late_holders_are_left_then_they_are_waited_for(client, behind_a_thread):
    servers, _, let_answer = behind_a_thread
    client.versions |= {A: None, C: None}
    servers.begin_push()
    timer = threading.Timer(0.2, let_answer)  # much later than BRIEF_S
    timer.start()
    assert servers.find() == [ABSENT, READY, ABSENT]
    timer.join()


def test_find_when_every_server_is_stuck_then_the_push_can_not_go_on_and_names_one(client, servers):
    holders = pushing(client, servers, [A, B, C])
    servers.leave_out_stuck([True] * 3)
    with pytest.raises(RolloutServerError, match=f"{A} .*every server was waited for in vain"):
        servers.find()
    servers.begin_push()
    with pytest.raises(RolloutServerError, match=f"{A} .* /server_info: timed out after 30 s"):
        servers.find()
    holders.hang = [A, B]
    assert servers.find() == [ABSENT, ABSENT, READY]


@pytest.mark.parametrize("end", ["abandon", "release", "end_push"])
def test_end_of_a_push_then_what_lets_servers_go_is_bounded_no_more(client, servers, end):
    pushing(client, servers, [])
    bounds, seen = client.push_bounds, []
    assert bounds.is_open and servers.has_time

    async def let_go():
        seen.append(bounds.is_open)

    servers._let_go, servers._stopped = let_go, True
    servers._loop = SimpleNamespace(call=lambda coroutine, timeout: asyncio.run(coroutine))
    getattr(servers, end)()
    assert not bounds.is_open and seen == ([] if end == "end_push" else [False])


class Memory:
    """Stands for `ServerMemory`: notes which servers release theirs."""

    begun, asked = True, ()

    async def release(self, control, names):
        self.asked = (control.base_urls, sorted(names))


def test_release_when_a_server_is_stuck_then_it_is_not_waited_for_but_told(client, monkeypatch):
    told = []
    monkeypatch.setattr(EVENTS, "tell", lambda kind, why, **facts: told.append((kind, facts["server"])))
    loop, memory = SimpleNamespace(call=asyncio.run, submit=submitted), Memory()
    servers = ColocatedServers(client, loop, WeightTransport(), memory=memory)
    holders = pushing(client, servers, [B])
    servers.release_memory()
    assert memory.asked == ((A, B, C), [A, B, C]) and not told
    servers.leave_out_stuck([False, True, False])
    servers.release_memory()
    assert memory.asked == ((A, C), [A, C]) and told == [("memory_not_released", B)]
    servers.begin_push()  # later ones, until the process that holds its weights answers
    servers.release_memory()
    assert memory.asked == ((A, C), [A, C])
    holders.hang = []
    servers.begin_push()
    servers.release_memory()
    assert memory.asked == ((A, B, C), [A, B, C]) and len(told) == 2

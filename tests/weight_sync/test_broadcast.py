"""How many ranks the servers bring into the broadcast group, and what is raised where it can't
be made or used.
"""

import asyncio
import os
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports import broadcast, make_transport, rendezvous
from megatron_rl_corr.weight_sync.transports.base import common_ranks
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport, UpdateGroup
from megatron_rl_corr.weight_sync.transports.rendezvous import gloo_listening_at

ENGINE = load_engine("sglang")


def servers(*urls):
    fleet = Fleet(urls, engine="sglang", timeout_s=1, connect_timeout_s=1)
    return ServerControl(fleet, fleet.urls, update_timeout_s=1)


ONE = {"tp_size": 4, "pp_size": 2, "dp_size": 1, "enable_dp_attention": False}


def test_ranks_of_two_servers_of_tp4_pp2_then_eight_each():
    assert common_ranks(servers("http://a", "http://b"), [ONE, ONE]).count == 8


def test_ranks_when_dp_attention_shares_the_tensor_ranks_then_they_are_not_counted_again():
    assert common_ranks(servers("http://a"), [{**ONE, "dp_size": 4, "enable_dp_attention": True}]).count == 8


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({**ONE, "tp_size": 2}, "http://b .* it has 4 ranks and http://a has 8; give all servers the same"),
        (
            {**ONE, "dp_size": 2},
            "http://b .* it runs --dp-size 2 replicas; start as many servers and name each",
        ),
    ],
)
def test_ranks_when_servers_differ_or_hide_replicas_then_refused_by_name(second, words):
    with pytest.raises(RolloutProtocolError, match=words):
        common_ranks(servers("http://a", "http://b"), [ONE, second])


class Server:
    """Stands for the control of servers: whatever they are asked, they do what `answer` does."""

    engine_of = staticmethod(lambda url: ENGINE)

    def __init__(self, answer, urls=("http://127.0.0.1:9",)):
        self.base_urls, self.answer, self.left = urls, answer, []
        self.forgot = False

    def forget_stuck(self):
        self.forgot = True

    async def leave_weights_update_group(self, name, *, timeout_s):
        self.left.append(name)
        return []

    async def server_info(self):
        return [ONE for _ in self.base_urls]

    async def init_weights_update_group(self, *_, **__):
        await self.answer()

    update_weights_from_distributed = init_weights_update_group


def client_of(answer):
    return SimpleNamespace(
        control=lambda urls: Server(answer, urls), base_urls=(), fleet=SimpleNamespace(timeout_s=1.0)
    )


async def refuses():
    raise RolloutServerError("http://127.0.0.1:9", "/init_weights_update_group", 400, "group exists")


async def never_answers():
    await asyncio.sleep(60)


async def answers():
    return [{}]


@pytest.fixture
def loop():
    with LoopThread() as loop:
        yield loop


@pytest.fixture
def group(loop, monkeypatch):
    """group(server): a group of the trainer alone, as if that server had joined it."""

    def make(server):
        with monkeypatch.context() as patch:
            alone = ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5))
            patch.setattr(broadcast, "_joined", lambda *_: alone)
            made = UpdateGroup(Server(answers), loop, backend="gloo", ranks_per_server=1, timeout_s=0.2)
        made._control = server
        monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
        return made

    return make


def sent(group):
    group.wait(group.send([("x", torch.ones(1))]))


def test_group_when_a_server_refuses_then_its_answer_is_raised_without_waiting_for_the_ranks(
    loop, monkeypatch
):
    waiting = threading.Event()

    def nobody_comes(*_, **__):
        waiting.wait(20)
        raise RuntimeError("0 of 2 ranks came")

    monkeypatch.setattr(broadcast, "_join", nobody_comes)
    # not as an explanation afterwards
    monkeypatch.setattr(UpdateGroup, "_cause", lambda self, error, *_: error)
    try:
        with pytest.raises(RolloutServerError, match="HTTP 400: group exists"):
            UpdateGroup(Server(refuses), loop, backend="gloo", ranks_per_server=1)
    finally:
        waiting.set()


def test_group_when_no_server_comes_then_error_names_server_address_and_what_to_look_at(loop, monkeypatch):
    monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
    with pytest.raises(
        OSError, match="http://127.0.0.1:9: no broadcast group of 2 ranks .* at 127.0.0.1:.*firewall"
    ):
        UpdateGroup(Server(never_answers), loop, backend="gloo", ranks_per_server=1, timeout_s=0.5)


@pytest.mark.parametrize("given", [None, "localhost"])
def test_group_then_its_store_listens_at_the_address_of_the_route_or_the_given_one_alone(loop, given):
    listening = []

    class Looking(Server):
        async def init_weights_update_group(self, address, port, **_):
            mine = psutil.Process().net_connections("tcp")
            listening.extend(
                one.laddr.ip for one in mine if one.status == "LISTEN" and one.laddr.port == port
            )
            assert address == given or given is None
            await refuses()

    with pytest.raises(RolloutServerError, match="group exists"):
        UpdateGroup(Looking(None), loop, backend="gloo", ranks_per_server=1, address=given, timeout_s=1)
    assert listening == ["127.0.0.1"]


def test_transport_when_the_address_is_not_of_this_host_then_refused_with_the_remedy(loop):
    common = {"backend": "gloo", "checkpoint": None, "folder": None, "stage": 0, "address": "192.0.2.1"}
    with pytest.raises(
        ValueError, match="`weight_address` 192.0.2.1: .*assign requested .*; name an address of"
    ):
        make_transport("distributed", client_of(answers), loop, **common, sends=True)
    # it listens nowhere
    made = make_transport("distributed", client_of(answers), loop, **common, sends=False)
    assert isinstance(made, DistributedTransport) and made._address == "192.0.2.1"


def test_gloo_listens_at_the_interface_of_the_address_unless_the_user_names_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "_being_made", [])  # groups of tests before this one wait still
    with gloo_listening_at("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with gloo_listening_at("192.0.2.1"):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        with gloo_listening_at("127.0.0.1"):  # while another server's group is waited for, which has failed
            assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
            with gloo_listening_at("192.0.2.1"):
                assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with gloo_listening_at("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_broadcast_when_a_server_does_not_answer_in_time_then_an_error_of_a_push_that_says_so(group):
    with pytest.raises(
        OSError, match=r"http://127.0.0.1:9: a broadcast of weights failed; .* \(no answer within"
    ):
        sent(group(Server(never_answers)))


class Failing:
    """Stands for a group whose broadcasts fail here."""

    def broadcast(self, *_, **__):
        raise RuntimeError("peer is gone")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [(refuses, RolloutServerError, "group exists"), (never_answers, OSError, "no answer")],
)
def test_broadcast_when_it_fails_here_then_a_servers_answer_is_raised_if_there_is_one(
    group, answer, error, words
):
    made = group(Server(answer))
    made._group = Failing()
    with pytest.raises(error, match=words):
        sent(made)


class Pending:
    """Stands for a broadcast to a server that hangs."""

    def __init__(self):
        self.over = threading.Event()

    def wait(self):
        self.over.wait(30)

    def is_completed(self):
        return self.over.is_set()


def test_leave_when_a_broadcast_hangs_then_nobody_waits_for_it_and_the_group_is_freed_once_it_is_over(group):
    made, pending = group(Server(answers)), Pending()
    made._group, made._works = Failing(), [pending]
    held = weakref.ref(made._group)
    made.leave()
    assert held() is not None
    pending.over.set()
    end = time.monotonic() + 10
    while held() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert held() is None


def test_leave_when_no_broadcast_is_under_way_then_the_group_is_freed_at_once(group):
    """On a thread it could be freed while Python ends, which aborts the process."""
    made, pending = group(Server(answers)), Pending()
    made._group, made._works = Failing(), [pending]
    pending.over.set()
    held, before = weakref.ref(made._group), threading.active_count()
    made.leave()
    assert held() is None and threading.active_count() == before


def transport_to(loop, monkeypatch, group, *controls):
    """A transport to these servers, which have joined their groups."""
    transport = DistributedTransport(None, loop, backend="gloo")
    transport.servers = Server(answers, urls=[url for control in controls for url in control.base_urls])
    transport._groups = [group(control) for control in controls]
    for one, control in zip(transport._groups, controls, strict=True):
        one.urls = control.base_urls
    return transport


def test_send_when_one_of_three_servers_fails_then_the_others_get_the_bucket_and_only_its_group_is_left(
    loop, monkeypatch, group
):
    taken = []

    def taking(name):
        async def take():
            taken.append(name)

        return take

    a, c = (Server(taking(name), (f"http://{name}",)) for name in "ac")
    b = Server(refuses, ("http://b",))
    transport = transport_to(loop, monkeypatch, group, a, b, c)
    transport.send([("x", torch.ones(1))])
    with pytest.raises(RolloutServerError, match="group exists"):
        transport.finish()
    assert sorted(taken) == ["a", "c"] and not transport.broken
    assert [one.urls for one in transport._groups] == [("http://a",), ("http://c",)]


@pytest.mark.parametrize(
    ("answer", "urls", "asked"),
    [
        (refuses, ("http://127.0.0.1:9",), []),
        (refuses, ("http://127.0.0.1:9", "http://127.0.0.1:10"), [None]),  # the second waits for the first
        (never_answers, ("http://127.0.0.1:9",), [None]),
    ],
)
def test_send_when_servers_share_a_group_that_is_not_made_then_asked_whether_they_wait_in_it(
    loop, monkeypatch, answer, urls, asked
):
    def making(*arguments, **options):
        return UpdateGroup(*arguments, **options | {"backend": "gloo", "timeout_s": 0.5})

    monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
    monkeypatch.setattr(broadcast, "UpdateGroup", making)
    server = Server(answer, urls)
    transport = DistributedTransport(lambda urls: server, loop, backend="nccl")
    transport.aim(server)
    with pytest.raises((RolloutServerError, OSError)):
        transport.send([("x", torch.ones(1))])
    assert server.left == asked and server.forgot == bool(asked) and not transport.broken


async def times_out():
    raise RolloutServerError("http://127.0.0.1:9", "/update", None, "timed out after 1 s", timed_out=True)


def test_send_when_a_broadcast_of_a_shared_group_times_out_then_none_is_blamed_for_it_and_all_leave(
    loop, monkeypatch, group
):
    server = Server(times_out)
    transport = transport_to(loop, monkeypatch, group, server)
    transport._share, transport._control = True, lambda urls: server
    transport.send([("x", torch.ones(1))])
    (name,) = [one.name for one in transport._groups]
    with pytest.raises(RolloutServerError, match="timed out") as raised:
        transport.send([("y", torch.ones(1))])  # not begun, as the one before did not arrive
    assert not raised.value.timed_out and server.forgot
    assert server.left == [name] and not transport._groups and not transport.broken


@pytest.mark.parametrize("hangs", [False, True])
def test_abort_of_nccl_then_by_torchs_own_call_and_broken_only_if_that_hangs(loop, monkeypatch, group, hangs):
    aborted, end = [], threading.Event()

    def abort(one):
        aborted.append(one)
        end.wait(30 if hangs else 0)

    monkeypatch.setattr(broadcast, "_abort_process_group", abort)
    monkeypatch.setattr(broadcast, "_ABORT_S", 0.2 if hangs else 30.0)
    server = Server(times_out)
    transport = transport_to(loop, monkeypatch, group, server)
    transport._share, transport._control, transport._backend = True, lambda urls: server, "nccl"
    (one,) = transport._groups
    made = one._group
    transport.send([("x", torch.ones(1))])
    with pytest.raises(RolloutServerError) as raised:
        transport.finish()
    end.set()
    assert aborted == [made] and transport.broken is hangs
    # to one that may wait in what can't be aborted nothing is sent
    assert server.left == ([] if hangs else [one.name])
    assert any("could not be aborted" in note for note in getattr(raised.value, "__notes__", ())) is hangs


class Turn:
    """Stands for an NCCL group, whose work ends on the device once `over` is true of it."""

    def __init__(self, name, log, over):
        self.name, self.log, self.over = name, log, over

    def broadcast(self, tensor, root):
        self.log.append(f"{self.name} begins")
        return self

    def is_completed(self):
        if self.over:
            self.log.append(f"{self.name} is over")
        return self.over

    def wait(self):
        pass


def test_send_with_a_group_per_server_over_nccl_then_they_take_turns_and_one_that_hangs_is_aborted_alone(
    loop, monkeypatch, group
):
    log = []
    monkeypatch.setattr(broadcast, "_abort_process_group", lambda one: log.append(f"{one.name} is aborted"))
    urls = [f"http://{name}" for name in "abc"]
    controls = [Server(answers, (url,)) for url in urls]
    transport = transport_to(loop, monkeypatch, group, *controls)
    transport._backend, transport._take_turns, transport._control = "nccl", True, None
    for one, name in zip(transport._groups, "abc", strict=True):
        one._group, one._timeout_s = Turn(name, log, over=name != "b"), 0.1
    transport.send([("x", torch.ones(1))])
    with pytest.raises(RolloutServerError, match="http://b .*not ended on this side's device") as raised:
        transport.finish()
    assert raised.value.timed_out and not transport.broken
    assert log == ["a begins", "a is over", "b begins", "b is aborted", "c begins", "c is over"]
    assert [one.urls for one in transport._groups] == [("http://a",), ("http://c",)]
    assert not any(control.left for control in controls)  # its leaving might wait for us


def test_transport_over_nccl_then_groups_are_shared_unless_each_server_is_to_have_its_own(loop):
    shared, own = (
        DistributedTransport(None, loop, backend="nccl", group_per_server=b) for b in (False, True)
    )
    gloo = [DistributedTransport(None, loop, backend="gloo", group_per_server=b) for b in (False, True)]
    assert (shared._share, shared._take_turns) == (True, False)
    assert (own._share, own._take_turns) == (False, True)
    assert [(one._share, one._take_turns) for one in gloo] == [(False, False)] * 2


@pytest.mark.parametrize("set_by_user", [None, "2"])
def test_nccl_group_is_made_with_torchs_handling_of_errors_off_unless_the_user_sets_it(
    monkeypatch, set_by_user
):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if set_by_user is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, set_by_user)
    seen = []
    monkeypatch.setattr(
        broadcast,
        "_new_process_group_helper",
        lambda *_, **__: (seen.append(os.environ[name]) or SimpleNamespace(), None),
    )
    monkeypatch.setattr(broadcast, "_world", SimpleNamespace(pg_group_ranks=Ranks()))
    broadcast._join(dist.HashStore(), 2, "g", "nccl", 1.0, "127.0.0.1")
    assert seen == [set_by_user or "0"] and os.environ.get(name) == set_by_user


class Ranks(dict):
    """Stands for torch's table of groups, whose keys are groups."""

    def __setitem__(self, group, ranks):
        pass

"""How many ranks the servers bring into the broadcast group, and what is raised where it can't be made or used."""

import asyncio
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports import broadcast
from megatron_rl_corr.weight_sync.transports.base import common_ranks
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport, UpdateGroup, _join

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
        ({**ONE, "dp_size": 2}, "http://b .* it runs --dp-size 2 replicas; start as many servers and name each"),
    ],
)
def test_ranks_when_servers_differ_or_hide_replicas_then_refused_by_name(second, words):
    with pytest.raises(RolloutProtocolError, match=words):
        common_ranks(servers("http://a", "http://b"), [ONE, second])


class Server:
    """Stands for the control of servers: whatever they are asked, they do what `answer` does."""

    engine_of = staticmethod(lambda url: ENGINE)

    def __init__(self, answer, urls=("http://127.0.0.1:9",)):
        self.base_urls, self.answer = urls, answer

    async def server_info(self):
        return [ONE for _ in self.base_urls]

    async def init_weights_update_group(self, *_, **__):
        await self.answer()

    update_weights_from_distributed = init_weights_update_group


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
    made = []

    def make(server):
        alone = _join(dist.HashStore(), 1, f"alone{len(made)}", "gloo", 5)
        with monkeypatch.context() as patch:
            patch.setattr(broadcast, "_meet", lambda *_: None)
            patch.setattr(broadcast, "_join", lambda *_: alone)
            made.append(UpdateGroup(Server(answers), loop, backend="gloo", ranks_per_server=1, timeout_s=0.2))
        made[-1]._control = server
        monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
        return made[-1]

    yield make
    for one in made:
        one.destroy()


def test_group_when_a_server_refuses_then_its_answer_is_raised_without_waiting_for_the_ranks(loop, monkeypatch):
    waiting = threading.Event()

    def nobody_comes(*_, **__):
        waiting.wait(20)
        raise RuntimeError("0 of 2 ranks came")

    monkeypatch.setattr(broadcast, "rendezvous", nobody_comes)
    monkeypatch.setattr(UpdateGroup, "_cause", lambda self, error, *_: error)  # not as an explanation afterwards
    try:
        with pytest.raises(RolloutServerError, match="HTTP 400: group exists"):
            UpdateGroup(Server(refuses), loop, backend="gloo", ranks_per_server=1)
    finally:
        waiting.set()


def test_group_when_no_server_comes_then_error_names_server_address_and_what_to_look_at(loop, monkeypatch):
    monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
    with pytest.raises(OSError, match="http://127.0.0.1:9: no broadcast group of 2 ranks .* at 127.0.0.1:.*firewall"):
        UpdateGroup(Server(never_answers), loop, backend="gloo", ranks_per_server=1, timeout_s=0.5)


def test_broadcast_when_a_server_does_not_answer_in_time_then_an_error_of_a_push_that_says_so(group):
    with pytest.raises(OSError, match=r"http://127.0.0.1:9: a broadcast of weights failed; .* \(no answer within"):
        group(Server(never_answers)).broadcast([("x", torch.ones(1))])


@pytest.mark.parametrize(
    ("answer", "error", "words"), [(refuses, RolloutServerError, "group exists"), (answers, OSError, "peer is gone")]
)
def test_broadcast_when_it_fails_here_then_a_servers_answer_is_raised_if_there_is_one(
    group, monkeypatch, answer, error, words
):
    def fails(*_, **__):
        raise RuntimeError("peer is gone")

    made = group(Server(answer))
    monkeypatch.setattr(dist, "broadcast", fails)
    with pytest.raises(error, match=words):
        made.broadcast([("x", torch.ones(1))])


def test_destroy_then_torch_has_the_group_no_more_and_twice_is_harmless(group):
    made = group(Server(answers))
    made.broadcast([("x", torch.ones(1))])
    assert made._group in _world.pg_map
    made.destroy()
    made.destroy()
    assert made._group not in _world.pg_map


@pytest.mark.parametrize(
    ("answer", "urls", "broken"),
    [
        (refuses, ("http://127.0.0.1:9",), False),
        (refuses, ("http://127.0.0.1:9", "http://127.0.0.1:10"), True),  # the second waits for the first
        (never_answers, ("http://127.0.0.1:9",), True),
    ],
)
def test_send_when_no_group_is_made_then_broken_if_a_server_may_be_waiting_in_it(
    loop, monkeypatch, answer, urls, broken
):
    def making(*arguments, **options):
        return UpdateGroup(*arguments, **options, timeout_s=0.5)

    monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
    monkeypatch.setattr(broadcast, "UpdateGroup", making)
    transport = DistributedTransport(None, loop, backend="gloo")
    transport.aim(Server(answer, urls))
    with pytest.raises((RolloutServerError, OSError)):
        transport.send([("x", torch.ones(1))])
    assert transport.broken is broken


def test_send_when_a_broadcast_is_not_answered_in_time_then_broken(loop, group):
    transport = DistributedTransport(None, loop, backend="gloo")
    transport._group = group(Server(never_answers))
    with pytest.raises(OSError, match="no answer within"):
        transport.send([("x", torch.ones(1))])
    assert transport.broken

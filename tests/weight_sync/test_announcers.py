"""Buckets that processes announce: every server is told once and in order, and what goes wrong is told as
without them.
"""

import asyncio
import shutil
import subprocess
import time
from contextlib import AsyncExitStack, contextmanager

import pytest
from aiohttp import web

from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.rollout import RolloutClient, RolloutServerError
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.announcers import Announcers, announcing_processes
from tests.asking_processes import asking_processes
from tests.stand_in_server import serving

SERVERS = 5


@pytest.fixture(autouse=True)
def not_fast(request):
    """A process that is not allowed is waited for in vain: it is started on the loop's thread."""
    if request.config.getoption("--fast"):
        pytest.skip("starts a process; make test runs it")


def bucket(number):
    return {
        "names": [f"model.layers.{number}.weight"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
    }


@contextmanager
def announcing(handle, processes=2, api_key=None):
    """(announce(number): its future, urls, told): told are (url, body, key) that servers were sent."""
    told = []

    async def open_servers(stack):
        async def answer(request):
            assert request.path == "/update_weights_from_distributed"
            place = urls.index(f"http://{request.host}")
            told.append((place, await request.json(), request.headers.get("Authorization")))
            return await handle(place)

        urls = [await stack.enter_async_context(serving(answer)) for _ in range(SERVERS)]
        return urls

    with LoopThread("servers") as far, LoopThread() as loop:
        stack = AsyncExitStack()
        urls = far.call(open_servers(stack))
        client = RolloutClient(urls, vocab_size=8, engine="sglang", api_key=api_key, timeout_s=20)
        made = [client.asking_process() for _ in range(processes)]
        announcers = Announcers(loop, made)
        try:
            yield lambda number: announcers.announce(client.control(urls), bucket(number)), urls, told
        finally:
            announcers.close()
            loop.call(client.close())
            far.call(stack.aclose())


async def well(place):
    return web.json_response({"success": True, "message": f"server {place}"})


def test_processes_then_one_for_each_32_servers_up_to_8_and_none_for_up_to_32():
    found = {servers: announcing_processes(servers) for servers in (1, 32, 33, 64, 65, 256, 257, 4096)}
    assert found == {1: 0, 32: 0, 33: 2, 64: 2, 65: 3, 256: 8, 257: 8, 4096: 8}


@pytest.mark.parametrize("processes", [0, 2])
def test_buckets_when_announced_then_each_server_is_told_of_each_once_and_in_order(processes):
    with announcing(well, processes, api_key="a key") as (announce, urls, told):
        answers = [announce(number).result(60) for number in range(3)]
        assert len(asking_processes()) == processes
    for found in answers:
        assert sorted(one["message"] for one in found) == [f"server {i}" for i in range(SERVERS)]
    for place in range(len(urls)):
        own = [(body, key) for to, body, key in told if to == place]
        assert [body["names"] for body, _ in own] == [bucket(number)["names"] for number in range(3)]
        assert [body["shapes"] for body, _ in own] == [[[2, 3]]] * 3
        assert {key for _, key in own} == {"Bearer a key"}
    assert asking_processes() == []


@pytest.mark.parametrize("processes", [0, 2])
def test_bucket_when_a_server_refuses_then_its_own_words_at_once_and_others_are_waited_for_no_more(processes):
    async def hangs_or_refuses(place):
        if place == 3:
            return web.json_response({"success": False, "message": "no such tensor"}, status=400)
        await asyncio.sleep(60)  # the others wait in a broadcast that never comes
        return await well(place)

    with announcing(hangs_or_refuses, processes) as (announce, urls, told):
        with pytest.raises(RolloutServerError, match="no such tensor") as error:
            announce(0).result(60)
        assert (error.value.url, error.value.status) == (urls[3], 400)
        assert len(asking_processes()) == processes


def test_bucket_when_a_process_is_killed_then_that_is_told_and_another_takes_the_next():
    waiting, kills = 0, True

    async def waits_until_it_is_killed(place):
        nonlocal waiting, kills
        if kills:
            waiting += 1
            if waiting == SERVERS:  # whichever process it is, servers are waiting for it
                kills = False
                asking_processes()[0].kill()
            await asyncio.sleep(60)
        return await well(place)

    with announcing(waits_until_it_is_killed) as (announce, urls, told):
        with pytest.raises(LocalFault, match="asks the servers is gone.*or use `weight_transport` disk"):
            announce(0).result(60)
        assert len(announce(1).result(60)) == SERVERS


def test_bucket_when_a_process_is_killed_before_it_has_begun_then_another_takes_it():
    with announcing(well) as (announce, urls, told):
        wait_for(lambda: len(asking_processes()) == 2)
        asking_processes()[0].kill()
        assert len(announce(0).result(60)) == SERVERS
    assert asking_processes() == []


def test_processes_when_closed_before_they_have_begun_then_none_is_left():
    with announcing(well):
        wait_for(lambda: len(asking_processes()) == 2)
    assert asking_processes() == []


def test_processes_when_they_can_not_start_then_an_error_that_says_what_else_can(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with announcing(well) as (announce, urls, told):
        with pytest.raises(RuntimeError, match="or use `weight_transport` disk"):
            announce(0).result(60)
        assert told == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_servers_when_their_router_alone_has_a_certificate_then_processes_announce_to_them(tmp_path):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=router -keyout key -out ca.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=tmp_path)
    pem = tmp_path / "ca.pem"
    with announcing(well, processes=0) as (announce, urls, told), LoopThread() as loop:
        client = RolloutClient(["https://router"], vocab_size=8, engine="sglang", ca_file=pem)
        client.use_servers(dict.fromkeys(urls, "sglang"))
        announcers = Announcers(loop, [client.asking_process()])
        assert len(announcers.announce(client.control(urls), bucket(0)).result(60)) == SERVERS
        announcers.close()
        loop.call(client.close())


def wait_for(is_so):
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)

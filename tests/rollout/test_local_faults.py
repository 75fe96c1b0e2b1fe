"""Faults of this process and its host: no server is blamed, the remedy is named, and samples come
once it is over.
"""

import asyncio
import errno
import json
import os
import resource
import socket
import sys
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from megatron_rl_corr.engines import http, local_faults
from megatron_rl_corr.engines.errors import RolloutServerError, may_be_gone, may_pass
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.local_faults import (
    WAIT_S,
    LocalFault,
    descriptors_needed,
    local_fault,
    raise_descriptor_limit,
)
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout import SamplingParams
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.server_pool import ServerPool, rotated
from tests.tiers import in_matrix, matrix

pytestmark = matrix

CODES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL, errno.ENETDOWN)
SAMPLES = [[1]] * 6


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http, "WAIT_S", 0.3)


def failing_sockets(monkeypatch, code, times):
    """The first `times` sockets can't be made; returns how many were asked for."""
    made, usual = Counter(), http._kept_alive

    def make(address):
        made["asked"] += 1
        if made["asked"] <= times:
            raise OSError(code, os.strerror(code))
        return usual(address)

    monkeypatch.setattr(http, "_kept_alive", make)
    return made


def sampled(faulty, **settings):
    """(what came of six samples, counts, addresses that are left out, requests that the server got)."""

    async def scenario():
        asked = Counter()

        async def handle(request):
            body = await request.json()
            asked["generate"] += 1
            return faulty.one_token(len(body["input_ids"]))

        async with faulty.serving(handle) as url, RolloutClient([url], vocab_size=8, **settings) as client:
            try:
                found = len(await client.generate(SAMPLES, SamplingParams(1)))
            except Exception as error:  # noqa: BLE001  judged by the test
                found = error
            return found, client.counts(), client.left_out, asked["generate"]

    return asyncio.run(scenario())


@pytest.mark.parametrize("code", CODES)
def test_generate_when_this_host_lacks_something_for_a_while_then_all_samples_and_no_server_is_blamed(
    code, faulty, monkeypatch
):
    failing_sockets(monkeypatch, code, 10)
    before = dict(EVENTS.counts)
    found, counts, left_out, asked = sampled(faulty)
    assert (found, left_out, asked) == (6, [], 6)
    assert (counts["left_out"], counts["retries"]) == (0, 0)
    assert EVENTS.counts["server_left_out"] == before.get("server_left_out", 0)


@pytest.mark.parametrize("code", CODES)
def test_generate_when_this_host_lacks_something_for_good_then_it_ends_and_says_whose_fault(
    code, faulty, monkeypatch
):
    failing_sockets(monkeypatch, code, 10**9)
    before = EVENTS.counts["local_fault"]
    found, counts, left_out, asked = sampled(faulty, outage_timeout_s=0.5)
    assert isinstance(found, LocalFault) and errno.errorcode[code] in str(found)
    assert "a fault of its own host, not of the server" in str(found)
    assert (left_out, asked, counts["left_out"], counts["retries"]) == ([], 0, 0, 0)
    assert EVENTS.counts["local_fault"] > before
    if code == errno.EMFILE:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        needed = descriptors_needed(64, 1)
        assert f"ulimit -n {needed if needed > soft else 2 * soft}" in str(found)


@pytest.mark.parametrize("code", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ETIMEDOUT])
def test_fault_when_it_may_be_of_the_server_then_it_is_no_local_one(code):
    assert local_fault(OSError(code, os.strerror(code))) is None


@pytest.mark.parametrize(
    ("code", "local"),
    [
        (socket.EAI_AGAIN, True),
        (socket.EAI_FAIL, True),
        (socket.EAI_MEMORY, True),
        (socket.EAI_NONAME, False),
    ],
)
def test_name_when_not_resolved_then_the_resolver_is_at_fault_and_an_unknown_name_the_address(
    code, local, faulty, monkeypatch
):
    def fails(*args, **kwargs):
        raise socket.gaierror(code, "no answer")

    async def ask():
        fleet = Fleet(["http://nowhere.test:1"], engine="sglang", timeout_s=5, connect_timeout_s=5)
        try:
            await fleet.send("http://nowhere.test:1", fleet.engine_of("http://nowhere.test:1").health())
        finally:
            await fleet.close()

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(LocalFault if local else RolloutServerError) as raised:
        asyncio.run(ask())
    assert ("resolver" in str(raised.value)) is local


def test_name_when_no_descriptor_is_left_for_the_resolver_then_the_limit_is_named(monkeypatch):
    monkeypatch.setattr(local_faults, "_descriptors_left", lambda: errno.EMFILE)
    error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    what, remedy = local_fault(error, needed=1 << 40)
    assert "EMFILE" in what and f"ulimit -n {1 << 40}" in remedy


def test_thread_when_none_can_start_then_a_local_fault_and_other_runtime_errors_are_not():
    assert "thread" in local_fault(RuntimeError("can't start new thread"))[0]
    assert local_fault(RuntimeError("Session is closed")) is None


def test_fault_when_local_then_it_says_nothing_about_the_server():
    fault = LocalFault("http://a:1", "/generate", "Too many open files (EMFILE)", "raise it")
    assert not may_be_gone(fault) and not may_pass(fault) and not isinstance(fault, RolloutServerError)
    copy = fault.__reduce__()[0](*fault.__reduce__()[1])
    assert (str(copy), copy.sent) == (str(fault), False)


def test_generate_when_only_one_address_is_out_of_reach_then_the_others_are_asked_first(faulty, monkeypatch):
    def resolves(host, *args, real=socket.getaddrinfo, **kwargs):
        if host == "nowhere.test":
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *args, **kwargs)

    async def scenario():
        async def handle(request):
            return faulty.one_token(len((await request.json())["input_ids"]))

        async with (
            faulty.serving(handle) as url,
            RolloutClient(["http://nowhere.test:1", url], vocab_size=8, engine="sglang") as client,
        ):
            first = await client.generate(SAMPLES, SamplingParams(1))
            begun = asyncio.get_running_loop().time()
            second = await client.generate(SAMPLES, SamplingParams(1))
            assert (
                asyncio.get_running_loop().time() - begun < WAIT_S / 2
            )  # nobody waits for that address again
            return [sample.server == url for sample in first + second], client.left_out

    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    assert asyncio.run(scenario()) == ([True] * 12, [])


@pytest.mark.parametrize(("spare", "well"), [(24, True), *in_matrix((-2, False))])
def test_generate_when_descriptors_run_out_then_samples_wait_for_each_other_and_no_server_is_left_out(
    spare, well, faulty
):
    async def handle(request):
        if request.path != "/generate":
            return web.json_response({})
        body = await request.json()
        await asyncio.sleep(0.01)
        return faulty.one_token(len(body["input_ids"]))

    async def scenario():
        async with faulty.serving(handle) as a, faulty.serving(handle) as b:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.rollout.few_descriptors_worker",
                str(spare),
                "100",
                a,
                b,
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await child.communicate()
            return json.loads(out.decode().splitlines()[-1])

    found = asyncio.run(scenario())
    assert (found["left_out"], found["retries"], found["left"]) == (0, 0, []), found
    if well:
        assert found["samples"] == 200
    else:
        assert found["error"] == "LocalFault" and "EMFILE" in found["text"]
        assert f"it may have {found['soft']} open files" in found["text"]


# The limit at the start


def limits(monkeypatch, soft, hard, *, refused=()):
    state = {"limit": (soft, hard)}

    def set_limit(_, limit):
        if limit[0] in refused:
            raise ValueError("not allowed to raise maximum limit")
        state["limit"] = limit

    monkeypatch.setattr(resource, "getrlimit", lambda _: state["limit"])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return state


def test_limit_when_it_suffices_then_left_alone(monkeypatch):
    state = limits(monkeypatch, 1000, 4096)
    assert raise_descriptor_limit(1000, "x") is None and state["limit"] == (1000, 4096)


def test_limit_when_too_low_then_the_soft_one_is_raised_to_the_hard_one_and_told(monkeypatch):
    state = limits(monkeypatch, 1024, 4096)
    told = raise_descriptor_limit(1500, "--rollout-max-concurrency 1200 with 16 servers")
    assert state["limit"] == (4096, 4096)
    assert "from 1024 to 4096" in told and "--rollout-max-concurrency 1200 with 16 servers needs 1500" in told


def test_limit_when_unlimited_is_refused_by_the_kernel_then_what_is_needed(monkeypatch):
    unlimited = resource.RLIM_INFINITY
    state = limits(monkeypatch, 1024, unlimited, refused=(unlimited,))
    assert "from 1024 to 1500" in raise_descriptor_limit(1500, "x") and state["limit"] == (1500, unlimited)


def test_limit_when_the_hard_one_is_too_low_then_refused_with_the_number(monkeypatch):
    limits(monkeypatch, 512, 1024)
    with pytest.raises(
        ValueError, match=r"--max-concurrency 2000 .* needs about 2500 open files.*may have 1024.*2500"
    ):
        raise_descriptor_limit(2500, "--max-concurrency 2000 with 4 servers")


def test_needed_when_counted_then_requests_control_watches_and_what_is_open():
    opened = len(os.listdir("/proc/self/fd"))
    assert abs(descriptors_needed(700, 16) - (700 + 32 + opened + 256)) <= 2


# Replicas begin at servers of their own


@pytest.mark.parametrize(
    ("servers", "replicas", "samples"), [(256, 32, 8), (256, 32, 128), (4, 3, 2), (2, 32, 1), (7, 5, 3)]
)
def test_servers_when_many_replicas_begin_then_asked_evenly(servers, replicas, samples):
    urls = [f"http://s{n}:1" for n in range(servers)]

    async def begin():
        asked = Counter()
        for replica in range(replicas):
            pool = ServerPool(
                urls,
                max_outstanding=samples,
                max_per_server=None,
                outage_timeout_s=1,
                replica=replica,
                replicas=replicas,
            )
            asked.update([(await pool.take()).url for _ in range(samples)])
        return [asked[url] for url in urls]

    found = asyncio.run(begin())
    assert sum(found) == replicas * samples and max(found) - min(found) <= 1


def test_order_when_rotated_then_the_same_servers_from_another_place_every_time():
    assert rotated("abcd", 1, 2) == ["c", "d", "a", "b"] and rotated("abcd", 0, 2) == ["a", "b", "c", "d"]
    assert rotated("ab", 0, 1) == ["a", "b"]
    with pytest.raises(ValueError, match="replica must be"):
        ServerPool(["a"], max_outstanding=1, max_per_server=None, outage_timeout_s=1, replica=2, replicas=2)


def test_connector_error_when_unwrapped_then_its_own_cause_counts():
    error = aiohttp.ClientConnectorError(None, OSError(errno.EMFILE, "Too many open files"))
    assert "EMFILE" in local_fault(error)[0]
    assert local_fault(aiohttp.ClientConnectorError(None, ConnectionRefusedError(111, "refused"))) is None

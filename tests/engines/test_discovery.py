"""Which servers a client speaks to when it is given a router's address."""

import asyncio

import pytest
from aiohttp import web

from megatron_rl_corr.engines.http import HTTPTransport
from megatron_rl_corr.engines.sglang.router import servers_behind
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError


def found(faulty, *handlers, timeout_s=5.0):
    """(what is found behind servers with these handlers, their own addresses)."""

    async def scenario():
        transport = HTTPTransport(timeout_s=5, connect_timeout_s=5)
        async with faulty.serving(handlers[0]) as first, faulty.serving(handlers[-1]) as last:
            urls = [first, last][: len(handlers)]
            try:
                return await servers_behind(urls, transport, timeout_s), urls
            finally:
                await transport.close()

    return asyncio.run(scenario())


def router(*urls, kind="regular"):
    async def handle(request):
        assert request.method == "GET" and request.path == "/workers"
        return web.json_response(
            {"workers": [{"url": url, "worker_type": kind} for url in urls], "total": len(urls)}
        )

    return handle


async def server(request):
    return web.Response(status=404)


def test_servers_when_one_address_is_a_router_then_its_workers_stand_in_its_place(faulty):
    servers, (_, own) = found(faulty, router("http://127.0.0.1:5", "http://127.0.0.1:4/"), server)
    assert servers == ("http://127.0.0.1:5", "http://127.0.0.1:4", own)


def test_servers_when_the_router_registers_them_later_then_waited_for(faulty):
    asked = 0

    async def starting(request):
        nonlocal asked
        asked += 1
        return (
            await router(*["http://127.0.0.1:5"][: asked > 1])(request) if asked else web.Response(status=503)
        )

    assert found(faulty, starting)[0] == ("http://127.0.0.1:5",) and asked == 2


def test_servers_when_a_router_never_has_one_then_error_names_it_and_the_wait(faulty):
    with pytest.raises(
        RolloutProtocolError, match="/workers: this router has no worker; start its servers"
    ) as error:
        found(faulty, router(), timeout_s=0.3)
    assert error.value.__notes__ == ["waited 0.3 s for it"]


@pytest.mark.parametrize("status", [401, 503])
def test_servers_when_the_answer_is_a_failure_then_raised_with_its_status(faulty, status):
    async def failing(request):
        return web.Response(status=status)

    with pytest.raises(RolloutServerError, match=f"GET /workers with HTTP {status}"):
        found(faulty, failing, timeout_s=0.3)


def test_servers_when_two_routers_share_one_then_refused(faulty):
    with pytest.raises(ValueError, match="http://127.0.0.1:5"):
        found(faulty, router("http://127.0.0.1:5"), router("http://127.0.0.1:5"))


@pytest.mark.parametrize(
    ("handle", "named"),
    [
        (router("http://127.0.0.1:5", kind="prefill"), "its workers are prefill.*start regular workers"),
        (
            router("http://127.0.0.1:5@0"),
            "http://127.0.0.1:5@0 is one data-parallel rank.*without --dp-aware",
        ),
        (lambda request: asyncio.sleep(0, web.json_response({"workers": [{"id": 1}]})), "no list of workers"),
        (lambda request: asyncio.sleep(0, web.Response(text="[]")), "no list of workers"),
    ],
)
def test_servers_when_the_router_is_of_another_kind_then_refused_with_the_remedy(faulty, handle, named):
    with pytest.raises(RolloutProtocolError, match=named):
        found(faulty, handle)

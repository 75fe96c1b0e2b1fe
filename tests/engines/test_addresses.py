"""Addresses at which no server will ever answer: told at once, where a server that starts is waited for."""

import asyncio
import ssl
import subprocess
import time

import pytest
from aiohttp import web

from megatron_rl_corr.engines.addresses import UnusableAddress
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.rollout import RolloutClient
from tests.faults.drills import drill

WAIT_S = 30.0
"""What a server that starts is given; far more than any of these may take."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """TLS of a server whose certificate nobody trusts."""
    folder = tmp_path_factory.mktemp("tls")
    words = [
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
        "-keyout",
        "key",
        "-out",
        "pem",
    ]
    subprocess.run(["openssl", "req", "-x509", *words], check=True, capture_output=True, cwd=folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "pem", folder / "key")
    return tls


async def nothing(request):
    return web.Response(status=404)


def refused(faulty, engine, *, tls=None, given=None):
    """(what is raised, seconds): servers are looked for at the address of one that answers
    404 to everything.
    """

    async def scenario():
        async with faulty.serving(nothing, ssl_context=tls) as url:
            url = url if given is None else f"{given}://{url.partition('://')[2]}"
            async with RolloutClient([url], vocab_size=10, engine=engine) as client:
                begun = time.monotonic()
                with pytest.raises(RolloutError) as raised:
                    await client.find_servers(WAIT_S)
                    await client.wait_healthy(WAIT_S)
                return raised.value, time.monotonic() - begun

    return asyncio.run(scenario())


@drill(
    "a web server that answers 404 to everything, https at an http port, http at an https port, a wrong "
    "certificate",
    promised="named at once, with the remedy, whatever --rollout-engine says",
)
@pytest.mark.parametrize("engine", ["auto", "sglang", "vllm"])
def test_server_when_it_will_never_answer_then_named_at_once(faulty, certificate, engine, seen):
    cases = {
        "404": ({}, "404|none of SGLang, vLLM"),
        "https at http": ({"given": "https"}, "what answers there speaks no TLS; is it http://127"),
        "http at https": ({"tls": certificate, "given": "http"}, "speaks TLS; is it https://127"),
        "certificate": (
            {"tls": certificate},
            "certificate verify failed: self-signed .*; name the .* in `ca_file`",
        ),
    }
    longest = 0.0
    for name, (how, words) in cases.items():
        error, seconds = refused(faulty, engine, **how)
        with pytest.raises(type(error), match=words):
            raise error
        assert isinstance(error, UnusableAddress) == (name != "404")
        longest = max(longest, seconds)
    assert longest < WAIT_S / 3
    seen(f"all 4 within {longest:.1f} s, with {engine}")


def test_server_when_it_breaks_connections_without_tls_then_it_may_be_starting(faulty):
    async def breaks(request):
        request.transport.abort()

    async def scenario():
        async with (
            faulty.serving(breaks) as url,
            RolloutClient([url], vocab_size=10, engine="sglang") as client,
        ):
            with pytest.raises(RolloutError, match="closed the connection without an answer") as raised:
                await client.wait_healthy(0.7)
            assert raised.value.__notes__ == ["waited 0.7 s for it to become healthy"]

    asyncio.run(scenario())

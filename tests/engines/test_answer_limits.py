"""How much of an answer is taken, and what no message shows: bounded memory, no unpacking, no key."""

import asyncio
import base64
import gzip
import html
import json
import resource
import time
from urllib.parse import quote, quote_plus

import psutil
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.engines import answer_size, http, load_engine
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    body_start,
    shown,
)
from megatron_rl_corr.engines.http import HTTPTransport
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.secrets import HIDDEN, keep_secret, redacted
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from megatron_rl_corr.rollout.retries import longest_answer_s
from tests.faults.drills import drill

KEY = "sk-Zr7/a\"b\\c+d=e&f'g<h%i~long"
SMALL = Request("GET", "/x", max_bytes=1000)


def sent(faulty, handle, request=SMALL, **options):
    async def inner():
        async with faulty.serving(handle) as url:
            transport = HTTPTransport(timeout_s=30.0, connect_timeout_s=5.0, **options)
            try:
                return await transport.send(url, request)
            finally:
                await transport.close()

    return asyncio.run(inner())


@pytest.mark.parametrize("status", [200, 500])
def test_message_when_an_answer_has_controls_of_a_terminal_then_none_of_them_reaches_one(faulty, status):
    title, clears = "\x1b]0;mine\x07", "\x1b[2J\x9b2J\r\x08"

    async def handle(request):
        reason = {"type": "abort", "status_code": 500, "err_type": title, "message": clears}
        if status == 500:
            return web.Response(status=500, text=title + clears)
        return web.json_response({"output_ids": [], "meta_info": {"id": title, "finish_reason": reason}})

    said = str(faulty.failure(handle, max_retries=0))
    assert "]0;mine" in said and "[2J" in said
    assert not {one for one in said if ord(one) < 32 or 127 <= ord(one) < 160}


def test_cookies_when_one_server_sets_some_then_no_request_to_another_one_at_its_host_has_them(faulty):
    got = []

    async def handle(request):
        got.append(request.headers.get("Cookie"))
        answer = web.Response(body=b"{}")
        answer.set_cookie(f"big{len(got)}", "x" * 4000)  # some servers refuse headers of more than 8 KiB
        return answer

    async def inner():
        async with faulty.serving(handle) as one, faulty.serving(handle) as other:
            transport = HTTPTransport(timeout_s=30.0, connect_timeout_s=5.0)
            for url in (one, other, one):
                await transport.send(url.replace("127.0.0.1", "localhost"), SMALL)
            await transport.close()

    asyncio.run(inner())
    assert got == [None] * 3


def test_answer_when_it_is_as_long_as_allowed_then_taken_and_one_byte_more_refused(faulty):
    def of(length):
        async def handle(request):
            assert request.headers["Accept-Encoding"] == "identity"
            return web.Response(body=b"x" * length)

        return handle

    assert sent(faulty, of(1000)) == (200, b"x" * 1000)
    with pytest.raises(RolloutProtocolError, match="/x: its answer has more than the 1000 bytes"):
        sent(faulty, of(1001))


@drill("an endless answer", promised="refused by name, memory grows by less than 50 MB")
def test_answer_when_it_never_ends_then_refused_and_memory_stays(faulty, seen):
    async def endless(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 16))

    before = psutil.Process().memory_info().rss
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RolloutProtocolError, match="more than the 8388608 bytes"):
        sent(faulty, endless, Request("GET", "/x"))
    with pytest.raises(
        RolloutError, match=f"more than the {answer_size.of_sample(1, SamplingParams(1))} bytes"
    ):

        async def scenario():
            async with (
                faulty.serving(endless) as url,
                RolloutClient([url], vocab_size=9, max_retries=0) as client,
            ):
                await client.generate([[1]], SamplingParams(1))

        asyncio.run(scenario())
    grown = max(
        psutil.Process().memory_info().rss - before,
        1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most),
    )
    assert grown < 50 << 20
    seen(f"refused; {grown >> 20} MB more")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "GZIP, identity"])
@drill("a compressed answer that would become a gigabyte", promised="refused by name, nothing is unpacked")
def test_answer_when_compressed_then_refused_and_not_unpacked(faulty, seen, encoding):
    bomb = gzip.compress(bytes(64 << 20), 1)

    async def handle(request):
        return web.Response(body=bomb, headers={"Content-Encoding": encoding})

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RolloutProtocolError, match=f"compressed .{encoding}., which it was asked not to do"):
        sent(faulty, handle, Request("GET", "/x"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert grown < 50 << 10
    seen(f"{encoding}: refused; {grown >> 10} MB more")


def test_failure_when_its_body_is_long_or_compressed_then_its_status_is_told(faulty):
    async def long(request):
        return web.Response(status=500, body=b"x" * (1 << 20))

    async def packed(request):
        return web.Response(status=502, body=gzip.compress(b"x"), headers={"Content-Encoding": "gzip"})

    with pytest.raises(RolloutServerError, match="HTTP 500: its answer has more than the 65536"):
        sent(faulty, long)
    with pytest.raises(RolloutServerError, match="HTTP 502: its answer is compressed"):
        sent(faulty, packed)


def test_size_when_more_is_asked_for_then_more_may_come():
    plain = answer_size.of_sample(10, SamplingParams(100))
    assert plain == (1 << 20) + 100 * 1024 + 110 * 2048
    assert answer_size.of_sample(10, SamplingParams(100, top_k=50)) == plain + 100 * 50 * 16
    assert answer_size.of_routes(110, ExpertShape(4, (0, 1, 2, 3), 2, 8)) == 110 * 4 * 2 * 8
    for engine in map(load_engine, ("sglang", "vllm")):
        assert engine.generate([1] * 10, SamplingParams(100), seed=0).max_bytes == plain
        detailed = engine.detailed_sample([1] * 10, SamplingParams(100), likeliest=16)
        assert detailed.max_bytes == plain + answer_size.of_likeliest(100, 16)
        assert engine.health().max_bytes == 8 << 20 and engine.weights_checker().max_bytes == 64 << 20


BEARER = f"Bearer {KEY}"
ECHOES = {
    "as it is": KEY,
    "header": BEARER,
    "JSON": json.dumps(BEARER),
    "JSON twice": json.dumps(json.dumps(BEARER)),
    "JSON with slashes": json.dumps(BEARER).replace("/", "\\/"),
    "every character": "".join(f"\\u{ord(one):04X}" for one in BEARER),
    "repr": repr(BEARER.encode()),
    "URL": quote(BEARER, safe=""),
    "URL path": quote(BEARER),
    "URL form": quote_plus(BEARER),
    "URL twice": quote(quote(BEARER, safe="")),
    "every %": "".join(f"%{ord(one):02x}" for one in BEARER),
    "HTML": html.escape(BEARER),
    "HTML numbers": "".join(f"&#{ord(one)};" for one in BEARER),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of the header": base64.b64encode(BEARER.encode()).decode(),
    "base64 of a user": base64.urlsafe_b64encode(f"ab:{KEY}".encode()).decode(),
}


def leaks(text):
    """Whether a part of the key of eight characters, in any form, is in the text."""
    forms = [
        KEY,
        quote(KEY, safe=""),
        quote(KEY, safe="").lower(),
        quote(quote(KEY, safe=""), safe=""),
        html.escape(KEY),
        repr(KEY.encode())[2:-1],
        json.dumps(KEY)[1:-1],
        json.dumps(KEY).replace("/", "\\/")[1:-1],
    ]
    forms += [
        "".join(f"{mark}{ord(one):{how}}{end}" for one in KEY)
        for mark, how, end in (("\\u", "04X", ""), ("%", "02x", ""), ("&#", "d", ";"))
    ]
    forms += [
        base64.b64encode((before + KEY).encode()).decode()[4 * len(before) // 3 + 1 : -4]
        for before in ("", "Bearer ", "ab:")
    ]
    return [
        form[at : at + 12]
        for form in forms
        for at in range(0, len(form) - 12, 4)
        if form[at : at + 12] in text
    ]


class Holder:
    pass


@pytest.mark.parametrize("form", ECHOES)
def test_key_when_quoted_in_any_form_then_no_part_of_it_is_in_a_message(form):
    holder = Holder()
    assert leaks(ECHOES[form])
    keep_secret(holder, KEY)
    assert not leaks(redacted(f"x {ECHOES[form]} y")) and redacted("x y") == "x y"
    for length in range(380, 520, 7):  # where a message is cut, it may be cut in the key
        body = b"a" * length + ECHOES[form].encode() + b"b" * 3000
        assert not leaks(body_start(body)) and not leaks(shown(body[300:].decode()))
        assert not leaks(body_start(b" \n" * (length + 600) + ECHOES[form].encode() * 5 + b"b" * 3000))
    del holder
    assert redacted(KEY) == KEY


WRONG = {
    "not JSON": lambda echo: echo,
    "a list": lambda echo: json.dumps([echo]),
    "no meta": lambda echo: json.dumps({"x": echo}),
    "an abort": lambda echo: json.dumps(
        {
            "output_ids": [],
            "meta_info": {
                "id": echo,
                "finish_reason": {"type": "abort", "status_code": 400, "err_type": echo, "message": echo},
            },
        }
    ),
    "a reason": lambda echo: json.dumps({"output_ids": [], "meta_info": {"finish_reason": echo}}),
    "ids": lambda echo: json.dumps({"output_ids": echo, "meta_info": {"finish_reason": {"type": "stop"}}}),
    "success": lambda echo: json.dumps({"success": False, "message": echo}),
    "error": lambda echo: json.dumps({"error": {"message": echo}}),
}


@pytest.mark.parametrize("name", ["Content-Encoding", "Content-Length", "X\N{DEL}"])
def test_key_when_a_header_of_the_answer_quotes_it_then_no_message_has_it_in_any_case(name):
    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        echo = head.split(b"Authorization: ")[1].partition(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n%s: %s\r\n\r\n[]" % (name.encode(), echo))
        await writer.drain()
        writer.close()

    async def scenario():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        transport = HTTPTransport(timeout_s=30.0, connect_timeout_s=5.0, api_key="s3cr3tKEYvalue")
        async with server:
            try:
                await transport.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", SMALL)
            finally:
                await transport.close()

    with pytest.raises(RolloutError) as error:
        asyncio.run(scenario())
    assert HIDDEN in str(error.value) and "s3cr3t" not in str(error.value)


@pytest.mark.parametrize("engine, wrong", [("sglang", "an abort"), ("sglang", "a reason"), ("vllm", "error")])
def test_message_when_an_answer_has_half_a_surrogate_pair_then_any_file_and_console_takes_it(engine, wrong):
    body = WRONG[wrong]("bad \ud800 token").encode()  # as JSON has it: bad \\ud800 token
    asked = SampleRequest(
        torch.tensor([1]), SamplingParams(1), "r1", seed=0, prompt_index=0, sample_index=0, vocab_size=None
    )
    with pytest.raises(RolloutError) as error:
        load_engine(engine).parse(body, asked, server="http://a:1")
    assert "bad ? token" in str(error.value) and "bad ? token" in error.value.detail
    assert shown("\udfff\ud800 x") == "?? x" and "\\ud800" in shown(["\ud800"])


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("wrong", WRONG)
@drill("a server quotes the API key in an answer with HTTP 200", promised="the key is in no message")
def test_key_when_a_server_quotes_it_in_a_2xx_answer_then_no_message_has_it(
    faulty, seen, wrong, engine, caplog
):
    told = []

    async def handle(request):
        echo = list(ECHOES.values())[len(told) % len(ECHOES)]
        return web.Response(text=WRONG[wrong](echo + request.headers["Authorization"]))

    async def scenario():
        async with faulty.serving(handle) as url:
            options = {"vocab_size": 10, "api_key": KEY, "max_retries": 0, "engine": engine}
            async with RolloutClient([url], **options) as client:
                for _ in ECHOES:
                    for call in (client.generate([[1]], SamplingParams(1)), client.server_info()):
                        try:
                            told.append(str(await call))
                        except RolloutError as error:
                            cause = error.__cause__
                            told.append(f"{error} {error!r} {error.detail} {vars(error)} {cause} {cause!r}")
                    for server in client._pool.left_out:
                        client._pool.rejoin(server)

    asyncio.run(scenario())
    failures = [text for text in told if "rollout server" in text]
    assert (
        len(failures) >= len(ECHOES) and not any(leaks(text) for text in failures) and not leaks(caplog.text)
    )
    seen(f"{len(failures)} messages, none with it")


async def dripping(request, *, pause_s, parts, part=b" "):
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(parts):
        await answer.write(part)
        await asyncio.sleep(pause_s)
    await answer.write(b"{}")
    return answer


def test_body_when_it_comes_byte_by_byte_then_it_ends_within_its_bound_and_says_so(faulty, monkeypatch):
    monkeypatch.setattr(http, "SLOW_S", 0.5)

    async def handle(request):
        return await dripping(request, pause_s=0.02, parts=10**6)

    with pytest.raises(RolloutServerError, match=r"its answer comes too slowly, \d+ bytes in 0.5") as raised:
        sent(faulty, handle)
    assert raised.value.timed_out and raised.value.status is None


@pytest.mark.parametrize("first_s", [0.0, 1.0])
def test_body_when_it_has_a_second_for_each_64_kib_then_one_that_is_long_lives(faulty, monkeypatch, first_s):
    """40 parts of 32 KiB, 0.05 s apart: 2 s in all, which the bytes give 20 s. Headers may come late."""
    monkeypatch.setattr(http, "SLOW_S", 0.5)

    async def handle(request):
        await asyncio.sleep(first_s)
        return await dripping(request, pause_s=0.05, parts=40, part=b" " * (1 << 15))

    status, body = sent(faulty, handle, Request("GET", "/x"))
    assert status == 200 and len(body) == 40 * (1 << 15) + 2


def test_body_when_this_process_was_too_busy_to_read_then_that_time_does_not_count(faulty, monkeypatch):
    monkeypatch.setattr(http, "SLOW_S", 1.0)

    async def handle(request):
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, time.sleep, 3.0)
        return await dripping(request, pause_s=0.04, parts=10)

    status, body = sent(faulty, handle)
    assert status == 200 and len(body) == 12


@pytest.mark.parametrize(
    ("tokens", "limit_s"), [(16, 3600.0), (3600, 3600.0), (3601, 3601.0), (32768, 32768.0)]
)
def test_longest_answer_then_an_hour_or_a_second_a_token(tokens, limit_s):
    assert longest_answer_s(SamplingParams(tokens)) == limit_s

"""The gateway's server: keys, bounds, ends of episodes, and what counts as delivered."""

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket

import aiohttp
import pytest

from megatron_rl_corr.rollout.gateway import server
from megatron_rl_corr.rollout.gateway.server import OVERRIDDEN_HEADER, Gateway
from tests.rollout.gateway.agents_model import Servers, episode
from tests.rollout.gateway.scripted_session import SAMPLING, ScriptedSession, answer

LIMIT = 30
"""Seconds that only a hang reaches."""


def chat(text, **fields):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def served(test, **options):
    """Run test(gateway, session, key, http) on a gateway with one episode."""

    async def run():
        async with Gateway(SAMPLING, **options) as gateway, aiohttp.ClientSession() as http:
            session = ScriptedSession()
            await asyncio.wait_for(test(gateway, session, gateway.open_episode(session), http), LIMIT)

    asyncio.run(run())


async def post(http, url, body, **headers):
    """(status, headers, parsed body)."""
    async with http.post(url, json=body, headers=headers) as answer:
        return answer.status, answer.headers, json.loads(await answer.text())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


async def connected(gateway, key, body, *, path="/v1/chat/completions"):
    """(reader, writer) of a connection on which the body has been posted."""
    port = int(gateway.root_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


def test_keys_when_given_in_each_way_then_their_episode_answers():
    async def test(gateway, session, key, http):
        other = ScriptedSession()
        gateway.open_episode(other)
        assert re.fullmatch(r"[0-9a-f]{32}", key)
        path = "/chat/completions"
        for url, headers in (
            (gateway.base_url + path, {"Authorization": f"Bearer {key}"}),
            (gateway.base_url + path, {"x-api-key": key}),
            (f"{gateway.episode_url(key)}/v1{path}", {"Authorization": "Bearer of-somebody"}),
        ):
            status, _, made = await post(http, url, chat("hi"), **headers)
            assert (status, made["choices"][0]["message"]["content"]) == (200, "echo: hi")
        assert len(session.requests) == 3 and other.requests == []

    served(test)


def test_keys_when_missing_or_unknown_then_401_that_is_not_retried():
    async def test(gateway, session, key, http):
        for url in (f"{gateway.base_url}/chat/completions", f"{gateway.base_url}/messages"):
            for headers in ({}, {"x-api-key": key[::-1]}, {"Authorization": "Bearer "}):
                status, answered, made = await post(http, url, chat("hi"), **headers)
                assert status == 401 and answered["x-should-retry"] == "false"
                assert made["error"]["type"] in ("invalid_request_error", "authentication_error")
        async with http.get(f"{gateway.base_url}/models") as answer:
            assert answer.status == 401
        assert session.requests == []

    served(test)


def test_requests_when_they_may_be_asked_again_then_the_answer_does_not_forbid_it():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        status, headers, _ = await post(http, url, chat("again"), **{"x-api-key": key})
        assert status == 503 and "x-should-retry" not in headers
        assert (await post(http, url, chat("again"), **{"x-api-key": key}))[0] == 200

    served(test)


def test_health_when_asked_without_a_key_then_ok():
    async def test(gateway, session, key, http):
        async with http.get(f"{gateway.root_url}/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"})
            assert "Access-Control-Allow-Origin" not in answer.headers

    served(test)


def test_bodies_when_too_large_or_no_json_then_refused_in_the_protocols_form():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        status, _, made = await post(http, url, chat("x" * 2000), **{"x-api-key": key})
        assert (status, made["error"]["code"]) == (413, "request_too_large")
        for text in ("{", "[]", '"text"', "\xff"):
            async with http.post(url, data=text.encode("latin1"), headers={"x-api-key": key}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")
        status, _, made = await post(http, f"{gateway.base_url}/messages", {}, **{"x-api-key": key})
        assert (status, made["type"]) == (400, "error")

    served(test, max_body_bytes=1000)


def test_sampling_when_strict_then_another_policy_is_refused():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        status, _, made = await post(http, url, chat("hi", temperature=0.1), **{"x-api-key": key})
        assert (status, made["error"]["param"]) == (400, "temperature")
        assert "--rollout-gateway-strict" in made["error"]["message"]
        status, _, made = await post(http, url, chat("hi", tool_choice="required"), **{"x-api-key": key})
        assert (status, made["error"]["param"]) == (400, "tool_choice")
        status, headers, _ = await post(http, url, chat("hi", temperature=0.8), **{"x-api-key": key})
        assert status == 200 and OVERRIDDEN_HEADER not in headers

    served(test, strict=True)


def test_sampling_when_overridden_then_a_stream_says_so_too():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        body = chat("hi", presence_penalty=1, logit_bias={"5": 1}, top_k=-1, stream=True)
        async with http.post(url, json=body, headers={"x-api-key": key}) as answer:
            assert answer.headers[OVERRIDDEN_HEADER] == "presence_penalty,logit_bias"
            assert answer.content_type == "text/event-stream"

    served(test)


def test_streams_when_the_policy_is_slow_then_comments_and_pings_come_first():
    async def test(gateway, session, key, http):
        for name, body, alive in (
            ("chat/completions", chat("slow"), b": sampling\n\n"),
            ("messages", chat("slow", max_tokens=9), b'event: ping\ndata: {"type":"ping"}\n\n'),
        ):
            url = f"{gateway.base_url}/{name}"
            async with http.post(url, json=body | {"stream": True}, headers={"x-api-key": key}) as answer:
                text = await answer.read()
            assert text.startswith(alive)
            assert text.count(alive) > 1

    served(test, alive_after_s=0.05)


def test_answers_when_read_then_delivered():
    async def test(gateway, session, key, http):
        for body in (chat("hi"), chat("hi", stream=True), chat("big"), chat("big", stream=True)):
            status = await http.post(
                f"{gateway.base_url}/chat/completions", json=body, headers={"x-api-key": key}
            )
            await status.read()
        assert session.gone == [] and session.cancelled == 0

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_client_when_gone_right_after_the_last_byte_then_delivered(stream):
    """It reads in a thread of its own, and may be gone before the server's loop knows that all is out."""

    def read(gateway, key):
        with socket.create_connection(gateway.root_url.removeprefix("http://").split(":")) as connection:
            body = json.dumps(chat("big", stream=stream)).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            end, tail = (b"0\r\n\r\n", b"") if stream else (b"}}}", b"")
            while not tail.endswith(end):
                tail = (tail + connection.recv(1 << 20))[-16:]

    async def test(gateway, session, key, http):
        for _ in range(5):
            await asyncio.to_thread(read, gateway, key)
        await asyncio.sleep(0.1)  # whatever the server does at the end of a connection
        assert len(session.requests) == 5 and session.gone == []

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_client_when_gone_while_the_policy_samples_then_the_call_is_cancelled(stream):
    async def test(gateway, session, key, http):
        _, writer = await connected(gateway, key, chat("wait", stream=stream))
        await session.asked.wait()
        writer.close()
        await until(lambda: session.cancelled == 1)
        assert session.gone == []

    served(test)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_client_when_gone_while_it_is_answered_then_undelivered(path, stream):
    """The answer is larger than what the kernel takes from a server whose client reads nothing."""

    async def test(gateway, session, key, http):
        body = {"model": "m", "stream": stream}
        body |= {"prompt": "big"} if path == "completions" else {}
        body |= {"input": "big"} if path == "responses" else {}
        if path in ("chat/completions", "messages"):
            body["messages"] = [{"role": "user", "content": "big"}]
        if path == "messages":
            body["max_tokens"] = 9
        _, writer = await connected(gateway, key, body, path=f"/v1/{path}")
        await session.asked.wait()
        await asyncio.sleep(0.2)
        assert session.gone == []  # not yet known
        writer.transport.abort()
        await until(lambda: session.gone)
        assert session.gone == ["a0"]

    served(test)


def server_transports(gateway):
    return [connection.transport for connection in gateway._runner.server.connections]


def test_client_when_gone_before_the_kernel_has_all_of_a_short_answer_then_undelivered():
    async def test(gateway, session, key, http):
        session._answer = lambda request, word, text: ScriptedSession._answer(session, request, "some", text)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", int(gateway.root_url.rpartition(":")[2])))
            body = json.dumps(chat("wait")).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await session.asked.wait()
            (transport,) = server_transports(gateway)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            session.release.set()
            await until(transport.get_write_buffer_size)  # the kernel has a part
            await asyncio.sleep(0.05)
            assert transport.get_write_buffer_size() and session.gone == []
        await until(lambda: session.gone)
        assert session.gone == ["a0"]

    served(test)


def test_client_when_gone_as_the_answer_comes_then_undelivered(caplog):
    """The connection ends between the session's answer and its writing."""

    async def test(gateway, session, key, http):
        def answered(request, word, text):
            (transport,) = server_transports(gateway)
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, transport.abort)
            return ScriptedSession._answer(session, request, word, text)

        session._answer = answered
        _, writer = await connected(gateway, key, chat("hi"))
        await until(lambda: session.gone)
        assert session.gone == ["a0"]
        writer.close()
        await asyncio.sleep(0.05)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    served(test)


def test_episode_when_closed_then_its_requests_end_and_its_key_is_unknown():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        waiting = asyncio.ensure_future(post(http, url, chat("wait"), **{"x-api-key": key}))
        await session.asked.wait()
        gateway.close_episode(key)
        status, headers, made = await waiting
        assert (status, made["error"]["code"]) == (401, "invalid_api_key")
        assert headers["x-should-retry"] == "false"
        assert session.cancelled == 1 and session.gone == []
        assert (await post(http, url, chat("hi"), **{"x-api-key": key}))[0] == 401

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_episode_when_closed_as_an_answer_comes_then_it_is_no_turn_of_what_the_episode_gives(stream):
    """The turn is made, and the harness, which has ended, never gets it."""

    async def test(gateway, _, key, http):
        made = episode(Servers(("a<|end|>", "stop", 3)))
        key = gateway.open_episode(made)
        reader, writer = await connected(gateway, key, chat("hi", stream=stream))
        while not list(made.tree.turns()):
            await asyncio.sleep(0)
        gateway.close_episode(key)
        branches = await made.finish()
        assert b" 401 " in await reader.readline()
        assert branches == [] and made.counts.undelivered == 1
        writer.close()

    served(test)


def test_episode_when_closed_under_a_stream_then_it_ends_with_an_error():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        async with http.post(url, json=chat("wait", stream=True), headers={"x-api-key": key}) as answer:
            assert await answer.content.readline() == b": sampling\n"
            gateway.close_episode(key)
            assert b'"invalid_api_key"' in await answer.read()

    served(test, alive_after_s=0.05)


def test_episode_when_its_session_failed_then_closing_it_raises():
    async def test(gateway, session, key, http):
        url = f"{gateway.base_url}/chat/completions"
        status, headers, made = await post(http, url, chat("fail"), **{"x-api-key": key})
        assert (status, made["error"]["type"], headers["x-should-retry"]) == (500, "server_error", "false")
        assert "no server is left" not in made["error"]["message"]
        with pytest.raises(RuntimeError, match="no server is left"):
            gateway.close_episode(key)

    served(test)


def test_episodes_when_many_at_once_then_each_is_asked_by_its_own_key():
    async def test(gateway, session, key, http):
        sessions = [ScriptedSession() for _ in range(256)]
        keys = [gateway.open_episode(one) for one in sessions]
        url = f"{gateway.base_url}/chat/completions"
        asked = [asyncio.ensure_future(post(http, url, chat("wait"), **{"x-api-key": key})) for key in keys]
        await until(lambda: all(one.requests for one in sessions))  # all are open at once
        for one in sessions:
            one.release.set()
        assert {status for status, *_ in await asyncio.gather(*asked)} == {200}
        assert all(len(one.requests) == 1 for one in sessions)

    async def run():
        connector = aiohttp.TCPConnector(limit=0)
        async with Gateway(SAMPLING) as gateway, aiohttp.ClientSession(connector=connector) as http:
            await asyncio.wait_for(test(gateway, None, None, http), LIMIT)

    asyncio.run(run())


def test_logs_when_all_goes_wrong_then_neither_keys_nor_bodies_are_in_them(caplog):
    async def test(gateway, session, key, http):
        for text in ("fail", "long", "hi"):
            for url in (
                f"{gateway.episode_url(key)}/v1/chat/completions",
                f"{gateway.episode_url(key)}/nothing",
            ):
                await post(http, url, chat(f"{text} secret-body"), **{"x-api-key": key})
        _, writer = await connected(gateway, key, chat("wait secret-body"))
        await until(lambda: any("wait" in one.messages[0]["content"] for one in session.requests))
        writer.close()
        await until(lambda: session.cancelled)
        with contextlib.suppress(RuntimeError):
            gateway.close_episode(key)
        assert key not in caplog.text and "secret-body" not in caplog.text
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    with caplog.at_level(logging.DEBUG):
        served(test)


class CallingSession(ScriptedSession):
    """Answers by one call with these arguments, JSON text."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments = arguments

    async def chat(self, request):
        self.requests.append(request)
        function = {"name": "add", "arguments": self.arguments}
        calls = [{"id": "call_7", "type": "function", "function": function}]
        return [answer("7", "", sampled="x", reason="tool_calls", tool_calls=calls)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("value", ["123456789012345678901234567890", "[" * 300 + "]" * 300])
def test_calls_when_their_arguments_are_what_few_can_write_then_answered_and_known_when_sent_back(
    path, value
):
    async def test(gateway, _, key, http):
        session = CallingSession(arguments=f'{{"a":{value}}}')
        key, said = gateway.open_episode(session), {"messages": chat("hi")["messages"], "max_tokens": 9}
        body = {"model": "m"} | ({"input": "hi"} if path == "/v1/responses" else said)
        for stream in (False, True):
            async with http.post(
                gateway.root_url + path, json=body | {"stream": stream}, headers={"x-api-key": key}
            ) as answered:
                assert answered.status == 200
                made = await answered.text()
        assert session.gone == [] and len(session.requests) == 2
        if path == "/v1/messages":  # the only ones that send values
            assert "message_stop" in made
            block = {
                "type": "tool_use",
                "id": "call_7",
                "name": "add",
                "input": json.loads(session.arguments),
            }
            messages = [*body["messages"], {"role": "assistant", "content": [block]}, *body["messages"]]
            status, _, _ = await post(
                http, gateway.root_url + path, body | {"messages": messages}, **{"x-api-key": key}
            )
            [call] = session.requests[-1].messages[1]["tool_calls"]
            assert status == 200 and call["function"]["arguments"] == session.arguments

    served(test)


def test_answer_when_it_can_not_be_written_then_not_repeated_and_the_run_has_the_cause():
    async def test(gateway, _, key, http):
        session = CallingSession(arguments='{"a": "\ud83d"}')
        for stream in (False, True):
            key = gateway.open_episode(session)
            async with http.post(
                f"{gateway.base_url}/chat/completions",
                json=chat("hi", stream=stream),
                headers={"x-api-key": key},
            ) as answered:
                made = await answered.text()
            assert "server_error" in made
            assert stream or answered.headers["x-should-retry"] == "false"
            with pytest.raises(UnicodeEncodeError):
                gateway.close_episode(key)

    served(test)


def test_gateway_when_closed_then_open_requests_end():
    async def run():
        session = ScriptedSession()
        gateway = Gateway(SAMPLING)
        await gateway.start()
        key = gateway.open_episode(session)
        async with aiohttp.ClientSession() as http:
            url = f"{gateway.base_url}/chat/completions"
            waiting = asyncio.ensure_future(post(http, url, chat("wait"), **{"x-api-key": key}))
            await session.asked.wait()
            await gateway.close()
            assert (await waiting)[0] == 401
        assert session.cancelled == 1

    asyncio.run(asyncio.wait_for(run(), LIMIT))


async def sent(gateway, text):
    """What a connection is answered on which these bytes were sent."""
    port = int(gateway.root_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    answered = await reader.read(2000)
    writer.close()
    return answered.decode()


def test_logs_when_a_request_is_no_http_then_its_key_is_not_quoted(caplog):
    async def test(gateway, session, key, http):
        end = f"Host: x\r\nx-api-key: {key}\r\n"
        for text in (
            f"GET /episodes/{key}/v1/models?{'a' * 9000} HTTP/1.1\r\n\r\n",
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\x00\r\n\r\n",
            f"POST /v1/messages HTTP/1.1\r\n{end}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            f"GET /v1/models HTTP/9.{key}\r\n\r\n",
        ):
            assert " 400 " in (await sent(gateway, text.encode())).partition("\r\n")[0], text[:80]
        assert key not in caplog.text and caplog.records == []
        url = f"{gateway.base_url}/chat/completions"
        assert (await post(http, url, chat("hi"), **{"x-api-key": key}))[0] == 200

    caplog.set_level(logging.DEBUG, "megatron_rl_corr")
    served(test)


def test_bodies_when_compressed_then_refused_and_nothing_is_unpacked():
    async def test(gateway, session, key, http):
        packed, form = gzip.compress(b"{" + bytes(1 << 20) + b"}"), {"Content-Encoding": "gzip"}
        for path in ("chat/completions", "messages", "messages/count_tokens"):
            headers = {"x-api-key": key} | form
            async with http.post(f"{gateway.base_url}/{path}", data=packed, headers=headers) as answer:
                assert (answer.status, "compressed" in await answer.text()) == (415, True)
        assert session.requests == []

    served(test)


def test_body_when_it_does_not_come_then_its_connection_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(server, "BODY_S", 0.2)

    async def test(gateway, session, key, http):
        head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 99\r\n\r\n{{"
        assert (await sent(gateway, head.encode())).startswith("HTTP/1.1 408 ")
        assert session.requests == []

    served(test)


def test_pages_of_browsers_when_any_key_opens_an_episode_then_they_open_none():
    opened, ended = [], []

    async def test(gateway, session, key, http):
        async def end(key, session):
            ended.append(key)
            return {}

        gateway._ended = end
        url, page = f"{gateway.base_url}/chat/completions", {"Origin": "https://page.example"}
        status, headers, _ = await post(http, url, chat("hi"), **{"x-api-key": "made-up"}, **page)
        assert status == 403 and opened == [] and "Access-Control-Allow-Origin" not in headers
        async with http.options(url, headers=page | {"Access-Control-Request-Method": "POST"}) as answer:
            assert answer.status == 405 and "Access-Control-Allow-Origin" not in answer.headers
        assert (await post(http, url, chat("hi"), **{"x-api-key": "own"}))[0] == 200 and opened == ["own"]
        async with http.delete(f"{gateway.root_url}/episodes/own", headers=page) as answer:
            assert answer.status == 404 and ended == []
        async with http.delete(f"{gateway.root_url}/episodes/own") as answer:
            assert answer.status == 200 and ended == ["own"]

    async def never(key, session):
        raise AssertionError

    served(test, opens=lambda key: opened.append(key) or ScriptedSession(), ended=never)


def test_episode_when_asked_by_anothers_key_then_nothing_of_it_is_told():
    async def test(gateway, session, key, http):
        other = gateway.open_episode(ScriptedSession())
        body = {"model": "m", "input": "secret of one"}
        _, _, made = await post(http, f"{gateway.base_url}/responses", body, **{"x-api-key": key})
        assert "secret of one" in json.dumps(made)
        port = int(gateway.root_url.rpartition(":")[2])
        for path in (
            f"/v1/responses/{made['id']}",
            f"/episodes/{other}/v1/responses/{made['id']}",
            f"/episodes/{other}/v1/../../{key}/v1/responses/{made['id']}",
            f"/episodes/{other}%2f..%2f{key}/v1/responses/{made['id']}",
            "/v1/models/%0d%0aSet-Cookie:%20a=b",
        ):
            text = f"GET {path} HTTP/1.1\r\nHost: x:{port}\r\nx-api-key: {other}\r\nConnection: close\r\n\r\n"
            answered = await sent(gateway, text.encode())
            assert "secret of one" not in answered and "\r\nSet-Cookie" not in answered, path
        body = {"model": "m", "input": "go on", "previous_response_id": made["id"]}
        status, _, told = await post(http, f"{gateway.base_url}/responses", body, **{"x-api-key": other})
        assert status in (400, 404) and "secret of one" not in json.dumps(told)

    served(test)


def test_headers_when_fields_hold_ends_of_lines_then_the_answer_has_no_header_of_theirs():
    async def test(gateway, session, key, http):
        line = "a\r\nSet-Cookie: a=b"
        tool = {"type": "function", "function": {"name": line, "strict": True}}
        body = chat("hi", model=line, logit_bias={line: 1}, tools=[tool], user=line)
        for one in (
            body,
            body | {line: 1},
            body | {"stream": True},
            body | {"chat_template_kwargs": {line: 1}},
        ):
            _, headers, _ = await raw(http, f"{gateway.base_url}/chat/completions", one, key)
            assert "Set-Cookie" not in headers
            assert not any("\n" in value or "\r" in value for value in headers.values())

    async def raw(http, url, body, key):
        async with http.post(url, json=body, headers={"x-api-key": key, "X-Request-Id": "b c"}) as answer:
            return answer.status, answer.headers, await answer.text()

    served(test)

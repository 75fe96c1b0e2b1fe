"""A door before a rollout server: it hands everything on, and can be slow or answer nonsense. For tests."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading

import aiohttp
from aiohttp import web

NONSENSE = (
    b"<html>502 Bad Gateway</html>",
    b"",
    b"{",
    b"[]",
    b'{"text": 1}',
    b"null",
    b'{"meta_info": {}, "output_ids": [-1]}',
    b"[" * 20000,
    b'{"output_ids": [1, 2], "meta_info": {"finish_reason": null}}',
)
"""Bodies with status 200 in place of samples."""
DRIP_S = 0.2
SAMPLES = ("/generate", "/inference/v1/generate")


class Door:
    """Listens at `url` until closed, on a thread of its own.

    target: the server's address; it may change. delay_s: added to each answer. nonsense: samples are none.
    spread_s: an answer to a request for samples comes in pieces of 16 bytes, over so many seconds. losing: it
    is made, and the connection cut. met: {path: what is called, once, before the server gets the request}.
    spoiled: {path: whether the server gets the request}, of requests whose next answer alone is a proxy's
    page. failing: {path: (HTTP status, or None for a cut connection; whether the server gets the
    request)}, the same. changed: changed(path, body), what the server gets in the place of a body.
    dripping: {path: "head" or "body"}, of answers that come byte by byte without end from there on, one every
    DRIP_S; the server gets the request. feigns: /v1/loads tells of progress, whatever there is.
    """

    def __init__(self, target: str, changed=lambda path, body: body):
        self.target, self.delay_s, self.nonsense, self.spoiled, self.failing = target, 0.0, False, {}, {}
        self.spread_s, self.losing, self.met = 0.0, False, {}
        self.dripping, self.feigns, self._numbers = {}, False, itertools.count(1)
        self._changed = changed
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="door", daemon=True).start()
        self._ready.wait()

    def close(self) -> None:
        """Listen no more."""
        for closing in (self._session.close(), self._runner.cleanup()):
            asyncio.run_coroutine_threadsafe(closing, self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()

    async def _open(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.delay_s)
        body = self._changed(request.path, await request.read())
        if self.nonsense and request.path in SAMPLES:
            return web.Response(body=self._random.choice(NONSENSE), content_type="application/json")
        self.met.pop(request.path, lambda: None)()
        is_spoiled, is_sent = request.path in self.spoiled, self.spoiled.pop(request.path, True)
        if not is_sent:
            return web.Response(body=NONSENSE[0])
        failure, is_sent = self.failing.pop(request.path, (200, True))
        if not is_sent:
            return self._failed(request, failure)
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length")
        }
        try:
            async with self._session.request(
                request.method,
                self.target + request.path_qs,
                data=body,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                found = await answer.read()
                if self.feigns and request.path == "/v1/loads":
                    found = self._feigned(found)
                if request.path in self.dripping:
                    return await self._drip(request, self.dripping[request.path])
                answered = web.Response(status=answer.status, body=found)
                answered.content_type = answer.content_type
                if self.losing and request.path in SAMPLES:
                    failure = None
                if failure != 200:
                    return self._failed(request, failure)
                if self.spread_s and request.path in SAMPLES:
                    return await self._spread(request, answered)
                return web.Response(body=NONSENSE[0]) if is_spoiled else answered
        except aiohttp.ClientError:
            return self._failed(request, None)  # as a server that is gone

    async def _spread(self, request: web.Request, answered: web.Response) -> web.StreamResponse:
        slow = web.StreamResponse(status=answered.status, headers={"Content-Type": answered.content_type})
        pieces = [answered.body[at : at + 16] for at in range(0, len(answered.body), 16)]
        await slow.prepare(request)
        for piece in pieces:
            await slow.write(piece)
            await asyncio.sleep(self.spread_s / len(pieces))
        await slow.write_eof()
        return slow

    def _feigned(self, loads: bytes) -> bytes:
        answer = json.loads(loads)
        for rank in answer["loads"]:
            number = next(self._numbers)
            rank |= {"num_running_reqs": 1, "num_total_tokens": number, "timestamp": float(number)}
        return json.dumps(answer).encode()

    async def _drip(self, request: web.Request, what: str) -> web.StreamResponse:
        if what == "head":
            request.transport.write(b"HTTP/1.1 200 OK\r\nX-Filler: ")
            while not request.transport.is_closing():
                request.transport.write(b"a")
                await asyncio.sleep(DRIP_S)
            return self._failed(request, None)
        answer = web.StreamResponse()
        answer.content_type = "application/json"
        await answer.prepare(request)
        while not request.transport.is_closing():
            await answer.write(b" ")
            await asyncio.sleep(DRIP_S)
        return answer

    @staticmethod
    def _failed(request: web.Request, status: int | None) -> web.Response:
        if status is None:
            request.transport.close()
        return web.Response(status=status or 502, body=NONSENSE[0])

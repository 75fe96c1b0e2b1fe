"""A proxy before a real server that spoils answers to /generate: their JSON, their bytes, and the
HTTP around them.
"""

import asyncio
import json
import random
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from tests.faults.mutations import BYTES, JUNK, mutated_bytes, mutated_tree, places, written

WRAPPINGS = (
    "well",
    "well",
    "well",
    "well",
    "well",
    "longer",
    "cut",
    "chunks",
    "gzip",
    "endless",
    "nothing",
    "no_http",
    "fails",
)
"""What HTTP makes of a body; "well" is as it should be."""


class Proxy:
    """Spoils each answer in a way of its own, drawn from a seed.

    Attributes:
        url: its address.
        sent: what became of each request to /generate: (the request, wrapping, body).
    """

    def __init__(self, upstream: str, seed: int):
        self._upstream, self._draw = upstream, random.Random(seed)
        self.url, self.sent = "", []

    async def handle(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
            method, path, _ = head.split("\r\n")[0].split(" ")
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("Content-Length", 0)))
            kind = {"Content-Type": "application/json"}
            async with (
                aiohttp.ClientSession(headers=kind) as session,
                session.request(method, self._upstream + path, data=body or None) as answer,
            ):
                status, found = answer.status, await answer.read()
            wrapping = "well"
            if path == "/generate" and status == 200:
                wrapping, found = self._draw.choice(WRAPPINGS), self._spoiled(found)
                self.sent.append((json.loads(body), wrapping, found))
            await self._answer(writer, status, wrapping, found)
        except (OSError, asyncio.IncompleteReadError, aiohttp.ClientError):
            pass
        finally:
            writer.close()

    def _spoiled(self, body):
        draw = self._draw
        if draw.random() < 0.2:
            return body
        if draw.random() < 0.5:
            return mutated_bytes(body, draw.randrange(1 << 16), draw.randrange(1 << 16), draw.choice(BYTES))
        tree = json.loads(body)
        paths = list(places(tree))
        return written(
            mutated_tree(tree, paths, draw.randrange(1 << 16), draw.randrange(1 << 16), draw.choice(JUNK))
        )

    async def _answer(self, writer, status, wrapping, body):
        length, more, found = len(body), "", body
        if wrapping == "nothing":
            return
        if wrapping == "no_http":
            writer.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            return await writer.drain()
        if wrapping == "longer":
            length += 10
        if wrapping == "cut":
            found = body[: len(body) // 2]
        if wrapping == "gzip":
            more = "Content-Encoding: gzip\r\n"
        if wrapping == "fails":
            status = 503
        size = f"Content-Length: {length}\r\n"
        if wrapping in ("chunks", "endless"):
            size = "Transfer-Encoding: chunked\r\n"
            found = b"zz\r\n" + body if wrapping == "chunks" else b""
        writer.write(f"HTTP/1.1 {status} X\r\n{size}{more}Connection: close\r\n\r\n".encode() + found)
        if wrapping == "endless":
            for _ in range(100_000):  # 6 GB, if nobody hangs up
                writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
                await writer.drain()
        await writer.drain()


@asynccontextmanager
async def spoiling(upstream: str, seed: int):
    """A running `Proxy`."""
    assert urlsplit(upstream).scheme == "http"
    proxy = Proxy(upstream, seed)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    try:
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield proxy
    finally:
        server.close()

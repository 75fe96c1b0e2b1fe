"""What asks a gateway in benchmarks/agents.py: conversations as bodies of each protocol, and a process that
sends them with little more work than bytes on sockets.
"""

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

FORK = multiprocessing.get_context("fork")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use it to {name.replace('_', ' ')}; it returns what was found as text.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where."}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "list_folder", "run_tests")
]
CALLED = {"name": "read_file", "arguments": '{"path": "src/main.py"}'}


@dataclass(frozen=True)
class Conversation:
    """An agent's: a task, then answers that are all the same, each followed by something new."""

    system: str
    answer: str
    """Without the call."""
    news: tuple[str, ...]
    """What comes before each turn; the first is the task."""
    calls: bool = False
    """Each answer ends with a call of a tool, and what comes is its result."""


@dataclass(frozen=True)
class Wire:
    """How a conversation goes to the gateway. Example: Wire("streamed", "chat/completions", chat_body)."""

    name: str
    path: str
    body: Callable[[Conversation, int], dict[str, Any]]
    """(conversation, turn from 0) -> the request's."""
    calls: bool = False


def chat_body(told: Conversation, turn: int, **fields: Any) -> dict[str, Any]:
    """Of chat completions."""
    messages = [{"role": "system", "content": told.system}, {"role": "user", "content": told.news[0]}]
    for number, new in enumerate(told.news[1 : turn + 1]):
        answered: dict[str, Any] = {"role": "assistant", "content": told.answer}
        if told.calls:
            call = {"id": f"call_{number}", "type": "function", "function": CALLED}
            messages += [answered | {"tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": new}]
        else:
            messages += [answered, {"role": "user", "content": new}]
    tools = {"tools": TOOLS} if told.calls else {}
    return {"model": "policy", "messages": messages, "temperature": 1.0, **tools, **fields}


def responses_body(told: Conversation, turn: int) -> dict[str, Any]:
    """Of responses, with the whole input."""
    items: list[dict[str, Any]] = [{"role": "user", "content": told.news[0]}]
    for new in told.news[1 : turn + 1]:
        content = [{"type": "output_text", "text": told.answer, "annotations": []}]
        items += [{"type": "message", "role": "assistant", "content": content}]
        items += [{"role": "user", "content": new}]
    return {"model": "policy", "instructions": told.system, "input": items}


def messages_body(told: Conversation, turn: int) -> dict[str, Any]:
    """Of Anthropic's messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": told.news[0]}]
    for new in told.news[1 : turn + 1]:
        messages += [{"role": "assistant", "content": [{"type": "text", "text": told.answer}]}]
        messages += [{"role": "user", "content": new}]
    return {"model": "policy", "max_tokens": 4096, "system": told.system, "messages": messages}


WIRES = (
    Wire("chat completions", "chat/completions", chat_body),
    Wire("with a tool call", "chat/completions", chat_body, calls=True),
    Wire("streamed", "chat/completions", lambda told, turn: chat_body(told, turn, stream=True)),
    Wire("with log-probs", "chat/completions", lambda told, turn: chat_body(told, turn, logprobs=True)),
    Wire("responses", "responses", responses_body),
    Wire("messages", "messages", messages_body),
)


class Callers:
    """A process that asks for many episodes at once, over connections that stay open.

    Args:
        base_url: the gateway's.
        connections: most episodes.
    """

    def __init__(self, base_url: str, connections: int):
        self._pipe, its = FORK.Pipe()
        arguments = (urlsplit(base_url).port, connections, its)
        self._process = FORK.Process(target=_call, args=arguments, daemon=True)
        self._process.start()

    async def ask(self, path: str, body: dict[str, Any], keys: Sequence[str]) -> None:
        """Send one body for each key, and wait for all answers.

        Raises:
            SystemExit: one was not answered with status 200.
        """
        await self._done(_ask_once, path, orjson.dumps(body), keys)

    async def converse(self, tasks: dict[str, dict[str, Any]]) -> None:
        """The conversations of benchmarks/agent_harness.py, of tasks by key."""
        await self._done(_converse, tasks)

    @property
    def seconds(self) -> float:
        """Of the processor, so far."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    async def _done(self, *work: Any) -> None:
        self._pipe.send(work)
        if failure := await asyncio.to_thread(self._pipe.recv):
            raise SystemExit(failure)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class _Connection(asyncio.Protocol):
    """Sends a request, and finds the end of its answer."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def ask(self, path: str, key: str, body: bytes) -> asyncio.Future[bytes]:
        """The body of the answer, as it came."""
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nAuthorization: Bearer {key}\r\n\r\n"
        )
        self._got, self._answer = bytearray(), asyncio.get_running_loop().create_future()
        self._transport.write(head.encode() + body)
        return self._answer

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(RuntimeError("the gateway hung up"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head, body = bytes(self._got[:end]).lower(), bytes(self._got[end + 4 :])
        if b"transfer-encoding: chunked" in head:
            whole = body.endswith(b"\r\n0\r\n\r\n")
        else:
            whole = len(body) >= int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        if not whole:
            return
        if head.startswith(b"http/1.1 200"):
            self._answer.set_result(body)
        else:
            self._answer.set_exception(RuntimeError(f"answered {body[:500].decode(errors='replace')}"))


async def _ask_once(connections: Sequence[_Connection], path: str, body: bytes, keys: Sequence[str]) -> None:
    await asyncio.gather(*(one.ask(path, key, body) for one, key in zip(connections, keys, strict=False)))


async def _converse(connections: Sequence[_Connection], tasks: dict[str, dict[str, Any]]) -> None:
    async def one(connection: _Connection, key: str, task: dict[str, Any]) -> None:
        messages = list(task["messages"])
        for _ in range(task["turns"]):
            body = orjson.dumps({"model": "policy", "messages": messages})
            choice = orjson.loads(await connection.ask("chat/completions", key, body))["choices"][0]
            if choice["finish_reason"] != "stop":
                return
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            messages.append({"role": "user", "content": task["reply"]})

    pairs = zip(connections, tasks.items(), strict=False)
    await asyncio.gather(*(one(connection, key, task) for connection, (key, task) in pairs))


def _call(port: int, count: int, pipe: Any) -> None:
    async def calling() -> None:
        loop = asyncio.get_running_loop()
        connections = [
            (await loop.create_connection(_Connection, "127.0.0.1", port))[1] for _ in range(count)
        ]
        while True:
            work, *given = await asyncio.to_thread(pipe.recv)
            try:
                await work(connections, *given)
                pipe.send("")
            except RuntimeError as error:
                pipe.send(str(error))

    asyncio.run(calling())

"""The HTTP server that agents ask: one API key is one episode.

An answer is delivered once the kernel has taken its last byte, on a connection that has not ended by then:
what a client that goes later has read can't be known. Every other answer is undelivered:
`EpisodeSession.undelivered` is called for it, or the session's own call is cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megatron_rl_corr.data import json_text
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway import anthropic, openai_messages, openai_responses
from megatron_rl_corr.rollout.gateway.anthropic import MessageExchange
from megatron_rl_corr.rollout.gateway.bodies import Exchange, Memory, event, json_bytes
from megatron_rl_corr.rollout.gateway.calls import is_nested
from megatron_rl_corr.rollout.gateway.openai_chat import ChatExchange
from megatron_rl_corr.rollout.gateway.openai_completions import TextExchange
from megatron_rl_corr.rollout.gateway.openai_responses import ResponseExchange
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, EpisodeSession, GatewayError

OVERRIDDEN_HEADER = "x-rollout-overridden"
NO_RETRY = {"x-should-retry": "false"}
"""The official clients repeat a request that failed by its status, unless the server says no: it does but
where they should ask again.
"""
HEALTH, VERSION = "health", "v1"
MOST_NESTED = 500
"""Arrays and objects of a body within each other: what walks through them must come to an end."""
STREAM_BYTES = 1 << 16
"""Events are written in portions of this size."""
BODY_S = 120.0
"""Seconds in which a body must have come."""


class _WithoutRequests(logging.Filter):
    """Leaves out the traceback of a connection that sent no HTTP: it quotes the request, which has a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_CONNECTIONS = logging.getLogger(f"{__name__}.connections")
_CONNECTIONS.addFilter(_WithoutRequests())


@dataclass(frozen=True)
class ApiForm:
    """How a protocol says errors, and that it is alive."""

    error: Callable[[GatewayError], dict[str, Any]]
    error_event: Callable[[GatewayError], bytes]
    alive: bytes
    """What a stream gets while the policy samples."""


OPENAI = ApiForm(
    openai_messages.error_body, lambda error: event(openai_messages.error_body(error)), b": sampling\n\n"
)
OPENAI_RESPONSES = ApiForm(
    openai_responses.error_body,
    lambda error: event(
        # Without `error` the official client takes it for an event as any other, and raises nothing.
        {"type": "error", "sequence_number": 0, "code": error.code, "message": error.message}
        | {"param": error.param, **openai_responses.error_body(error)},
        "error",
    ),
    b": sampling\n\n",
)
ANTHROPIC = ApiForm(
    anthropic.error_body,
    lambda error: event(anthropic.error_body(error), "error"),
    event({"type": "ping"}, "ping"),
)
PROTOCOLS: dict[str, tuple[Callable[[Any, Memory], Exchange], ApiForm]] = {
    "chat/completions": (ChatExchange, OPENAI),
    "completions": (TextExchange, OPENAI),
    "responses": (ResponseExchange, OPENAI_RESPONSES),
    "messages": (MessageExchange, ANTHROPIC),
}
"""What is posted behind /v1/."""


@dataclass(eq=False)
class _OpenEpisode:
    session: EpisodeSession
    memory: Memory
    closed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failure: BaseException | None = None
    replies: set[_Reply] = field(default_factory=set)
    """Those that are not delivered yet."""


class Gateway:
    """Serves open episodes, on the event loop that starts it.

    Args:
        sampling: of the run; a request that asks for another temperature and so on gets this one.
        host: address to listen at.
        port: 0: a free one.
        strict: such a request is refused instead.
        model_name: of the one model that is listed. Requests may name any other: it is what they get back.
        max_body_bytes: larger requests are refused.
        alive_after_s: seconds without an event after which a stream is told that the policy still samples.
        opens: makes the session of a key that is not known; None: such requests are answered 401.
        ended: awaited where an episode is ended by DELETE /episodes/KEY, and gives the answer; None: no
            request ends one.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        strict: bool = False,
        model_name: str = "policy",
        max_body_bytes: int = 64 << 20,
        alive_after_s: float = 15.0,
        opens: Callable[[str], EpisodeSession] | None = None,
        ended: Callable[[str, EpisodeSession], Awaitable[dict[str, Any]]] | None = None,
    ):
        self._opens, self._ended = opens, ended
        self._sampling, self._strict, self._model = sampling, strict, model_name
        self._host, self._port, self._alive_after_s = host, port, alive_after_s
        self._episodes: dict[str, _OpenEpisode] = {}
        self._bytes = max_body_bytes
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen. What there is by now is left out of later garbage collections: a look at all that a trainer
        has loaded keeps the event loop for 0.3 s, and requests make enough for many.

        Raises:
            OSError: the port is taken.
        """
        gc.collect()
        gc.freeze()
        application = web.Application(client_max_size=self._bytes, middlewares=[self._errors])
        for prefix in (f"/{VERSION}", f"/episodes/{{key}}/{VERSION}"):
            for name, (exchange, form) in PROTOCOLS.items():
                application.router.add_post(f"{prefix}/{name}", self._asked(exchange, form))
            application.router.add_get(prefix + "/responses/{id}", self._response)
            application.router.add_post(prefix + "/messages/count_tokens", self._count)
            application.router.add_get(f"{prefix}/models", self._models)
            application.router.add_get(prefix + "/models/{id:.+}", self._one_model)
        application.router.add_get(f"/{HEALTH}", self._health)
        if self._ended is not None:
            application.router.add_delete("/episodes/{key}", self._delete)
        # No log of accesses: paths have keys. A handler is cancelled where its client goes. Nothing is
        # unpacked: 200 kB would keep the loop for seconds.
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_CONNECTIONS,
            auto_decompress=False,
            handler_cancellation=True,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        self._port = self._runner.addresses[0][1]

    @property
    def base_url(self) -> str:
        """For OpenAI's clients, with /v1."""
        return f"{self.root_url}/{VERSION}"

    @property
    def root_url(self) -> str:
        """For Anthropic's clients, which add /v1 themselves."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def episode_url(self, key: str) -> str:
        """As root_url, with the key in it, for clients that have no place for a key."""
        return f"{self.root_url}/episodes/{key}"

    def open_episode(self, session: EpisodeSession, sampling: SamplingParams | None = None) -> str:
        """A new key, by which the session is asked from now on; call it on the loop that serves.

        Args:
            session: answers.
            sampling: how it samples; None: as the run, and an evaluation may sample in another way.
        """
        key = secrets.token_hex(16)
        self._episodes[key] = self._opened(session, sampling or self._sampling)
        return key

    def _opened(self, session: EpisodeSession, sampling: SamplingParams) -> _OpenEpisode:
        return _OpenEpisode(session, Memory(sampling, session.variables))

    def close_episode(self, key: str) -> None:
        """Forget the key, and cancel its requests; they and later ones are answered 401. What is answered and
        not delivered by now is undelivered when this returns.

        Raises:
            Exception: what the session raised in a request, other than GatewayError; the harness was
                answered 500.
        """
        episode = self._episodes.pop(key)
        episode.closed.set_result(None)
        for reply in episode.replies:
            reply.undo()
        if episode.failure is not None:
            raise episode.failure

    async def close(self) -> None:
        """Close all episodes and connections."""
        for episode in self._episodes.values():
            episode.closed.set_result(None)
        self._episodes.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _episode(self, request: web.Request) -> _OpenEpisode:
        if self._opens is not None and "Origin" in request.headers:
            # A page in a browser of this host could ask by a key that it makes up.
            raise GatewayError(403, "browser", "Pages in browsers are not answered.")
        given = request.match_info.get("key") or request.headers.get("x-api-key")
        authorization = request.headers.get("Authorization", "")
        if given is None and authorization.lower().startswith("bearer "):
            given = authorization[len("bearer ") :].strip()
        if given is None:
            raise GatewayError(
                401, "invalid_api_key", "You didn't provide an API key; it names the episode that asks."
            )
        if given not in self._episodes and self._opens is not None:
            self._episodes[given] = self._opened(self._opens(given), self._sampling)
        if given not in self._episodes:
            raise GatewayError(
                401, "invalid_api_key", "Incorrect API key provided: no episode with this key is under way."
            )
        return self._episodes[given]

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors in the protocol's form."""
        form = next((made for end, (_, made) in PROTOCOLS.items() if f"/{end}" in request.path), OPENAI)
        try:
            return await handler(request)
        except GatewayError as error:
            return _error_response(form, error)
        except web.HTTPRequestEntityTooLarge:
            error = GatewayError(
                413, "request_too_large", f"The body must not have more than {self._bytes} bytes."
            )
        except web.HTTPException as raised:  # no such path, or method
            text = f"Invalid URL ({request.method} {request.path})"
            error = GatewayError(raised.status, "unknown_url", text)
        return _error_response(form, error)

    def _asked(self, exchange: Callable[[Any, Memory], Exchange], form: ApiForm) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            episode = self._episode(request)
            asked = exchange(await _json_object(request), episode.memory)
            overridden = asked.request.overridden
            if overridden and self._strict:
                raise GatewayError(
                    400,
                    "unsupported_parameter",
                    f"'{overridden[0]}' differs from the run's, by which all is sampled; leave it out, or "
                    "start the run without --rollout-gateway-strict to have it ignored.",
                    param=overridden[0],
                )
            headers = {OVERRIDDEN_HEADER: ",".join(overridden)} if overridden else {}
            return await _Reply(request, episode, asked, form, headers, self._alive_after_s).run()

        return handler

    async def _response(self, request: web.Request) -> web.Response:
        responses, label = self._episode(request).memory.responses, request.match_info["id"]
        if label not in responses:
            raise GatewayError(404, "not_found", f"Response with id '{label}' not found.")
        return _json_response(responses[label][0])

    async def _models(self, request: web.Request) -> web.Response:
        self._episode(request)
        pages = {"first_id": self._model, "last_id": self._model, "has_more": False}
        return _json_response({"object": "list", "data": [_model(self._model)], **pages})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._episode(request)
        return _json_response(_model(request.match_info["id"]))

    async def _count(self, request: web.Request) -> web.Response:
        episode = self._episode(request)
        body = await _json_object(request)
        asked = MessageExchange({**body, "max_tokens": 1}, episode.memory).request
        return _json_response({"input_tokens": await episode.session.count(asked)})

    async def _delete(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        if key not in self._episodes or "Origin" in request.headers:
            raise GatewayError(404, "not_found", "No episode with this key is under way.")
        session = self._episodes[key].session
        self.close_episode(key)
        return _json_response(await self._ended(key, session))

    async def _health(self, request: web.Request) -> web.Response:
        return _json_response({"status": "ok"})


class _Reply:
    """One request under way: the session is asked, and its answers are written to the connection."""

    def __init__(
        self,
        request: web.Request,
        episode: _OpenEpisode,
        asked: Exchange,
        form: ApiForm,
        headers: dict[str, str],
        alive_after_s: float,
    ):
        self._request, self._episode, self._asked, self._form = request, episode, asked, form
        self._headers, self._alive_after_s = headers, alive_after_s
        self._stream: web.StreamResponse | None = None
        self._answering: asyncio.Future[Sequence[Answer]] | None = None
        self._undone = False

    async def run(self) -> web.StreamResponse:
        """The response, all of it written."""
        session = self._episode.session
        ask = session.chat if isinstance(self._asked.request, ChatRequest) else session.text
        answering = self._answering = asyncio.ensure_future(ask(self._asked.request))
        self._episode.replies.add(self)
        delivered = False
        try:
            answers = await self._answers(answering)
            response = await self._written(answers)
            delivered = True
            return response
        except GatewayError as error:
            if self._stream is None:
                raise
            return await self._end_stream([self._form.error_event(error)])
        except ConnectionError:  # the client has gone, and nobody reads what is returned
            return web.Response()
        finally:
            self._episode.replies.discard(self)
            if not delivered:
                self.undo()

    async def _answers(self, answering: asyncio.Future[Sequence[Answer]]) -> Sequence[Answer]:
        """What the session answers; a stream is told meanwhile that it lives."""
        closed = self._episode.closed
        while not answering.done() and not closed.done():
            await asyncio.wait(
                {answering, closed},
                timeout=self._alive_after_s if self._asked.streams else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not answering.done() and not closed.done():
                await (await self._begun_stream()).write(self._form.alive)
        if closed.done():
            raise GatewayError(401, "invalid_api_key", "The episode with this key has ended.")
        error = answering.exception()
        if isinstance(error, GatewayError):
            raise error
        if error is not None:
            raise GatewayError(500, "server_error", "The policy could not be asked; the run has the cause.")
        return answering.result()

    async def _written(self, answers: Sequence[Answer]) -> web.StreamResponse:
        try:
            return await self._write(answers)
        except (GatewayError, ConnectionError):
            raise
        except Exception as error:  # official clients would repeat the request, as if nothing were wrong
            self._episode.failure = self._episode.failure or error
            what = "The answer can't be written; the run has the cause."
            raise GatewayError(500, "server_error", what) from error

    async def _write(self, answers: Sequence[Answer]) -> web.StreamResponse:
        if self._asked.streams:
            return await self._end_stream(self._asked.events(answers))
        response = _json_response(self._asked.body(answers), headers=self._headers)
        self._wait_for_the_kernel()
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def _begun_stream(self) -> web.StreamResponse:
        if self._stream is None:
            self._stream = web.StreamResponse(
                headers=self._headers | {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            self._wait_for_the_kernel()
            await self._stream.prepare(self._request)
        return self._stream

    async def _end_stream(self, events: Any) -> web.StreamResponse:
        stream, waiting = await self._begun_stream(), bytearray()
        for portion in events:
            if len(waiting) >= STREAM_BYTES:  # the last event goes with the end: clients leave after it
                await stream.write(bytes(waiting))
                waiting.clear()
            waiting += portion
        await stream.write_eof(bytes(waiting))
        return stream

    def _wait_for_the_kernel(self) -> None:
        """From now on a write returns once the kernel has all of it."""
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(high=0)

    def undo(self) -> None:
        """Cancel the session's call, or take its answers back, once. Nothing is awaited: this task may be
        cancelled again, as its connection ends.
        """
        if self._undone:
            return
        self._undone = True
        if self._answering.done():
            self._take_back(self._answering)
        else:
            self._answering.cancel()
            self._answering.add_done_callback(self._take_back)

    def _take_back(self, answering: asyncio.Future[Sequence[Answer]]) -> None:
        """What it has answered is undelivered, what it raised is kept."""
        if answering.cancelled():
            return
        error = answering.exception()
        if error is None:
            self._episode.session.undelivered(answering.result())
        elif not isinstance(error, GatewayError) and self._episode.failure is None:
            self._episode.failure = error


def _model(name: str) -> dict[str, Any]:
    """As OpenAI and Anthropic have it: clients leave out what they do not know."""
    made = {"id": name, "object": "model", "created": 0, "owned_by": "rollout"}
    epoch = "1970-01-01T00:00:00Z"
    return made | {"type": "model", "display_name": name, "created_at": epoch, "lifecycle": "active"}


async def _json_object(request: web.Request) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise GatewayError(415, "unsupported_encoding", "The body of a request must not be compressed.")
    try:
        async with asyncio.timeout(BODY_S):
            text = await request.read()
    except TimeoutError:
        what = f"The body did not come within {BODY_S:g} s."
        raise GatewayError(408, "request_timeout", what) from None
    try:
        body = json_text.loads(text, unique_keys=False)
    except ValueError as error:
        raise GatewayError(
            400, "invalid_json", f"We could not parse the JSON body of your request: {error}"
        ) from None
    if not isinstance(body, dict):
        raise GatewayError(400, "invalid_json", "The body of a request is a JSON object.")
    for name, value in body.items():
        if is_nested(value, MOST_NESTED - 1):
            what = f"Invalid '{name}': arrays and objects are nested more than {MOST_NESTED} deep."
            raise GatewayError(400, "invalid_value", what, param=name)
    return body


def _json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=json_bytes(content), status=status, headers=headers, content_type="application/json"
    )


def _error_response(form: ApiForm, error: GatewayError) -> web.Response:
    headers = None if error.status == 503 else NO_RETRY
    return _json_response(form.error(error), status=error.status, headers=headers)

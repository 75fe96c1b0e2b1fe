"""A reward that a server computes: samples are posted to an address in batches, for a list of numbers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import orjson

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.reward_input import RewardInput
from megatron_rl_corr.data.reward_value import checked_parts
from megatron_rl_corr.engines.errors import SampleFailure, body_start, shown
from megatron_rl_corr.engines.http import UNPACKED, TooLong, checked_key, read_body
from megatron_rl_corr.engines.local_faults import local_fault
from megatron_rl_corr.engines.secrets import for_message, keep_secret
from megatron_rl_corr.events import EVENTS

FLAG = "`reward_url`"
WAIT_S = 0.05
"""A batch that is not full is sent so long after its first sample."""
IN_FLIGHT = 8
"""Batches at an address at the same time."""
RETRIES = 4
"""Attempts after a failed one, 0.5, 1, 2, 4 seconds later, and up to half as much more."""
MAX_ANSWER = 4 << 20
"""Bytes of an answer."""
LEAST_SECRET = 8
"""Characters of a value in an address that may be a secret: a shorter one, such as a number,
may be anywhere.
"""
LOCAL_PAUSE_S = 0.5
"""Between attempts while this process itself can reach nobody."""
START_LIMIT_S = 10.0
"""For the first answer of an address."""


@dataclass(frozen=True)
class _Waiting:
    """A sample that is to be sent."""

    body: bytes
    parts: asyncio.Future[dict[str, float]]


class _Failed(Exception):
    """An attempt failed. retry: another may do better; local: this process could reach nobody."""

    def __init__(self, text: str, *, retry: bool, local: bool = False):
        super().__init__(for_message(text))
        self.retry, self.local = retry, local


class RewardURL:
    """One address. Use and close it on one event loop, which encodes each sample as it ends and never waits.

    The request is POST {"samples": [{"prompt": ..., "response": ..., "label": ..., ...}, ...]}, with the
    fields of `RewardInput`; the answer a list of numbers, or of dicts as a function may return them, in the
    order of the samples.

    Args:
        spec: with the address.
        batch: samples of a request, at most.
        limit_s: seconds until a batch must have its answer, attempts after failed ones included.
        api_key: sent as a bearer token; never in an error message.
    """

    def __init__(self, spec: RewardSpec, *, batch: int, limit_s: float, api_key: str | None):
        self._spec, self._batch, self._limit_s, self._key = spec, batch, limit_s, checked_key(api_key)
        query = urlsplit(spec.source).query  # may hold a secret
        keep_secret(
            self, self._key, query, *(value for _, value in parse_qsl(query) if len(value) >= LEAST_SECRET)
        )
        self._shown = f"{FLAG} {urlsplit(spec.source)._replace(query='').geturl()}"
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task] = set()
        self._places = asyncio.Semaphore(IN_FLIGHT)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Post an empty list, and look at nothing but whether somebody answers who may be asked.

        Raises:
            ValueError: nobody does, or the answer says that the address or the key is wrong.
        """
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            headers=headers | UNPACKED,
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            # A server closes idle connections, and a batch that meets a closing one would be sent twice.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                status, body = await self._post(b'{"samples":[]}')
        except (_Failed, TimeoutError) as failure:
            await self.close()
            why = failure if isinstance(failure, _Failed) else f"no answer within {START_LIMIT_S:g} s"
            raise ValueError(
                f"{self._shown}: {why}; start its server first, or give its right address"
            ) from None
        if 300 <= status < 400 or status in (401, 403, 404, 405):
            await self.close()
            raise ValueError(f"{self._shown} answered {self._told(status, body)}; {_remedy(status)}")

    async def call(self, sample: RewardInput) -> dict[str, float]:
        """The named numbers that the server gives a sample, once the batch that it is put into
        has been answered.

        Raises:
            SampleFailure: there are none. Its cause is `reward_timeout` past the limit,
                else `reward_error`.
        """
        try:
            body = json_text.dumps(vars(sample))
        except orjson.JSONEncodeError as error:
            raise self._failure(f"the row's metadata is no JSON ({error}); leave it out of the row") from None
        loop = asyncio.get_running_loop()
        waiting = _Waiting(body, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._batch:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(WAIT_S, self._send)
        return await waiting.parts

    async def close(self) -> None:
        """Drop what is waiting, and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        for task in (sending := list(self._sending)):
            task.cancel()
        if sending:
            await asyncio.wait(sending)
        if self._session is not None:
            await self._session.close()

    def _send(self) -> None:
        """Send what is waiting, but for samples whose group was given up."""
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, [], None
        batch = [one for one in batch if not one.parts.done()]
        if batch:
            task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._sending.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._sending.discard)

    async def _answer(self, batch: Sequence[_Waiting]) -> None:
        """Give each sample of the batch its numbers, or its failure."""
        found: list[Any] = []
        local: list[_Failed] = []
        try:
            async with self._places, asyncio.timeout(self._limit_s):
                found = await self._values(batch, local)
        except TimeoutError:
            text = f"no answer within {self._limit_s:g} s; make it faster, or raise `reward_timeout_s`"
            if local:  # the server has not been asked
                text = f"{local[-1]}; it went on for {self._limit_s:g} s"
            found = [self._failure(text, "reward_timeout") for _ in batch]
        except _Failed as failure:
            found = [self._failure(str(failure)) for _ in batch]
        for one, value in zip(batch, found, strict=True):
            if one.parts.done():  # its group was given up meanwhile
                continue
            try:
                if isinstance(value, SampleFailure):
                    raise value
                one.parts.set_result(checked_parts(value, self._spec.name, self._shown))
            except (ValueError, RecursionError, SampleFailure) as error:
                own = error if isinstance(error, SampleFailure) else SampleFailure("reward_error", str(error))
                one.parts.set_exception(own)

    async def _values(self, batch: Sequence[_Waiting], local: list[_Failed]) -> list[Any]:
        """The server's list, of the batch's length. Raises _Failed after the last attempt.

        Faults of this process are no attempts: it tries until the limit, and `local` gets them,
        unless one succeeded.
        """
        body = b'{"samples":[' + b",".join(one.body for one in batch) + b"]}"
        attempt = 0
        while attempt <= RETRIES:
            try:
                return self._parsed(*await self._post(body), len(batch))
            except _Failed as failure:
                if not failure.retry:
                    raise
                if failure.local:
                    local.append(failure)
                    await asyncio.sleep(LOCAL_PAUSE_S)
                    continue
                local.clear()
                if attempt == RETRIES:
                    raise _Failed(
                        f"{failure}, {RETRIES + 1} times; see its server's log", retry=False
                    ) from None
                EVENTS.tell("reward_retried", f"{self._shown}: {failure}", samples=len(batch))
            pause = 0.5 * 2**attempt
            attempt += 1
            await asyncio.sleep(pause + random.uniform(0, pause / 2))
        raise AssertionError

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer. Raises _Failed where there is none, or one that is too large."""
        try:
            # A redirect would carry the key to another server.
            async with self._session.post(
                self._spec.source, data=body, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=None)
            ) as response:
                return response.status, await read_body(response, MAX_ANSWER)
        except TooLong as error:
            raise _Failed(f"{error}; it must be a list of numbers", retry=False) from None
        except (aiohttp.ClientError, OSError) as error:
            if (fault := local_fault(error)) is not None:
                what, remedy = fault
                text = f"this process can't reach it: {what}; this is a fault of its own host: {remedy}"
                raise _Failed(text, retry=True, local=True) from None
            raise _Failed(f"it does not answer: {error}", retry=True) from None

    def _parsed(self, status: int, body: bytes, count: int) -> list[Any]:
        if status != 200:
            retry = status >= 500 or status in (408, 429)
            text = f"it answered {self._told(status, body)}"
            raise _Failed(text if retry else f"{text}; {_remedy(status)}", retry=retry)
        try:
            values = json.loads(body)  # takes NaN, which is then an error of its sample alone
        except (ValueError, RecursionError) as error:  # the latter for lists in lists in lists
            raise _Failed(f"its answer is no JSON ({error}): {body_start(body)}", retry=False) from None
        if not isinstance(values, list) or len(values) != count:
            got = f"{len(values)}" if isinstance(values, list) else repr(shown(values))
            text = f"it must answer a list of {count} rewards, one for each sample, got {got}"
            raise _Failed(text, retry=False)
        return values

    def _told(self, status: int, body: bytes) -> str:
        return f"HTTP {status}: {body_start(body)}"

    def _failure(self, text: str, cause: str = "reward_error") -> SampleFailure:
        return SampleFailure(cause, f"{self._shown}: {text}")


def _remedy(status: int) -> str:
    if 300 <= status < 400:
        return "a redirect is not followed: give the address that it leads to"
    if status in (401, 403):
        return "give the key that it wants in an environment variable with `reward_api_key_env`"
    return "is the path right, and does it take POST?" if status in (404, 405) else "see its server's log"

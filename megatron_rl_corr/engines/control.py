"""Control requests to several servers: health, pauses, weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_rl_corr.engines.addresses import may_change
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.concurrency import (
    all_or_first_failure,
    all_or_raise_first,
    poll_until,
    raise_first,
)
from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    may_be_gone,
)
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.push_bounds import PushBounds
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request

EngineRequest = Callable[[Engine], Request | None]
"""The request in the words of an engine; None: it has no such step."""

HEALTH_POLL_S = 0.5
HEALTH_PROBE_TIMEOUT_S = 30.0  # a paused server may take long to answer
IDLE_S, IDLE_POLL_S = 2.0, 0.1  # a server that has answered all is idle a moment later
BRIEF_S = 0.3
"""For a server that did not answer before: it must not cost every step the time of the first."""


class ServerControl:
    """Sends control requests to all of its servers. Answers are in the order of base_urls.

    Args:
        fleet: the way to them, and what each of them runs.
        base_urls: their addresses, as `Engine.checked_urls` returns them.
        update_timeout_s: limit of requests that read or write all weights at once; others have
            the transport's.
        silence_s: a server that answers nothing at all for so long fails the request that waits for it;
            None: only the request's own limit counts.
        bounds: of a push, while one is under way; None: these requests are of none.
    """

    def __init__(
        self,
        fleet: Fleet,
        base_urls: Sequence[str],
        *,
        update_timeout_s: float,
        silence_s: float | None = None,
        bounds: PushBounds | None = None,
    ):
        self.fleet = fleet
        self.base_urls = tuple(base_urls)
        self._update_timeout_s, self._silence_s, self._bounds = update_timeout_s, silence_s, bounds

    @property
    def limits(self) -> dict[str, Any]:
        """`update_timeout_s`, `silence_s` and `bounds`, for another control like this one."""
        return {
            "update_timeout_s": self._update_timeout_s,
            "silence_s": self._silence_s,
            "bounds": self._bounds,
        }

    def forget_stuck(self) -> None:
        """Blame none for what was waited for in vain: in a group that servers share each waits for all."""
        if self._bounds is not None:
            self._bounds.stuck.clear()

    def engine_of(self, url: str) -> Engine:
        """What a server runs."""
        return self.fleet.engine_of(url)

    def by_engine(self) -> dict[str, ServerControl]:
        """Name of an engine -> control of those of these servers that run it."""
        urls: dict[str, list[str]] = {}
        for url in self.base_urls:
            urls.setdefault(self.fleet.name_of(url), []).append(url)
        return {name: self.over(own) for name, own in urls.items()}

    def over(self, urls: Sequence[str]) -> ServerControl:
        """Control of some of these servers alone."""
        return ServerControl(self.fleet, urls, **self.limits)

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return once every server can sample.

        Raises:
            RolloutServerError: one could not after timeout_s, or never will, as `may_change` has it;
                its last failure.
        """

        async def wait_for(url: str) -> None:
            await poll_until(
                lambda limit_s: self.fleet.send(url, self.engine_of(url).health(), timeout_s=limit_s),
                timeout_s=timeout_s,
                pause_s=HEALTH_POLL_S,
                longest_attempt_s=HEALTH_PROBE_TIMEOUT_S,
                retry=may_change,
                waited_for="it to become healthy",
                address=url,
            )

        await all_or_first_failure([wait_for(url) for url in self.base_urls])

    async def server_info(self) -> list[dict[str, Any]]:
        """Version, launch arguments and state of each server."""
        return await self._ask_all(lambda engine: engine.server_info())

    async def model_info(self) -> list[dict[str, Any]]:
        """Each server's model, and what its weights are called (`Engine.weight_version`)."""
        return await self._ask_all(lambda engine: engine.model_info())

    async def reported_versions(
        self, *, silent: Collection[str] = (), timeout_s: float = HEALTH_PROBE_TIMEOUT_S
    ) -> list[str | None]:
        """What each server calls its weights; None where no answer comes, none that can be used, or HTTP 5xx.

        The latter two come from a proxy before a server that is gone.

        Args:
            silent: servers that did not answer before; these have BRIEF_S only.
            timeout_s: limit of the others, if it is below HEALTH_PROBE_TIMEOUT_S.

        Raises:
            RolloutError: no server answers.
        """
        longest_s = min(timeout_s, HEALTH_PROBE_TIMEOUT_S)
        limits = [BRIEF_S if url in silent else longest_s for url in self.base_urls]
        calls = [
            self.ask(url, self.engine_of(url).model_info(), timeout_s=limit)
            for url, limit in zip(self.base_urls, limits, strict=True)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        gone = [isinstance(answer, RolloutError) and may_be_gone(answer) for answer in answers]
        raise_first(
            [answer for answer, is_gone in zip(answers, gone, strict=True) if all(gone) or not is_gone]
        )
        return [
            None if is_gone else self.engine_of(url).weight_version(answer)
            for url, answer, is_gone in zip(self.base_urls, answers, gone, strict=True)
        ]

    async def pause_generation(self, mode: str) -> list[dict[str, Any]]:
        """Stop sampling. `Engine.pause_generation` says what becomes of running requests in each mode."""
        return await self._ask_all(lambda engine: engine.pause_generation(mode))

    async def continue_generation(self) -> list[dict[str, Any]]:
        """Go on after a pause; harmless without one. Every server is asked, even where another fails."""
        return await self._ask_all(lambda engine: engine.continue_generation())

    async def begin_weight_update(
        self, tensors: Mapping[str, Sequence[int]] | None = None, **options: bool
    ) -> bool:
        """Open the session that weights must be sent in. False: the servers have none, and need none.

        Args:
            tensors, options: as in `Engine.begin_weight_update`.
        """
        return await self._ask_all_that_have(lambda engine: engine.begin_weight_update(tensors, **options))

    async def reopen_weight_update(
        self, tensors: Mapping[str, Sequence[int]] | None = None, **options: bool
    ) -> bool:
        """`begin_weight_update`, also where an earlier trainer was killed and left its session open.

        For each engine by itself: what closes the session of one may spoil another, which closes its own.
        """
        return any(
            await all_or_raise_first(
                control._reopen(tensors, options) for control in self.by_engine().values()
            )
        )

    async def _reopen(self, tensors: Mapping[str, Sequence[int]] | None, options: Mapping[str, bool]) -> bool:
        """The same for servers of one engine."""
        try:
            return await self.begin_weight_update(tensors, **options)
        except RolloutServerError as error:
            if not self.engine_of(error.url).update_is_open(error):
                raise
        # One by one: some servers have an open session and some have none, which they answer with HTTP 400.
        answers = await self._ask_each(
            lambda engine: engine.end_weight_update(), timeout_s=self._update_timeout_s
        )
        raise_first(
            [a for a in answers if not (isinstance(a, RolloutServerError) and a.status in (400, 404))]
        )
        return await self.begin_weight_update(tensors, **options)

    async def end_weight_update(self) -> bool:
        """Close that session; a server may then repack its weights. False: the servers have none."""
        return await self._ask_all_that_have(
            lambda engine: engine.end_weight_update(), timeout_s=self._update_timeout_s
        )

    async def begin_changes(self, push: str, base: str, stages: int) -> list[dict[str, Any]]:
        """Expect in the open session buckets of changes alone, which make version `push` of `base`."""
        infos = await self.server_info()
        for url, info in zip(self.base_urls, infos, strict=True):
            if (problem := self.engine_of(url).changes_problem(info)) is not None:
                raise RolloutProtocolError(url, self.engine_of(url).server_info().endpoint, problem)
        return await all_or_raise_first(
            self.ask(url, engine.begin_changes(push, base, stages, ranks=engine.ranks(url, info)))
            for url, info in zip(self.base_urls, infos, strict=True)
            for engine in [self.engine_of(url)]
        )

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        group_name: str,
        backend: str,
        ranks_per_server: int = 1,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Let all servers join a process group in which the trainer is rank 0.

        Returns when the group is complete, so the trainer must join meanwhile. Server i holds the ranks from
        1 + i * ranks_per_server on. timeout_s: longest wait for it.
        """
        joins = [
            self.engine_of(url).init_weights_update_group(
                master_address,
                master_port,
                rank_offset=1 + server * ranks_per_server,
                world_size=1 + len(self.base_urls) * ranks_per_server,
                group_name=group_name,
                backend=backend,
            )
            for server, url in enumerate(self.base_urls)
        ]
        return await self._ask_together(joins, timeout_s)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Receive one broadcast per name, in order. Returns when all have arrived, so broadcast meanwhile.

        timeout_s: longest wait for them.
        """
        requests = {
            name: engine.update_weights_from_distributed(names, dtypes, shapes, group_name=group_name)
            for name, engine in self.fleet.engines.items()
        }
        return await self._ask_together(
            [requests[self.fleet.name_of(url)] for url in self.base_urls], timeout_s
        )

    async def update_weights_from_tensor(self, entries: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Load a bucket from this host's memory.

        Args:
            entries: for each server, what `Engine.serialized` made for each of its tensor-parallel ranks.
        """
        entry_of = dict(zip(self.base_urls, entries, strict=True))
        return await all_or_raise_first(
            [
                self.ask(u, self.engine_of(u).update_weights_from_tensor(entry))
                for u, entry in entry_of.items()
            ]
        )

    async def update_weights_from_disk(self, model_path: str) -> list[dict[str, Any]]:
        """Load a Hugging Face folder that every server sees under this path."""
        return await self._ask_all(
            lambda engine: engine.update_weights_from_disk(model_path), timeout_s=self._update_timeout_s
        )

    async def destroy_weights_update_group(
        self, group_name: str, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Leave the process group."""
        return await self._ask_all(
            lambda engine: engine.destroy_weights_update_group(group_name), timeout_s=timeout_s
        )

    async def leave_weights_update_group(
        self, group_name: str | None, *, timeout_s: float
    ) -> list[RolloutError]:
        """Have every server leave the group, and see thereby which can. Returns why others can't.

        Args:
            group_name: of the group; None: there is none yet, and a server only has to answer.
            timeout_s: a server that has not answered by then is stuck, maybe in a broadcast.
        """

        def request(engine: Engine) -> Request | None:
            if group_name is None:
                return engine.holder_alive()
            return engine.destroy_weights_update_group(group_name)

        answers = await self._ask_each(request, timeout_s=timeout_s)
        raise_first([answer for answer in answers if not isinstance(answer, RolloutError)])
        return [answer for answer in answers if isinstance(answer, RolloutError)]

    async def flush_cache(self) -> list[dict[str, Any]]:
        """Forget cached prefixes. Raises RolloutServerError while requests run or wait, as
        `flush_cache_of` does.
        """
        return await all_or_raise_first([self.flush_cache_of(url) for url in self.base_urls])

    async def flush_cache_of(self, url: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """One server's answer, once nothing runs there.

        An answer leaves SGLang's scheduler a moment before it knows that nothing runs, and until
        then it refuses.

        Args:
            url: of the server.
            timeout_s: limit of the wait and of each request in it; None: IDLE_S, and each request has
                the transport's.

        Raises:
            RolloutServerError: something still runs after that time, or the server fails otherwise.
        """
        request, wait_s = self.engine_of(url).flush_cache(), IDLE_S if timeout_s is None else timeout_s
        return await poll_until(
            lambda limit_s: self.ask(url, request, timeout_s=None if timeout_s is None else limit_s),
            timeout_s=wait_s,
            pause_s=IDLE_POLL_S,
            longest_attempt_s=wait_s,
            retry=lambda error: isinstance(error, RolloutServerError) and error.status == 400,
            waited_for="it to be idle: does another client sample from it?",
            address=url,
        )

    async def weights_checker(self) -> list[dict[str, Any]]:
        """Checksums of the weights that each server holds."""
        return await self._ask_all(lambda engine: engine.weights_checker(), timeout_s=self._update_timeout_s)

    async def update_weight_version(self, new_version: str) -> list[dict[str, Any]]:
        """Rename the weights; running requests go on."""
        return await self._ask_all(lambda engine: engine.update_weight_version(new_version))

    async def sampling_problem(self, sampling: SamplingParams) -> str | None:
        """Why a server can't sample so, with its address and the remedy; None: all can.

        By what each tells of itself, and by what it samples.
        """
        for url, info in zip(self.base_urls, await self.server_info(), strict=True):
            engine = self.engine_of(url)
            problem, test = engine.sampling_problem(info, sampling), engine.sampling_test(sampling)
            if problem is None and sampling.batch_invariant:
                problem = engine.batch_invariance_problem(info)
            if problem is None and test is not None:
                problem = engine.sampling_test_problem(await self.ask(url, test), sampling)
            if problem is not None:
                return f"{url}: {problem}"
        return None

    async def ask(
        self, url: str, request: Request | None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """One server's answer to one request; {} for a step that its engine does not have."""
        if request is None:
            return {}
        if self._bounds is None or not self._bounds.is_open:
            status, body = await self._send_watched(url, request, timeout_s)
        else:
            own_s = self.fleet.timeout_s if timeout_s is None else timeout_s
            with self._bounds.bounding(url, request.endpoint, own_s) as limit_s:
                status, body = await self._send_watched(url, request, limit_s)
        return self.engine_of(url).parse_control(body, server=url, endpoint=request.endpoint, status=status)

    async def _send_watched(self, url: str, request: Request, timeout_s: float | None) -> tuple[int, bytes]:
        """As `Fleet.send`; a server that is silent for silence_s meanwhile, not only to this
        request, fails it.

        Raises:
            RolloutServerError: as there, or because the server does not answer another request either.
        """
        sending = asyncio.ensure_future(self.fleet.send(url, request, timeout_s=timeout_s))
        tasks = [sending]
        try:
            while self._silence_s is not None:
                if (await asyncio.wait([sending], timeout=self._silence_s / 4))[0]:
                    break
                other = self.engine_of(url).alive()
                asking = asyncio.ensure_future(self.fleet.send(url, other, timeout_s=self._silence_s))
                tasks = [sending, asking]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                error = asking.exception() if asking.done() else None
                if not sending.done() and isinstance(error, RolloutServerError) and error.status is None:
                    detail = f"nor {other.method} {other.endpoint} meanwhile ({error.detail})"
                    raise RolloutServerError(
                        url,
                        request.endpoint,
                        None,
                        detail,
                        method=request.method,
                        timed_out=error.timed_out,
                    ) from error
            return await sending
        finally:
            for task in tasks:
                task.cancel()

    def _made(self, request: EngineRequest) -> dict[str, Request | None]:
        """The request to each engine, by its name: one object, whose body is made once for all servers."""
        return {name: request(self.fleet.engines[name]) for name in map(self.fleet.name_of, self.base_urls)}

    async def _ask_each(
        self, request: EngineRequest, *, timeout_s: float | None = None
    ) -> list[dict[str, Any] | BaseException]:
        made = self._made(request)
        calls = [self.ask(url, made[self.fleet.name_of(url)], timeout_s=timeout_s) for url in self.base_urls]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask_all(
        self, request: EngineRequest, *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Waits for every server, so that one that is dead does not leave another one paused."""
        answers = await self._ask_each(request, timeout_s=timeout_s)
        raise_first(answers)
        return answers

    async def _ask_all_that_have(self, request: EngineRequest, *, timeout_s: float | None = None) -> bool:
        """True if any server has this part of an update session. One that had it before must not
        answer HTTP 404.
        """
        made = self._made(request)
        asked = [url for url in self.base_urls if made[self.fleet.name_of(url)] is not None]
        calls = [self.ask(url, made[self.fleet.name_of(url)], timeout_s=timeout_s) for url in asked]
        answers = dict(zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        lacking = {u for u, a in answers.items() if isinstance(a, RolloutServerError) and a.status == 404}
        present = answers.keys() - (lacking - self.fleet.with_sessions)
        raise_first([answers[url] for url in asked if url in present])
        self.fleet.with_sessions.update(present)
        return bool(present)

    async def _ask_together(
        self, per_server: Sequence[Request | None], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """For collectives: once one server has failed the others wait in vain, so that is raised at once."""
        calls = zip(self.base_urls, per_server, strict=True)
        return await all_or_first_failure(
            [self.ask(url, request, timeout_s=timeout_s) for url, request in calls]
        )

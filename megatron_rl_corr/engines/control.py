"""Control requests to several servers of one engine: health, pauses, weight updates."""

import asyncio
from collections.abc import Sequence
from typing import Any

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.concurrency import all_or_first_failure, poll_until, raise_first
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.types import Request, Transport

HEALTH_POLL_S = 0.5
HEALTH_PROBE_TIMEOUT_S = 30.0  # a paused server may take long to answer


class ServerControl:
    """Sends control requests to all of its servers. Answers are in the order of base_urls.

    Args:
        engine: what the servers run.
        base_urls: their addresses, as `Engine.checked_urls` returns them.
        transport: to them.
        update_timeout_s: limit of requests that read or write all weights at once; others have the transport's.
    """

    def __init__(self, engine: Engine, base_urls: Sequence[str], transport: Transport, *, update_timeout_s: float):
        self.engine = engine
        self.base_urls = tuple(base_urls)
        self._transport, self._update_timeout_s = transport, update_timeout_s

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return once every server can sample.

        Raises:
            RolloutServerError: one could not after timeout_s; its last failure.
        """

        async def wait_for(url: str) -> None:
            await poll_until(
                lambda limit_s: self._transport.send(url, self.engine.health(), timeout_s=limit_s),
                timeout_s=timeout_s, pause_s=HEALTH_POLL_S, longest_attempt_s=HEALTH_PROBE_TIMEOUT_S,
                retry=lambda error: isinstance(error, RolloutServerError), waited_for="it to become healthy",
            )  # fmt: skip

        await all_or_first_failure([wait_for(url) for url in self.base_urls])

    async def server_info(self) -> list[dict[str, Any]]:
        """Version, launch arguments and state of each server."""
        return await self._ask_all(self.engine.server_info())

    async def model_info(self) -> list[dict[str, Any]]:
        """Each server's model, and what its weights are called (`Engine.weight_version`)."""
        return await self._ask_all(self.engine.model_info())

    async def reported_versions(self) -> list[str | None]:
        """What each server calls its weights; None where no answer comes, or HTTP 5xx, as from a proxy before it.

        Raises:
            RolloutServerError: no server answers.
        """
        answers = await self._ask_each(self.engine.model_info(), timeout_s=HEALTH_PROBE_TIMEOUT_S)
        silent = [isinstance(a, RolloutServerError) and (a.status is None or a.status >= 500) for a in answers]
        raise_first([a for a, is_silent in zip(answers, silent, strict=True) if all(silent) or not is_silent])
        return [
            None if is_silent else self.engine.weight_version(answer)
            for answer, is_silent in zip(answers, silent, strict=True)
        ]

    async def pause_generation(self, mode: str) -> list[dict[str, Any]]:
        """Stop sampling. `Engine.pause_generation` says what becomes of running requests in each mode."""
        return await self._ask_all(self.engine.pause_generation(mode))

    async def continue_generation(self) -> list[dict[str, Any]]:
        """Go on after a pause; harmless without one. Every server is asked, even where another fails."""
        return await self._ask_all(self.engine.continue_generation())

    async def begin_weight_update(self) -> bool:
        """Open the session that weights must be sent in. False: the servers have none, and need none."""
        return await self._ask_all_that_have(self.engine.begin_weight_update())

    async def reopen_weight_update(self) -> bool:
        """`begin_weight_update`, also where an earlier trainer was killed and left its session open."""
        try:
            return await self.begin_weight_update()
        except RolloutServerError as error:
            if not self.engine.update_is_open(error):
                raise
        # One by one: some servers have an open session and some have none, which they answer with HTTP 400.
        answers = await self._ask_each(self.engine.end_weight_update(), timeout_s=self._update_timeout_s)
        raise_first([a for a in answers if not (isinstance(a, RolloutServerError) and a.status in (400, 404))])
        return await self.begin_weight_update()

    async def end_weight_update(self) -> bool:
        """Close that session; a server may then repack its weights. False: the servers have none."""
        return await self._ask_all_that_have(self.engine.end_weight_update(), timeout_s=self._update_timeout_s)

    async def init_weights_update_group(
        self, master_address: str, master_port: int, *, group_name: str, backend: str, ranks_per_server: int = 1
    ) -> list[dict[str, Any]]:
        """Let all servers join a process group in which the trainer is rank 0.

        Returns when the group is complete, so the trainer must join meanwhile. Server i holds the ranks from
        1 + i * ranks_per_server on.
        """
        joins = [
            self.engine.init_weights_update_group(
                master_address, master_port, rank_offset=1 + server * ranks_per_server,
                world_size=1 + len(self.base_urls) * ranks_per_server, group_name=group_name, backend=backend,
            )
            for server in range(len(self.base_urls))
        ]  # fmt: skip
        return await self._ask_together(joins)

    async def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, group_name: str,
        flush_cache: bool, weight_version: str | None = None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Receive one broadcast per name, in order. Returns when all have arrived, so broadcast meanwhile."""
        request = self.engine.update_weights_from_distributed(
            names, dtypes, shapes, group_name=group_name, flush_cache=flush_cache, weight_version=weight_version
        )
        return await self._ask_together([request] * len(self.base_urls))

    async def update_weights_from_tensor(self, entries: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Load a bucket from this host's memory.

        Args:
            entries: for each server, what `Engine.serialized` made for each of its tensor-parallel ranks.
        """
        calls = zip(self.base_urls, entries, strict=True)
        answers = await asyncio.gather(
            *(self.ask(url, self.engine.update_weights_from_tensor(entry)) for url, entry in calls),
            return_exceptions=True,
        )
        raise_first(answers)
        return answers

    async def update_weights_from_disk(self, model_path: str) -> list[dict[str, Any]]:
        """Load a Hugging Face folder that every server sees under this path."""
        return await self._ask_all(self.engine.update_weights_from_disk(model_path), timeout_s=self._update_timeout_s)

    async def destroy_weights_update_group(self, group_name: str) -> list[dict[str, Any]]:
        """Leave the process group."""
        return await self._ask_all(self.engine.destroy_weights_update_group(group_name))

    async def flush_cache(self) -> list[dict[str, Any]]:
        """Forget cached prefixes. Raises RolloutServerError while requests run or wait."""
        return await self._ask_all(self.engine.flush_cache())

    async def weights_checker(self, action: str = "checksum") -> list[dict[str, Any]]:
        """Checksums of the weights that each server holds."""
        return await self._ask_all(self.engine.weights_checker(action), timeout_s=self._update_timeout_s)

    async def update_weight_version(self, new_version: str) -> list[dict[str, Any]]:
        """Rename the weights; running requests go on."""
        return await self._ask_all(self.engine.update_weight_version(new_version))

    async def ask(self, url: str, request: Request | None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """One server's answer to one request; {} for a step that its engine does not have."""
        if request is None:
            return {}
        status, body = await self._transport.send(url, request, timeout_s=timeout_s)
        return self.engine.parse_control(body, server=url, endpoint=request.endpoint, status=status)

    async def _ask_each(
        self, request: Request | None, *, timeout_s: float | None = None
    ) -> list[dict[str, Any] | BaseException]:
        calls = [self.ask(url, request, timeout_s=timeout_s) for url in self.base_urls]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask_all(self, request: Request | None, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Waits for every server, so that one that is dead does not leave another one paused."""
        answers = await self._ask_each(request, timeout_s=timeout_s)
        raise_first(answers)
        return answers

    async def _ask_all_that_have(self, request: Request | None, *, timeout_s: float | None = None) -> bool:
        if request is None:
            return False
        answers = await self._ask_each(request, timeout_s=timeout_s)
        present = [a for a in answers if not (isinstance(a, RolloutServerError) and a.status == 404)]
        raise_first(present)
        return bool(present)

    async def _ask_together(self, per_server: Sequence[Request | None]) -> list[dict[str, Any]]:
        """For collectives: once one server has failed the others wait in vain, so that is raised at once."""
        calls = zip(self.base_urls, per_server, strict=True)
        return await all_or_first_failure([self.ask(url, request) for url, request in calls])

"""Steers SGLang servers: health, pauses, weight updates; every method asks every server."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.fan_out import all_or_first_failure, raise_first
from megatron_rl_corr.engines.http import HEALTH_PROBE_TIMEOUT_S, Transport
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.sglang.requests import Request
from megatron_rl_corr.engines.sglang.responses import parse_control

HEALTH_POLL_S = 0.5


class ServerControl:
    """Control requests to these servers. Answers are in the order of base_urls.

    update_timeout_s: longest wait for what reads or writes all weights at once; other requests have the transport's.
    """

    def __init__(self, base_urls: Sequence[str], transport: Transport, *, update_timeout_s: float):
        self.base_urls = tuple(base_urls)
        self._transport, self._update_timeout_s = transport, update_timeout_s

    async def wait_healthy(self, timeout_s: float) -> None:
        """Return once every server can generate; RolloutServerError with its last answer after timeout_s."""
        deadline = time.monotonic() + timeout_s

        async def wait_for(url: str) -> None:
            while True:
                probe_s = min(max(0.1, deadline - time.monotonic()), HEALTH_PROBE_TIMEOUT_S)
                try:
                    await self._transport.send(url, requests.health(), timeout_s=probe_s)
                    return
                except RolloutServerError as error:
                    if time.monotonic() + HEALTH_POLL_S >= deadline:
                        error.add_note(f"waited {timeout_s:g} s for it to become healthy")
                        raise
                await asyncio.sleep(HEALTH_POLL_S)

        await all_or_first_failure([wait_for(url) for url in self.base_urls])

    async def server_info(self) -> list[dict[str, Any]]:
        """Version, launch arguments and scheduler state."""
        return await self._ask_all(requests.server_info())

    async def model_info(self) -> list[dict[str, Any]]:
        """Model path and current `weight_version`."""
        return await self._ask_all(requests.model_info())

    async def reported_versions(self) -> list[str | None]:
        """Each server's `weight_version`; None where no answer comes, or HTTP 5xx, as from a proxy before a dead one.

        Raises RolloutServerError if none answers.
        """
        answers = await self._ask_each(requests.model_info(), timeout_s=HEALTH_PROBE_TIMEOUT_S)
        silent = [isinstance(a, RolloutServerError) and (a.status is None or a.status >= 500) for a in answers]
        raise_first([a for a, is_silent in zip(answers, silent, strict=True) if all(silent) or not is_silent])
        return [
            None if is_silent else str(a.get("weight_version")) for a, is_silent in zip(answers, silent, strict=True)
        ]

    async def pause_generation(self, mode: str) -> list[dict[str, Any]]:
        """Stop sampling; `requests.pause_generation` says what becomes of running requests in each mode."""
        return await self._ask_all(requests.pause_generation(mode))

    async def continue_generation(self) -> list[dict[str, Any]]:
        """Go on after a pause; harmless without one. Every server is asked, even where another fails."""
        return await self._ask_all(requests.continue_generation())

    async def begin_weight_update(self) -> bool:
        """Open the session that weights must be sent in. False: no server has one (SGLang <= 0.5.20)."""
        return await self._ask_all_that_have(requests.begin_weight_update())

    async def end_weight_update(self) -> bool:
        """Close that session; a server may then repack its weights. False: none has one (SGLang <= 0.5.20)."""
        return await self._ask_all_that_have(requests.end_weight_update(), timeout_s=self._update_timeout_s)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        group_name: str,
        backend: str,
        ranks_per_server: int = 1,
    ) -> list[dict[str, Any]]:
        """Let all servers join a process group in which the trainer is rank 0.

        Server i holds ranks_per_server ranks (its tensor times its pipeline parallel size) from
        1 + i * ranks_per_server. Returns when the group is complete, so the trainer must join meanwhile.
        """
        joins = [
            requests.init_weights_update_group(
                master_address,
                master_port,
                rank_offset=1 + server * ranks_per_server,
                world_size=1 + len(self.base_urls) * ranks_per_server,
                group_name=group_name,
                backend=backend,
            )
            for server in range(len(self.base_urls))
        ]
        return await self._ask_together(joins)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        flush_cache: bool,
        weight_version: str | None = None,
    ) -> list[dict[str, Any]]:
        """Receive one broadcast per name, in order. Returns when all have arrived, so broadcast meanwhile."""
        request = requests.update_weights_from_distributed(
            names,
            dtypes,
            shapes,
            group_name=group_name,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )
        return await self._ask_together([request] * len(self.base_urls))

    async def update_weights_from_tensor(self, entries: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Load a bucket from this host's memory. entries: for each server, one pickle in base64 a tensor rank."""
        calls = zip(self.base_urls, entries, strict=True)
        answers = await asyncio.gather(
            *(self.ask(url, requests.update_weights_from_tensor(entry)) for url, entry in calls), return_exceptions=True
        )
        raise_first(answers)
        return answers

    async def update_weights_from_disk(self, model_path: str) -> list[dict[str, Any]]:
        """Load a Hugging Face folder that every server sees under this path."""
        return await self._ask_all(requests.update_weights_from_disk(model_path), timeout_s=self._update_timeout_s)

    async def destroy_weights_update_group(self, group_name: str) -> list[dict[str, Any]]:
        """Leave the process group."""
        return await self._ask_all(requests.destroy_weights_update_group(group_name))

    async def flush_cache(self) -> list[dict[str, Any]]:
        """Forget cached prefixes. Fails with HTTP 400 while requests run or wait."""
        return await self._ask_all(requests.flush_cache())

    async def weights_checker(self, action: str = "checksum") -> list[dict[str, Any]]:
        """A digest of the weights that each server holds."""
        return await self._ask_all(requests.weights_checker(action), timeout_s=self._update_timeout_s)

    async def update_weight_version(self, new_version: str) -> list[dict[str, Any]]:
        """Rename the current weights; running requests go on."""
        return await self._ask_all(requests.update_weight_version(new_version))

    async def ask(self, url: str, request: Request, *, timeout_s: float | None = None) -> dict[str, Any]:
        """One server's answer to one request, as it came: for questions that have no method here."""
        status, body = await self._transport.send(url, request, timeout_s=timeout_s)
        return parse_control(body, server=url, endpoint=request.endpoint, status=status)

    async def _ask_each(
        self, request: Request, *, timeout_s: float | None = None
    ) -> list[dict[str, Any] | BaseException]:
        calls = [self.ask(url, request, timeout_s=timeout_s) for url in self.base_urls]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask_all(self, request: Request, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Waits for every server, so that one that is dead does not leave another one paused."""
        answers = await self._ask_each(request, timeout_s=timeout_s)
        raise_first(answers)
        return answers

    async def _ask_all_that_have(self, request: Request, *, timeout_s: float | None = None) -> bool:
        answers = await self._ask_each(request, timeout_s=timeout_s)
        present = [a for a in answers if not (isinstance(a, RolloutServerError) and a.status == 404)]
        raise_first(present)
        return bool(present)

    async def _ask_together(self, per_server: Sequence[Request]) -> list[dict[str, Any]]:
        """For collectives: once one server has failed the others wait in vain, so that is raised at once."""
        calls = zip(self.base_urls, per_server, strict=True)
        return await all_or_first_failure([self.ask(url, request) for url, request in calls])

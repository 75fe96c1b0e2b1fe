"""Talks to SGLang servers over HTTP: samples from them, and steers them through a weight update."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_rl_corr.rollout import requests
from megatron_rl_corr.rollout.errors import RolloutError, RolloutServerError
from megatron_rl_corr.rollout.fan_out import all_or_first_failure, raise_first
from megatron_rl_corr.rollout.requests import Request
from megatron_rl_corr.rollout.responses import parse_control, parse_generate
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout.transport import Transport, checked_urls

HEALTH_PROBE_TIMEOUT_S = 30.0  # a paused server takes 20 s to answer /health with 503
HEALTH_POLL_S = 0.5


class RolloutClient:
    """Several SGLang servers with the same weights, as one.

    The HTTP session belongs to the event loop of the first call: use and close the client on that loop
    (`LoopThread` for synchronous callers). Times are in seconds. timeout_s bounds one request from its start
    to the end of its answer; max_concurrency the samples in flight, over all servers. Failures are
    RolloutServerError (no answer, or one that says it failed) and RolloutProtocolError (a wrong answer).
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        vocab_size: int,
        max_concurrency: int = 64,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        api_key: str | None = None,
    ):
        self.base_urls = checked_urls(base_urls)
        if vocab_size < 1 or max_concurrency < 1 or timeout_s <= 0 or connect_timeout_s <= 0:
            raise ValueError(
                "vocab_size, max_concurrency, timeout_s and connect_timeout_s must be positive, got "
                f"{vocab_size}, {max_concurrency}, {timeout_s}, {connect_timeout_s}"
            )
        self.vocab_size = vocab_size
        self._transport = Transport(timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=api_key)
        self._slots = asyncio.Semaphore(max_concurrency)
        self._next_url = itertools.cycle(self.base_urls)

    def __repr__(self) -> str:
        return f"RolloutClient({list(self.base_urls)}, vocab_size={self.vocab_size})"

    async def __aenter__(self) -> "RolloutClient":
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP session. The next call opens another."""
        await self._transport.close()

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Trajectory]:
        """samples_per_prompt responses to each prompt, prompt-major: p0s0, p0s1, ..., p1s0, ...

        One request a sample, dealt to the servers in turn; on_progress(done, total) is called after each. The
        first failure cancels the rest and is raised. Raises ValueError, before anything is sent, for a prompt
        that is empty or holds an id outside the vocabulary.
        """
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {samples_per_prompt}")
        lists = [
            requests.checked_prompt_ids(ids, vocab_size=self.vocab_size, prompt_index=index)
            for index, ids in enumerate(prompts)
        ]
        total, done = len(lists) * samples_per_prompt, 0

        async def sample(request: Request, prompt_ids: torch.Tensor, prompt: int, index: int) -> Trajectory:
            nonlocal done
            try:
                async with self._slots:
                    url = next(self._next_url)
                    _, body = await self._transport.send(url, request)
                trajectory = parse_generate(
                    body,
                    prompt_ids=prompt_ids,
                    prompt_index=prompt,
                    sample_index=index,
                    server=url,
                    vocab_size=self.vocab_size,
                    truncated=sampling.truncated,
                )
            except RolloutError as error:
                error.add_note(f"it was sample {index} of prompt {prompt} ({prompt_ids.numel()} tokens)")
                raise
            done += 1
            if on_progress is not None:
                on_progress(done, total)
            return trajectory

        calls = []
        for prompt, ids in enumerate(lists):
            request = requests.generate_request(ids, sampling)
            prompt_ids = torch.tensor(ids, dtype=torch.int64)
            calls += [sample(request, prompt_ids, prompt, index) for index in range(samples_per_prompt)]
        return await all_or_first_failure(calls)

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

    # Every method below asks every server, and returns their answers in the order of base_urls.

    async def server_info(self) -> list[dict[str, Any]]:
        """Version, launch arguments and scheduler state."""
        return await self._ask_all(requests.server_info())

    async def model_info(self) -> list[dict[str, Any]]:
        """Model path and current `weight_version`."""
        return await self._ask_all(requests.model_info())

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
        """Close that session. False: no server has one (SGLang <= 0.5.20)."""
        return await self._ask_all_that_have(requests.end_weight_update())

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

    async def destroy_weights_update_group(self, group_name: str) -> list[dict[str, Any]]:
        """Leave the process group."""
        return await self._ask_all(requests.destroy_weights_update_group(group_name))

    async def flush_cache(self) -> list[dict[str, Any]]:
        """Forget cached prefixes. Fails with HTTP 400 while requests run or wait."""
        return await self._ask_all(requests.flush_cache())

    async def weights_checker(self, action: str = "checksum") -> list[dict[str, Any]]:
        """A digest of the weights that each server holds."""
        return await self._ask_all(requests.weights_checker(action))

    async def update_weight_version(self, new_version: str) -> list[dict[str, Any]]:
        """Rename the current weights; running requests go on."""
        return await self._ask_all(requests.update_weight_version(new_version))

    async def _ask(self, url: str, request: Request) -> dict[str, Any]:
        status, body = await self._transport.send(url, request)
        return parse_control(body, server=url, endpoint=request.endpoint, status=status)

    async def _ask_each(self, request: Request) -> list[dict[str, Any] | BaseException]:
        calls = [self._ask(url, request) for url in self.base_urls]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask_all(self, request: Request) -> list[dict[str, Any]]:
        """Waits for every server, so that one that is dead does not leave another one paused."""
        answers = await self._ask_each(request)
        raise_first(answers)
        return answers

    async def _ask_all_that_have(self, request: Request) -> bool:
        answers = await self._ask_each(request)
        present = [a for a in answers if not (isinstance(a, RolloutServerError) and a.status == 404)]
        raise_first(present)
        return bool(present)

    async def _ask_together(self, per_server: Sequence[Request]) -> list[dict[str, Any]]:
        """For collectives: once one server has failed the others wait in vain, so that is raised at once."""
        calls = zip(self.base_urls, per_server, strict=True)
        return await all_or_first_failure([self._ask(url, request) for url, request in calls])

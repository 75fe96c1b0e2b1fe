"""Samples from SGLang servers over HTTP, and steers them through a weight update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_rl_corr.rollout import requests
from megatron_rl_corr.rollout.attempts import Attempts
from megatron_rl_corr.rollout.control import ServerControl
from megatron_rl_corr.rollout.counts import Counts
from megatron_rl_corr.rollout.discovery import servers_behind
from megatron_rl_corr.rollout.fan_out import all_or_first_failure
from megatron_rl_corr.rollout.pool import ServerPool
from megatron_rl_corr.rollout.readmission import Readmission
from megatron_rl_corr.rollout.routed_experts import ExpertShape
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout.transport import Transport, certificates, checked_key, checked_urls


class RolloutClient(ServerControl):
    """Several SGLang servers with the same weights, as one.

    The HTTP session belongs to the event loop of the first call: use and close the client on that loop
    (`LoopThread` for synchronous callers). Times are in seconds. Failures are RolloutServerError (no answer, or
    one that says it failed), RolloutProtocolError (a wrong answer) and RolloutOutage (no server is left).

    max_concurrency: samples in flight over all servers; max_per_server: at each (None: as many).
    timeout_s: one request, from its start to the end of its answer. connect_timeout_s: a part of it.
    read_timeout_s: how long a server with samples in flight may leave a question unanswered.
    outage_timeout_s: how long `generate` waits when no server is left.
    max_retries: failed requests of a sample after which it fails. max_continuations: times that an aborted sample is
    taken up where it was cut; 0 returns what it has.
    ca_file: certificates of the authorities that https servers are trusted by, instead of the system's.
    experts: how the model routes; every sample then comes with the experts of its tokens. None: not asked for.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        vocab_size: int,
        max_concurrency: int = 64,
        max_per_server: int | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 60.0,
        outage_timeout_s: float = 10.0,
        max_retries: int = 3,
        max_continuations: int = 8,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        experts: ExpertShape | None = None,
    ):
        urls = checked_urls(base_urls)
        positive = {
            "vocab_size": vocab_size, "max_concurrency": max_concurrency, "max_per_server": max_per_server,
            "timeout_s": timeout_s, "connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s,
        }  # fmt: skip
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name, value in {"outage_timeout_s": outage_timeout_s, "max_retries": max_retries,
                            "max_continuations": max_continuations}.items():  # fmt: skip
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.vocab_size = vocab_size
        self._counts = Counts()
        transport = Transport(
            timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=checked_key(api_key),
            tls=certificates(ca_file, urls),
        )  # fmt: skip
        super().__init__(urls, transport)
        self._pool = pool = ServerPool(
            urls, max_outstanding=max_concurrency, max_per_server=max_per_server,
            outage_timeout_s=outage_timeout_s,
        )  # fmt: skip
        self._members = Readmission(pool, transport, self._counts, read_timeout_s=read_timeout_s)
        self._attempts = Attempts(
            pool, self._members, transport, self._counts, max_retries=max_retries,
            max_continuations=max_continuations, experts=experts,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"RolloutClient({list(self.base_urls)}, vocab_size={self.vocab_size})"

    async def __aenter__(self) -> "RolloutClient":
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP session, and stop asking after servers that are left out. The next call opens another."""
        await self._members.close()
        await self._transport.close()

    async def find_servers(self, timeout_s: float) -> tuple[str, ...]:
        """Put the servers behind each router among base_urls in its place; call it before anything else.

        RolloutServerError where an address does not answer, or a router has no server, within timeout_s.
        """
        urls = await servers_behind(self.base_urls, self._transport, timeout_s)
        self.use_servers(urls)
        return urls

    def use_servers(self, urls: Sequence[str]) -> None:
        """Speak to these instead, as another client has found them: before anything is asked."""
        self.base_urls = tuple(urls)
        self._pool.use(urls)

    def counts(self) -> dict[str, int]:
        """What happened since the client was made, by the names of `Counts`."""
        return asdict(self._counts)

    def control(self, urls: Sequence[str]) -> ServerControl:
        """Some of the servers, to be steered without the others."""
        return ServerControl(urls, self._transport)

    async def expect_pause(self) -> None:
        """Declare no outage until the next `expect_version`: call it before a weight update, which pauses servers."""
        self._members.hold_outage()

    async def expect_version(self, version: str) -> None:
        """Sample only from servers whose weights are called so, from now on: call it after every weight update.

        A server that was started anew has other weights. Its answers are not used, and it is left out until it
        reports this version. Before the first call every version is taken.
        """
        self._members.expect(version)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int = 1,
        on_progress: Callable[[int, int, float], None] | None = None,
    ) -> list[Trajectory]:
        """samples_per_prompt responses to each prompt, prompt-major: p0s0, p0s1, ..., p1s0, ...

        One request a sample, to the server with the fewest in flight; on_progress(done, total, tokens per second so
        far) is called after each. A server that fails is left out until it is healthy again, and its samples are
        asked for elsewhere; a failure that no other server would mend cancels the rest and is raised. Raises
        ValueError, before anything is sent, for a prompt that is empty or holds an id outside the vocabulary.
        """
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {samples_per_prompt}")
        lists = [
            requests.checked_prompt_ids(ids, vocab_size=self.vocab_size, prompt_index=index)
            for index, ids in enumerate(prompts)
        ]
        total, done, tokens, started = len(lists) * samples_per_prompt, 0, 0, time.monotonic()

        async def sample(prompt_ids: torch.Tensor, prompt: int, index: int) -> Trajectory:
            nonlocal done, tokens
            trajectory = await self._attempts.sample(
                prompt_ids, sampling, prompt_index=prompt, sample_index=index, vocab_size=self.vocab_size
            )
            done, tokens = done + 1, tokens + trajectory.output_ids.numel()
            if on_progress is not None:
                on_progress(done, total, tokens / max(time.monotonic() - started, 1e-9))
            return trajectory

        calls = []
        for prompt, ids in enumerate(lists):
            prompt_ids = torch.tensor(ids, dtype=torch.int64)
            calls += [sample(prompt_ids, prompt, index) for index in range(samples_per_prompt)]
        async with self._members.watching():
            return await all_or_first_failure(calls)

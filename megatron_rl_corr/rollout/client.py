"""Requests samples from rollout servers, and controls the servers during a weight update."""

import itertools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from megatron_rl_corr.config.run import ENGINES, OVER_HTTP
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.push_bounds import PushBounds
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.engines.types import checked_prompt_ids
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.health import ServerHealth
from megatron_rl_corr.rollout.ingest.process import AskingProcess
from megatron_rl_corr.rollout.retries import Retries
from megatron_rl_corr.rollout.seeds import Draw
from megatron_rl_corr.rollout.server_pool import Counts, ServerPool
from megatron_rl_corr.rollout.stop_texts import Decode, check_decode, check_stop_ids

DEFAULT_ENGINE = next(iter(ENGINES))
FIRST_OWN_NUMBER = 1 << 40
"""The client's own numbers begin beyond those of any run, so that both kinds may be used side by side."""


class RolloutClient(ServerControl):
    """Several servers with the same weights, used as one.

    The HTTP session belongs to the event loop of the first call: use and close the client on that loop
    (`LoopThread` for synchronous callers). Times are in seconds. Failures are RolloutServerError (no answer,
    or one that says it failed), RolloutProtocolError (a wrong answer), RolloutOutage (no server is left) and,
    of one sample alone, SampleFailure, whose `cause` is a word and whose `__cause__` one of the others.

    Args:
        base_urls: addresses of servers, or of routers (`find_servers`).
        vocab_size: of the model; ids at or above it are refused.
        engine: what the servers run, a name in config/run.py ENGINES; "auto": `find_servers`
            asks each of them.
        max_concurrency: samples in flight over all servers.
        max_per_server: samples in flight at each server; None: as many.
        timeout_s: limit of a request that is no sample, from its start to the end of its answer.
        connect_timeout_s: limit of making a connection.
        read_timeout_s: how long the samples in flight at a server may make no progress. A sample may take
            long beside that, wait in the server's queue or for the end of a pause.
        answer_timeout_s: how long a request for a sample may take whatever the server's counters say; None:
            an hour, or a second for each of its `max_new_tokens`, whichever is longer.
        outage_timeout_s: how long `generate` waits when no server is left.
        update_timeout_s: limit of a request that reads or writes all weights of a server: a folder,
            checksums, the end of an update.
        push_timeout_s: limit of a whole push of weights, with its repetitions; None: twice
            `update_timeout_s`.
        max_retries: failed requests of a sample after which it fails.
        max_continuations: times that an aborted sample is continued where it was cut; 0 returns
            its tokens so far.
        api_key: of the servers.
        ca_file: certificates of the authorities that https servers are trusted by, instead of the system's.
        experts: how the model routes; every sample then has the experts of its tokens. None: not requested.
        seed: of the run. With the prompt's number it decides what a server with deterministic
            inference samples.
        keyed_cache: requests share cached prefixes only with those that were sent for the same weight
            version, so that no request after an update meets keys and values from before.
        replica, replicas: which of so many clients of the same servers this is; each begins at
            servers of its own.
        pushes_retract: whoever changes the servers' weights pauses them with mode retract. So a
            response in flight is computed anew where its weights change, and its routes from there on
            are known to be its own.
        decode: decode(ids) -> their text, special tokens included; needed where `stop` has texts.
        changes: servers come and go (`admit`, `retire`), and none need be there at first.
        ingest_process: samples are asked for, and their answers parsed, in a process of their own. None:
            where they have routed experts.

    Raises:
        ValueError: an argument is out of its range, or no address.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        vocab_size: int,
        engine: str = DEFAULT_ENGINE,
        max_concurrency: int = 64,
        max_per_server: int | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 60.0,
        answer_timeout_s: float | None = None,
        outage_timeout_s: float = 10.0,
        update_timeout_s: float = 3600.0,
        push_timeout_s: float | None = None,
        max_retries: int = 3,
        max_continuations: int = 8,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        experts: ExpertShape | None = None,
        seed: int = 0,
        keyed_cache: bool = False,
        replica: int = 0,
        replicas: int = 1,
        pushes_retract: bool = False,
        decode: Decode | None = None,
        changes: bool = False,
        ingest_process: bool | None = None,
    ):
        arguments = {
            "engine": engine,
            "timeout_s": timeout_s,
            "connect_timeout_s": connect_timeout_s,
            "api_key": api_key,
            "ca_file": ca_file,
            "changes": changes,
        }
        retrying = {
            "max_retries": max_retries,
            "outage_timeout_s": outage_timeout_s,
            "answer_timeout_s": answer_timeout_s,
            "max_continuations": max_continuations,
            "experts": experts,
            "keyed_cache": keyed_cache,
            "pushes_retract": pushes_retract,
            "decode": decode,
        }
        fleet = Fleet(base_urls, **arguments, max_in_flight=max_concurrency)
        _check_positive(
            vocab_size=vocab_size,
            max_concurrency=max_concurrency,
            max_per_server=max_per_server,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
            answer_timeout_s=answer_timeout_s,
            update_timeout_s=update_timeout_s,
            push_timeout_s=push_timeout_s,
        )
        _check_not_negative(
            outage_timeout_s=outage_timeout_s, max_retries=max_retries, max_continuations=max_continuations
        )
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed must be an integer of 64 bits, got {seed}")
        self.vocab_size, self.seed, self.keyed_cache, self.experts = vocab_size, seed, keyed_cache, experts
        self._decode, self._own_numbers = decode, itertools.count(FIRST_OWN_NUMBER)
        self._counts, self._read_timeout_s = Counts(), read_timeout_s
        super().__init__(fleet, fleet.urls, update_timeout_s=update_timeout_s)
        self.push_timeout_s, self.push_bounds = push_timeout_s or 2 * update_timeout_s, PushBounds()
        """The limit of a whole push; and the bounds of the one under way, which every `control` heeds."""
        self._pool = pool = ServerPool(
            fleet.urls,
            max_outstanding=max_concurrency,
            max_per_server=max_per_server,
            outage_timeout_s=outage_timeout_s,
            replica=replica,
            replicas=replicas,
        )
        self._health = ServerHealth(fleet, pool, self._counts, read_timeout_s=read_timeout_s)
        if ingest_process is None:
            ingest_process = experts is not None and engine in OVER_HTTP
        given = {"urls": fleet.urls, **arguments, "max_in_flight": max_concurrency}

        def made_process(**options: str) -> AskingProcess:  # a closure, so that no attribute has the API key
            return AskingProcess(fleet, given, **options)

        def another(urls: Sequence[str]) -> RolloutClient:
            return RolloutClient(
                urls,
                **arguments | {"changes": True} | retrying,
                vocab_size=vocab_size,
                max_concurrency=max_concurrency,
                max_per_server=max_per_server,
                read_timeout_s=read_timeout_s,
                update_timeout_s=update_timeout_s,
                push_timeout_s=push_timeout_s,
                seed=seed,
                ingest_process=False,
            )

        self.another, self._made_process = another, made_process
        """another(urls): a client like this one of other servers, which asks for samples in this process."""
        self._ingest = made_process() if ingest_process else None
        self._retries = Retries(fleet, pool, self._health, self._counts, **retrying, ingest=self._ingest)

    def __repr__(self) -> str:
        return f"RolloutClient({list(self.base_urls)}, vocab_size={self.vocab_size})"

    async def __aenter__(self) -> "RolloutClient":
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP session, and stop asking after servers that are left out. The next
        call opens another.
        """
        await self._health.close()
        if self._ingest is not None:
            await self._ingest.close()
        await self.fleet.close()

    async def find_servers(self, timeout_s: float) -> dict[str, str]:
        """Find out what each server runs, and put those behind a router in its place; call it
        before anything else.

        Returns:
            Address -> name of the engine there.

        Raises:
            RolloutServerError: an address does not answer within timeout_s seconds.
            RolloutProtocolError: it is no server, or a router without one.
        """
        await self.fleet.find(timeout_s)
        self.use_servers(self.fleet.names)
        return self.fleet.names

    def use_servers(self, names: Mapping[str, str]) -> None:
        """Use these servers, which another client has found, as `find_servers` returns them; before
        the first request.
        """
        self.fleet.use(names)
        self.base_urls = self.fleet.urls
        self._pool.use(self.base_urls)

    async def admit(self, names: Mapping[str, str]) -> None:
        """Use these servers too, which have the expected weights: address -> name of the engine there."""
        self.fleet.change(names, ())
        self.base_urls = self.fleet.urls
        self._pool.add(tuple(names))
        self._health.joined()

    async def retire(self, urls: Collection[str], drain_s: float, why: str) -> None:
        """Use these servers no more. Their samples in flight may end within drain_s; others are asked for
        those that do not, which is no failure of a sample.

        Args:
            urls: of servers that this client uses.
            drain_s: in seconds.
            why: told of each sample that is asked for elsewhere.
        """
        self.fleet.change({}, urls)
        self.base_urls = self.fleet.urls
        for server in self._pool.remove(urls):
            self._health.removed(server, drain_s, why)

    @property
    def servers_wanted(self) -> int:
        """Servers that this client's requests would keep busy now, as `ServerPool`; from any thread."""
        return self._pool.servers_wanted

    @property
    def idle_s(self) -> float:
        """Seconds since it was made in which it had no request in flight; from any thread."""
        return self._pool.idle_s

    def counts(self) -> dict[str, int]:
        """The `Counts` since the client was made, by name."""
        return asdict(self._counts)

    @property
    def left_out(self) -> list[str]:
        """Addresses of the servers that are not sampled from now; from any thread."""
        return [server.url for server in self._pool.left_out]

    @property
    def expected_version(self) -> str | None:
        """What servers must call their weights; None: anything. From any thread."""
        return self._health.expected_version

    @property
    def is_updating(self) -> bool:
        """Between `expect_pause` and `expect_version`; from any thread."""
        return self._pool.held

    def control(self, urls: Sequence[str] | None = None) -> ServerControl:
        """Control of some of the servers alone; None: of those that are sampled from now."""
        urls = [server.url for server in self._pool.servers if server.cause is None] if urls is None else urls
        return ServerControl(
            self.fleet,
            urls,
            update_timeout_s=self._update_timeout_s,
            silence_s=self._read_timeout_s,
            bounds=self.push_bounds,
        )

    def asking_process(self) -> AskingProcess:
        """A process, not started, that asks these servers; it ends with this one, or when it is closed."""
        return self._made_process(without="use `weight_transport` disk")

    async def versions_for_update(self) -> list[str | None]:
        """As `reported_versions`; servers that are left out because they do not answer cost
        next to no time.
        """
        versions = await self.reported_versions(silent=self._health.silent, timeout_s=self._read_timeout_s)
        answers = zip(self.base_urls, versions, strict=True)
        self._health.note_answers({url for url, version in answers if version is not None})
        return versions

    async def expect_pause(self, *, released: bool = False) -> None:
        """No outage is declared until `expect_version`: before a weight update. released: and
        nothing is sampled.
        """
        self._health.hold_outage(released=released)

    async def expect_version(
        self, version: str, *, restarted: Collection[str] = (), missed: Collection[str] = ()
    ) -> None:
        """Sample only from servers whose weights have this version, from now on; call it after
        every weight update.

        Answers of other weights are not used, and their server is left out until it reports this version.
        Before the first call every version is accepted. The arguments are those of `ServerHealth.expect`.
        """
        self._health.expect(version, restarted, missed)

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int = 1,
        group_numbers: Sequence[int] | None = None,
        on_sample: Callable[[Trajectory], Awaitable[None]] | None = None,
        on_progress: Callable[[int, int, float], None] | None = None,
        begun: Mapping[int, BegunGroup] | None = None,
    ) -> list[Trajectory]:
        """samples_per_prompt responses to each prompt, prompt-major: p0s0, p0s1, ..., p1s0, ...

        Each sample is one request, to the server with the fewest in flight. A server that fails is left out
        until it is healthy again, and its samples are requested from another one.

        Args:
            prompts: token ids of each prompt, all in [0, vocab_size).
            sampling: parameters of every sample.
            samples_per_prompt: responses to each prompt.
            group_numbers: for each prompt a number that no other prompt of the run has (a prompt that
                comes again gets another one): the seeds of its samples depend on it. None: the client
                counts its prompts itself.
            on_sample: awaited with each sample as it ends, while the other requests go on; what it
                raises is raised.
            on_progress: called after each sample with (samples done, all samples, response tokens
                per second so far).
            begun: of groups by their numbers what was sampled before, which is not asked for again; what is
                sampled now is noted there.

        Raises:
            ValueError: before anything is sent, for a prompt that is empty or holds an id outside the
                vocabulary, and for sampling parameters that `check_sampling` refuses.
            SampleFailure: one sample failed for good; the others are cancelled.
            RolloutError: a failure that no other server would mend, or no server is left; the
                others are cancelled.
        """
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {samples_per_prompt}")
        self.check_sampling(sampling)
        lists = [
            checked_prompt_ids(ids, vocab_size=self.vocab_size, prompt_index=index)
            for index, ids in enumerate(prompts)
        ]
        numbers = self.numbered(len(lists), group_numbers)
        total, done, tokens, started = len(lists) * samples_per_prompt, 0, 0, time.monotonic()

        async def new_sample(
            prompt_ids: torch.Tensor, prompt: int, index: int
        ) -> tuple[list[Trajectory], int]:
            trajectory = await self._retries.sample(
                prompt_ids,
                sampling,
                draw=Draw(self.seed, numbers[prompt], index),
                prompt_index=prompt,
                sample_index=index,
                vocab_size=self.vocab_size,
            )
            return [trajectory], 0

        async def sample(prompt_ids: torch.Tensor, prompt: int, index: int) -> Trajectory:
            nonlocal done, tokens
            kept = await BegunGroup.at(numbers[prompt], begun).sample(
                index, partial(new_sample, prompt_ids, prompt, index)
            )
            [trajectory] = kept.branches
            if on_sample is not None:
                await on_sample(trajectory)
            done, tokens = done + 1, tokens + trajectory.output_ids.numel()
            if on_progress is not None:
                on_progress(done, total, tokens / max(time.monotonic() - started, 1e-9))
            return trajectory

        async with self._health.watching():
            calls = []
            for prompt, ids in enumerate(lists):
                prompt_ids = torch.tensor(ids, dtype=torch.int64)
                calls += [sample(prompt_ids, prompt, index) for index in range(samples_per_prompt)]
            return await all_or_first_failure(calls)

    @property
    def cache_key(self) -> str | None:
        """The key of cached prefixes in requests that are sent now; None: all requests share them."""
        return self._retries.cache_key

    async def turn(
        self,
        prompt_ids: torch.Tensor,
        sampling: SamplingParams,
        draw: Draw,
        *,
        prefer: str | None = None,
        routes_from: int = 0,
    ) -> Trajectory:
        """One turn of an episode: the response to all its tokens so far, as `Turns` appends it.

        Args:
            prompt_ids: [T] int64, the prompt and all turns so far, each in the vocabulary: they are not
                checked again with each turn.
            sampling: parameters of this turn.
            draw: the place of the turn in the run, which its seed depends on.
            prefer: where the turn before ended: that server has its tokens in the cache. It is asked unless
                it is left out or crowded.
            routes_from: the token from which on routed experts are requested.

        Raises:
            ValueError, SampleFailure, RolloutError: as `generate`.
        """
        self.check_sampling(sampling)
        async with self._health.watching():
            return await self._retries.sample(
                prompt_ids,
                sampling,
                draw=draw,
                prompt_index=0,
                sample_index=draw.sample,
                vocab_size=self.vocab_size,
                prefer=prefer,
                routes_from=routes_from,
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise ValueError for parameters that an engine does not support, or that this client can't honour.

        Before it is known what the servers run: that no engine supports.
        """
        self.fleet.check_sampling(sampling)
        check_decode(sampling.stop, self._decode)
        check_stop_ids(sampling.stop_token_ids, self.vocab_size)
        if sampling.top_logprobs > self.vocab_size:
            raise ValueError(
                f"`score_centering` {sampling.top_logprobs} asks for more ids than the vocabulary has; use "
                f"at most {self.vocab_size}"
            )

    def require_sampling(self, samplings: Sequence[SamplingParams]) -> None:
        """From now on a server that was left out is taken back only if `sampling_problem`
        has none of these.
        """
        self._health.required = samplings

    def numbered(self, count: int, given: Sequence[int] | None) -> list[int]:
        """A number for each of `count` prompts: the given ones, or the next of the client's own.

        Raises:
            ValueError: another count of numbers, or one that is given twice: two groups with one number
                and one prompt would have the same responses.
        """
        if given is None:
            return list(itertools.islice(self._own_numbers, count))
        if len(given) != count or len(set(given)) != count:
            raise ValueError(
                f"group_numbers must be {count} different numbers, one for each prompt, got {list(given)}"
            )
        return list(given)


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")

"""The servers of a weight update: which of them answer, their pause and session, and which
version to sample from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch.distributed as dist

from megatron_rl_corr.engines.control import BRIEF_S, HEALTH_PROBE_TIMEOUT_S
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.types import NamedTensor, ServerChecksums
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.coverage import Coverage
from megatron_rl_corr.weight_sync.drafts import NO_DRAFTS, DraftLayers
from megatron_rl_corr.weight_sync.quantization import check_finite, check_quantization
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.updatable import (
    RELEASE_S,
    briefly,
    check_memory,
    reported_versions,
    unfinished,
)
from megatron_rl_corr.weight_sync.verify import PushVerifier

ABSENT, READY, RESTARTED, LEAVING = 0, 1, 2, 3
"""A server before an update: it does not answer; it has the last weights; it has others, as
after a restart; it was taken out of the list of servers.
"""
LOST = "it missed a push of weights, or was restarted, and has to join anew"
LEFT = "it was taken out of the list of servers"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Changing:
    """Servers that come and go."""

    drain_s: float
    """How long a server that leaves may go on with its samples."""
    leaving: Callable[[], Collection[str]]
    """Rank 0: the addresses of servers that are to leave."""


class WeightServers:
    """One rank's view of the servers that a client samples from, for `push_weights`; calls block.

    A server that does not answer before an update, or dies during it, misses the update and is not sampled
    from until the next one takes it in again.

    Args:
        client: of all servers; `expect` sets the version that it samples from.
        loop: the event loop of the client.
        transport: sends the weights.
        verifiers: compare checksums after an update, one for each engine by its name; none: not verified.
        coverage: checks that all tensors of the checkpoint are sent; None: not checked.
        pause_mode: of running responses. retract: their keys and values are computed anew with the
            new weights; in_place: they go on with the old ones; abort: they end, and the client
            requests the rest.
        samples: this rank asks for samples. On others no server is left out of the client,
            and none is probed.
        samples_ahead: responses run during updates (`max_lag` above 0).
        rounding: "none", or how what is sent is rounded, a key of weight_sync/rounding.py ROUNDINGS.
        quantization: of all servers, by `find_quantization`, which was given `quantized_checkpoint`.
        drafts: which weights are a draft model's, and whether they are sent.
        changing: how servers come and go; None: they are always the same ones. Otherwise an update is of
            those alone that have the weights of the last one, none may be left, and the others leave the
            client.
        ends_run: a failed update ends the run.
    """

    _colocated = False
    """The trainer is on the servers' GPUs, and can give them memory back."""

    def __init__(
        self,
        client: RolloutClient,
        loop: LoopThread,
        transport: WeightTransport,
        *,
        verifiers: Mapping[str, PushVerifier] = MappingProxyType({}),
        coverage: Coverage | None = None,
        pause_mode: str = "retract",
        samples: bool = True,
        samples_ahead: bool = False,
        rounding: str = "none",
        quantization: BlockFP8 | None = None,
        quantized_checkpoint: str | None = None,
        drafts: DraftLayers = NO_DRAFTS,
        changing: Changing | None = None,
        ends_run: bool = True,
    ):
        self.client, self.transport, self.verifiers, self.coverage = client, transport, verifiers, coverage
        self.rounding, self.quantization, self._quantized_checkpoint = (
            rounding,
            quantization,
            quantized_checkpoint,
        )
        self.drafts, self._changing, self.ends_run = drafts, changing, ends_run
        self._admitted: set[str] = set()
        """Servers that have joined since the last update: nothing that it set up is there."""
        self._loop, self._pause_mode, self._samples, self._samples_ahead = (
            loop,
            pause_mode,
            samples,
            samples_ahead,
        )
        self._control = client.control(client.base_urls)
        self._version: str | None = None
        self._started: str | None = None
        self._stopped = False
        self._restarted: set[str] = set()
        """Servers of this update that were restarted, maybe with other flags."""
        self._told_absent: set[str] = set()
        """Servers of which this update has told that they miss it."""
        self._stuck: set[str] = set()
        """Servers that were waited for in vain in this push: it goes on without them, whatever they say."""
        self._were_stuck: set[str] = set()
        """Those of earlier pushes, until the process that holds their weights answers."""
        self._asked_holders: dict[str, concurrent.futures.Future] = {}
        """The questions to that process, by its server."""
        self._answers_alone: set[str] = set()
        """Those of both that tell what their weights are called all the same."""
        self._found: dict[str, str] = {}
        """What each server called its weights before this update."""
        self.changes_follow = False
        """Pushes may bring changes alone, from the first one of everything on."""
        self.same_as_before = False
        """All servers of this update took the last one, and have its weights."""
        self.planned: dict[str, list[int]] | None = None
        """Names and shapes of all tensors of an update; None: not known yet, and checked bucket by bucket."""
        self.loaded: dict[str, int] = {}
        """Rank 0: of each server whose weights were hashed after the last update, a number that
        differs if they do.
        """

    @property
    def loop(self) -> LoopThread:
        """The event loop of the client."""
        return self._loop

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers in the current update."""
        return self._control.base_urls

    def begin_push(self) -> None:
        """A push begins, and the time that it may take; every rank calls it."""
        self._were_stuck |= self._stuck
        self._stuck.clear()
        self.client.push_bounds.begin(self.client.push_timeout_s)

    @property
    def has_time(self) -> bool:
        """The push has time left for another attempt."""
        return not self.client.push_bounds.is_over

    def begin_attempt(self) -> None:
        """Another attempt of this push begins; it has half of the time that is left."""
        self.client.push_bounds.begin_attempt()

    def note_written(self, seconds: float) -> None:
        """Every rank: the push has written a folder for so long, and no server was waited for."""
        self.client.push_bounds.extend(seconds)

    def end_push(self) -> None:
        """The push is over, well or not: no request is bounded by its time any more."""
        self.client.push_bounds.close()

    def stuck(self, error: Exception) -> list[bool]:
        """For each server of the client: it was waited for in vain in this push, as far as this rank knows.

        Args:
            error: why the push has failed on this rank.
        """
        known = set(self.client.push_bounds.stuck)
        if isinstance(error, RolloutServerError) and error.timed_out:
            known.add(error.url)
        return [url in known for url in self.client.base_urls]

    def leave_out_stuck(self, stuck: Sequence[bool]) -> None:
        """Let this push go on without them; stuck: as `stuck`, of all ranks together."""
        self._stuck |= {url for url, is_stuck in zip(self.client.base_urls, stuck, strict=True) if is_stuck}

    def find(self) -> list[int]:
        """ABSENT, READY, RESTARTED or LEAVING for each server of the client.

        Raises:
            RolloutServerError: none answers, and they are always the same ones.
            RolloutProtocolError: one lacks memory that this trainer can't give back.
        """
        states, versions = [], self._without_stuck(self._reported_versions())
        leaving = () if self._changing is None else self._changing.leaving()
        for url, version in zip(self.client.base_urls, versions, strict=True):
            engine = self.client.engine_of(url).name
            if url in leaving:
                states.append(LEAVING)
                continue
            if version is None:
                if url not in self._told_absent:
                    why = "does not answer"
                    if url in self._answers_alone:
                        why = "answers, but the process that holds its weights does not"
                    logger.warning("%s server %s %s and misses a weight update", engine, url, why)
                    EVENTS.tell("server_missed_update", f"it {why}", server=url)
                self._told_absent.add(url)
                states.append(ABSENT)
                continue
            if self._version is None and version.startswith(unfinished("")):
                logger.warning(
                    "%s server %s has weights %r: a trainer was killed while it sent them; they are sent "
                    "anew",
                    engine,
                    url,
                    version,
                )
                EVENTS.tell(
                    "server_taken_over", "a trainer was killed in a push", server=url, version=version
                )
            self._found[url] = version
            check_memory(
                url,
                version,
                endpoint=self.client.engine_of(url).model_info().endpoint,
                colocated=self._colocated,
            )
            is_ready = self._version is None or self._is_own(version)
            if not is_ready:
                logger.warning(
                    "%s server %s has weights %r instead of %r: was it restarted?",
                    engine,
                    url,
                    version,
                    self._version,
                )
                EVENTS.tell(
                    "server_missed_update",
                    "it has other weights, as after a restart",
                    server=url,
                    version=version,
                )
            states.append(READY if is_ready else RESTARTED)
        return states

    def _reported_versions(self) -> list[str | None]:
        if not self.client.base_urls:
            return []
        try:
            return reported_versions(self.client, self._loop, self.urls)
        except RolloutServerError:
            if self._changing is None:
                raise
            return [None] * len(self.client.base_urls)

    def _without_stuck(self, versions: list[str | None]) -> list[str | None]:
        """None for servers that are stuck too: those of this push, and those of earlier ones that still are.

        Raises:
            RolloutServerError: none is left by that, and they are always the same ones.
        """
        answers = {
            u for u, version in zip(self.client.base_urls, versions, strict=True) if version is not None
        }
        asked = sorted(self._were_stuck & answers - self._stuck)
        others = answers - self._stuck - self._were_stuck
        failures = self._holder_failures(asked, waits=not others)
        self._were_stuck -= {url for url, failure in failures.items() if failure is None}
        left = answers - self._stuck - self._were_stuck
        self._answers_alone = answers - left
        if answers and not left and self._changing is None:
            url = min(answers)
            raise failures.get(url) or RolloutServerError(
                url,
                self.client.engine_of(url).holder_alive().endpoint,
                None,
                "every server was waited for in vain in this push",
                method="GET",
            )
        return [
            version if url in left else None
            for url, version in zip(self.client.base_urls, versions, strict=True)
        ]

    def _holder_failures(self, urls: Sequence[str], *, waits: bool) -> dict[str, RolloutServerError | None]:
        """Why what holds these servers' weights does not answer; None where it does. Those that have not
        answered yet are left out: what they say later counts in the next push, so that a server that is well
        behind a slow handshake, or on a host under load, costs no step its time, and comes back.

        waits: until all have answered, or were asked for HEALTH_PROBE_TIMEOUT_S.
        """
        for url in urls:
            asked = self._asked_holders.get(url)
            # what failed since the last push may be over: only a late yes counts
            if asked is None or (asked.done() and (asked.exception() or asked.result())):
                self._asked_holders[url] = self._loop.submit(self._ask_holder(url))
        concurrent.futures.wait([self._asked_holders[url] for url in urls], None if waits else BRIEF_S)
        ended = [url for url in urls if self._asked_holders[url].done()]
        return {url: self._asked_holders.pop(url).result() for url in ended}

    async def _ask_holder(self, url: str) -> RolloutServerError | None:
        request = self.client.engine_of(url).holder_alive()
        try:
            await self.client.fleet.send(url, request, timeout_s=HEALTH_PROBE_TIMEOUT_S)
        except RolloutServerError as error:
            return error
        return None

    def _is_own(self, name: str) -> bool:
        """True if weights of this name are those of the last update, or of this one, whole or not."""
        return name in (self._version, self._started, unfinished(self._started or ""))

    def use(self, states: Sequence[int]) -> None:
        """Begin an update of the servers that are not ABSENT. Until `expect`, silent
        servers are no outage. Where servers come and go, those that are not READY leave the client.
        """
        self._loop.call(self.client.expect_pause())
        state = dict(zip(self.client.base_urls, states, strict=True))
        if self._changing is not None:
            self._let_leave(state, self._changing)
            state = {url: READY for url in state if state[url] == READY}
        urls = tuple(url for url in state if state[url] != ABSENT)
        self._restarted |= {url for url in urls if state[url] == RESTARTED}
        rejoined = None
        if RESTARTED in states or urls != self.urls or self._admitted:
            rejoined = [url for url in self.urls if state.get(url) == READY and url not in self._admitted]
        self._admitted.clear()
        self._control = self.client.control(urls)
        self.same_as_before = rejoined is None and self._version is not None
        self.transport.aim(self._control, rejoined=rejoined)
        for verifier in self.verifiers.values():
            verifier.clear()
        if self.coverage is not None:
            self.coverage.clear()

    def _let_leave(self, state: Mapping[str, int], changing: Changing) -> None:
        for drain_s, why, kinds in ((changing.drain_s, LEFT, (LEAVING,)), (0.0, LOST, (ABSENT, RESTARTED))):
            gone = [url for url in state if state[url] in kinds]
            if gone:
                self._loop.call(self.client.retire(gone, drain_s, why))
                tell_removed(gone, why)

    def note_admitted(self, urls: Collection[str]) -> None:
        """These servers have joined the client, with the weights of the last update."""
        self._admitted |= set(urls)

    def start(self, version: str) -> None:
        """Prepare the transport; rank 0 calls it before anything is sent."""
        self._started = version
        self.transport.start(version)

    def begin(self) -> None:
        """Pause the servers and open their update session; from the pause on their weights are
        called unfinished.

        So weights that a killed trainer has half sent pass for no version, and a trainer that starts after it
        knows why they are paused.

        Raises:
            RolloutProtocolError: a server can't be paused in this mode, or came back with weights in another
                form; none has been paused then.
            RolloutServerError: a server refuses the update, for instance because a name or a shape does
                not fit its model; its weights and their name are as before.
        """
        if self._restarted:
            restarted = self.client.control(sorted(self._restarted))
            self._loop.call(check_quantization(restarted, self.quantization, self._quantized_checkpoint))
        self._check_pause()
        self._stopped = True
        self._loop.call(self._control.pause_generation(self._pause_mode))
        self._loop.call(self._name_unfinished(self._started or ""))
        if not self.transport.in_session:
            return
        try:
            self._loop.call(
                self._control.reopen_weight_update(
                    self.planned, checksums=bool(self.verifiers), changes_follow=self.changes_follow
                )
            )
        except RolloutServerError as error:
            if error.status is not None:
                self._loop.call(self._rename_back())  # nothing was sent
            raise

    async def _name_unfinished(self, version: str) -> None:
        await self._control.update_weight_version(unfinished(version))

    async def _name_finished(self, version: str) -> None:
        await self._control.update_weight_version(version)

    async def _rename_back(self) -> None:
        """Call the weights what `find` found, as far as servers answer."""
        await asyncio.gather(
            *(
                briefly(self.client.control([url]).update_weight_version(self._found[url]))
                for url in self.urls
            )
        )

    def _check_pause(self) -> None:
        for url, info in zip(self.urls, self._loop.call(self._control.server_info()), strict=True):
            engine = self._control.engine_of(url)
            problem = engine.pause_problem(
                info, self._pause_mode, keyed_cache=self.client.keyed_cache, samples_ahead=self._samples_ahead
            )
            if problem is not None:
                raise RolloutProtocolError(url, engine.server_info().endpoint, problem)

    def begin_changes(self, base: str, stages: int) -> None:
        """Rank 0, behind `begin`: have the servers expect changes of version `base` from so many stages."""
        self._loop.call(self._control.begin_changes(self._started or "", base, stages))

    def keep(self, bucket: Sequence[NamedTensor], version: str) -> None:
        """Keep what `checksums` are compared with, of weights that the servers will have."""
        for verifier in self.verifiers.values():
            verifier.keep(self.drafts.verified(bucket), version)
            verifier.note_drafts(self.drafts.drafting(bucket))

    @collective
    def share_sample(self) -> None:
        """Have all ranks choose the same for `is_compared`, whatever each of them has counted; once."""
        for verifier in self.verifiers.values():
            verifier.share_elements()

    def is_compared(self, name: str, version: str) -> bool:
        """True if a tensor is compared after the push of this version, as far as it fits; on every rank."""
        return any(verifier.chooses(name, version) for verifier in self.verifiers.values())

    def send_changes(self, bucket: list[NamedTensor]) -> None:
        """Send a bucket of changes. Raises as `WeightTransport.send`."""
        self.transport.send(bucket)

    def send(self, bucket: list[NamedTensor], version: str) -> None:
        """Send one bucket to all servers, and keep what `checksums` are compared with.

        Raises IncompletePush for a number that can't be quantised, and as `WeightTransport.send`.
        """
        check_finite(bucket)
        self.keep(bucket, version)
        self.transport.send(bucket)
        if self.coverage is not None:
            self.coverage.count(bucket)

    def finish(self) -> None:
        """Return once all servers have this rank's last bucket. Raises as `WeightTransport.send`."""
        self.transport.finish()

    def end(self, version: str) -> None:
        """Close the session, name the weights, check their name at every server, drop
        prefixes of old weights.

        Servers that are paused in_place could not drop them; `begin` made sure that no later
        request uses them.

        Raises:
            RolloutProtocolError: a server reports another version.
        """
        if self.transport.in_session:
            self._loop.call(self._control.end_weight_update())
        self._loop.call(self._name_finished(version))
        for url, answer in zip(self.urls, self._loop.call(self._control.model_info()), strict=True):
            engine = self._control.engine_of(url)
            reported = engine.weight_version(answer)
            if reported != version:
                raise RolloutProtocolError(
                    url,
                    engine.model_info().endpoint,
                    f"its weights are called {reported!r} after version {version!r} was pushed; does another "
                    "trainer push to this server?",
                )
        if self._pause_mode != "in_place":
            self._loop.call(self._control.flush_cache())

    def checksums(self) -> dict[str, list[ServerChecksums]]:
        """Rank 0: the servers' checksums of their weights, by engine; [] if its version has none.

        Raises:
            RolloutProtocolError: servers disagree, or have other parameters than were sent.
        """
        found = {}
        for name, servers in self._control.by_engine().items():
            found[name] = self._loop.call(self.verifiers[name].read(servers))
            self.loaded |= {one.url: one.fingerprint() for one in found[name]}
            if self.coverage is not None:
                self.coverage.check_servers(found[name], self._control.fleet.engines[name])
        return found

    def compare(self, checksums: Mapping[str, list[ServerChecksums]]) -> None:
        """Compare this rank's part of what was sent with `checksums`. Raises as `PushVerifier.compare`."""
        for name, own in checksums.items():
            self.verifiers[name].compare(own)

    def resume(self) -> None:
        """Let the servers sample again."""
        self._loop.call(self._control.continue_generation())
        self._stopped = False

    def expect(self, version: str) -> None:
        """Sample only with these weights from now on; on every rank, because each has a client of its own."""
        self._version = version
        self._told_absent.clear()
        missed = set(self.client.base_urls) - set(self.urls)
        left_out = {"restarted": self._restarted, "missed": missed} if self._samples else {}
        self._loop.call(self.client.expect_version(version, **left_out))
        self._restarted = set()

    def abandon(self) -> None:
        """Close the session and resume after a failure, as far as possible, within RELEASE_S."""
        self.end_push()
        self._loop.call(self._let_go(), timeout=RELEASE_S)
        self._stopped = False

    def release(self) -> None:
        """Let paused servers sample again before this process ends, as `abandon`; from any thread.

        A server that waits in a broadcast goes on once the sender's process has ended, and then takes up
        these requests. The next update closes a session that stays open.
        """
        if self._stopped:
            self.end_push()
            self._loop.call(self._let_go(), timeout=RELEASE_S)

    async def _let_go(self) -> None:
        async def let_go(url: str) -> None:
            control = self.client.control([url])
            if self.transport.in_session and not self.transport.broken:
                await briefly(control.end_weight_update())
            if self._can_sample(url):
                await briefly(control.continue_generation())

        await asyncio.gather(*map(let_go, self.urls))

    def _can_sample(self, url: str) -> bool:
        """True if a server has what it needs to sample, of whatever weights."""
        return True

    def close(self) -> None:
        """Remove what the transport has set up at the servers."""
        self.transport.close()


def tell_removed(urls: Collection[str], why: str) -> None:
    """Say on rank 0 that servers have left the run."""
    if dist.get_rank() == 0:
        for url in urls:
            logger.warning("rollout server %s leaves the run: %s", url, why)
            EVENTS.tell("server_removed", why, server=url)

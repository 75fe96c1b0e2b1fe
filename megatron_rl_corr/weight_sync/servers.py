"""The rollout servers as a weight update sees them: who is there, begin, send, end, resume; each call waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.sglang.server_version import FLUSHES_PAUSED_SINCE, version_key
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.coverage import Coverage
from megatron_rl_corr.weight_sync.proof import PushProof, ServerWeights
from megatron_rl_corr.weight_sync.transports.base import WeightTransport

ABSENT, READY, STARTED_ANEW = 0, 1, 2
"""A server before an update: it does not answer; it has the last weights; it has others, as after a new start."""

IN_PLACE_NEEDS = ("disable_overlap_schedule", "disable_radix_cache")
"""Names in /server_info. With the overlap scheduler a token is told to be of the version after the one that sampled
it; with the prefix cache later prompts meet keys and values of old weights, and while a response is running SGLang
refuses to drop them. A client of `keyed_cache` meets none, so its servers may have one."""
STORES = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
"""Caches behind the radix cache; in older SGLang they know a prefix by its tokens alone, whatever its key."""

RELEASE_S = 6.0
"""Of a process that ends; each of the two questions has a third of it."""

logger = logging.getLogger(__name__)


class WeightServers:
    """Blocking weight updates of the servers of a client that answer.

    A server that does not answer before an update, or dies in the middle, misses it. It is not sampled from with the
    weights it has: `expect` tells the client which version to take. The next update takes it in again.

    pause_mode: of the responses that are running: `retract` computes their keys and values anew with the new weights,
    `in_place` goes on with the old ones, `abort` ends them, and the client asks for the rest.
    proof: None sends without asking afterwards what the servers have. coverage: None sends whatever the exporter has,
    be it all of the model or not. samples_ahead: responses run while weights are updated (--rollout-max-lag above 0).
    """

    def __init__(
        self, client: RolloutClient, loop: LoopThread, transport: WeightTransport, *,
        proof: PushProof | None = None, coverage: Coverage | None = None, pause_mode: str = "retract",
        samples_ahead: bool = False,
    ):
        self._client, self._loop, self._transport, self._proof = client, loop, transport, proof
        self._coverage, self._pause_mode, self._samples_ahead = coverage, pause_mode, samples_ahead
        self._updated = client.control(client.base_urls)
        self._version: str | None = None
        self._sent: str | None = None
        self._stopped = False

    @property
    def count(self) -> int:
        """Servers of the client."""
        return len(self._client.base_urls)

    @property
    def updated(self) -> int:
        """Those of them that are updated."""
        return len(self._updated.base_urls)

    @property
    def broken(self) -> bool:
        """Whether a failure has left servers that can't be updated once more, though they answer."""
        return self._transport.broken

    @broken.setter
    def broken(self, value: bool) -> None:
        self._transport.broken = value

    @property
    def stopped_while_sending(self) -> bool:
        """Whether `begin` comes before the first bucket; if not, before `deliver`."""
        return self._transport.in_session

    def look(self) -> list[int]:
        """ABSENT, READY or STARTED_ANEW for each server of the client; RolloutServerError if none answers."""
        states = []
        versions = self._loop.call(self._client.reported_versions())
        for url, version in zip(self._client.base_urls, versions, strict=True):
            if version is None:
                logger.warning("rollout server %s does not answer and misses a weight update", url)
                states.append(ABSENT)
            else:
                as_sent = self._version is None or version in (self._version, self._sent)
                if not as_sent:
                    logger.warning(
                        "rollout server %s has weights %r where %r was sent: started anew?", url, version, self._version
                    )
                states.append(READY if as_sent else STARTED_ANEW)
        return states

    def use(self, states: Sequence[int]) -> None:
        """Update the servers that are not ABSENT; until `expect` their silence is no outage."""
        self._loop.call(self._client.expect_pause())
        state = dict(zip(self._client.base_urls, states, strict=True))
        urls = tuple(url for url in state if state[url] != ABSENT)
        rejoined = None
        if STARTED_ANEW in states or urls != self._updated.base_urls:
            rejoined = [url for url in self._updated.base_urls if state[url] == READY]
        self._updated = self._client.control(urls)
        self._transport.aim(self._updated, rejoined=rejoined)
        for kept in (self._proof, self._coverage):
            if kept is not None:
                kept.clear()

    def start(self, version: str) -> None:
        """Rank 0, before anything is sent."""
        self._sent = version
        self._transport.start(version)

    def begin(self) -> None:
        """Stop sampling and open the update session (SGLang <= 0.5.20 has none and needs none)."""
        if self._pause_mode == "in_place":
            self._check_in_place()
        elif self._pause_mode == "retract" and self._samples_ahead:
            self._check_flushes()
        self._stopped = True
        self._loop.call(self._updated.pause_generation(self._pause_mode))
        if not self._transport.in_session:
            return
        try:
            self._loop.call(self._updated.begin_weight_update())
        except RolloutServerError as error:
            # A trainer that was killed in the middle of an update left its session open: nobody closes it.
            if error.status != 400 or "already open" not in error.detail:
                raise
            self._close_sessions()
            self._loop.call(self._updated.begin_weight_update())

    def send(self, bucket: list[NamedTensor], version: str) -> None:
        """Give one bucket to the transport, and keep of it what is looked at afterwards."""
        if self._proof is not None:
            self._proof.keep(bucket, version)
        self._transport.send(bucket)
        if self._coverage is not None:
            self._coverage.count(bucket)

    def all_reduce_coverage(self) -> None:
        """Every rank, when all stages have sent: IncompletePush, on one rank, unless that was all of the model."""
        if self._coverage is not None:
            self._coverage.all_reduce_check()

    def deliver(self, version: str) -> None:
        """Rank 0, when every stage has sent."""
        self._transport.deliver(version)

    def end(self, version: str) -> None:
        """Close the session, name the weights, check every server's answer, drop prefixes of old weights.

        Paused in_place a server would not drop them, and no later request meets them (IN_PLACE_NEEDS).
        """
        if self._transport.in_session:
            self._loop.call(self._updated.end_weight_update())
        self._loop.call(self._updated.update_weight_version(version))
        answers = self._loop.call(self._updated.model_info())
        for url, answer in zip(self._updated.base_urls, answers, strict=True):
            if str(answer.get("weight_version")) != version:
                raise RolloutProtocolError(
                    url, "/model_info",
                    f"weight_version is {answer.get('weight_version')!r} after version {version!r} was "
                    "pushed; does another trainer push to this server?",
                )
        if self._pause_mode != "in_place":
            self._loop.call(self._updated.flush_cache())

    @property
    def proves(self) -> bool:
        """Whether `show` and `compare` are to be called."""
        return self._proof is not None

    def show(self) -> list[ServerWeights]:
        """Rank 0: what the servers have, by their own checksums; RolloutProtocolError where they disagree, or have
        other parameters than were sent."""
        shown = self._proof.ask(self._updated, self._loop)
        if self._coverage is not None:
            self._coverage.check_servers(shown)
        return shown

    def compare(self, shown: list[ServerWeights]) -> None:
        """A sender: RolloutProtocolError for a server that has something else than was sent from here."""
        self._proof.compare(shown)

    def resume(self) -> None:
        """Go on sampling."""
        self._loop.call(self._updated.continue_generation())
        self._stopped = False

    def expect(self, version: str) -> None:
        """Sample only with these weights from now on: on every rank, because each has a client of its own."""
        self._version = version
        self._loop.call(self._client.expect_version(version))

    def abandon(self) -> None:
        """After a failure in the middle: close the session and go on sampling, whatever of it is possible."""
        try:
            if self._transport.in_session and not self._transport.broken:
                self._loop.call(self._updated.end_weight_update())
        finally:
            self.resume()

    def release(self) -> None:
        """Before the end of a process that has stopped servers for an update: they sample again, where they can.

        From any thread, within RELEASE_S. A server that waits in a broadcast goes on once its sender's process has
        ended: what is asked of it here lies in its queue. An update session that stays open is closed by the next.
        """
        if not self._stopped:
            return

        async def release_one(url: str) -> None:
            control = self._client.control([url])
            if self._transport.in_session:
                await _briefly(control.end_weight_update())
            await _briefly(control.continue_generation())

        async def release_all() -> None:
            await asyncio.gather(*(release_one(url) for url in self._updated.base_urls))

        self._loop.call(release_all(), timeout=RELEASE_S)

    def close(self) -> None:
        """Take off the servers what this process's transport set up there."""
        self._transport.close()

    def _check_in_place(self) -> None:
        for url, info in zip(self._updated.base_urls, self._loop.call(self._updated.server_info()), strict=True):
            keyed = self._client.keyed_cache and not any(info.get(name) for name in STORES)
            needs = IN_PLACE_NEEDS[:1] if keyed else IN_PLACE_NEEDS
            missing = [f"--{name.replace('_', '-')}" for name in needs if not info.get(name)]
            if missing:
                raise RolloutProtocolError(
                    url, "/server_info",
                    f"--rollout-pause-mode in_place needs a server started with {' '.join(missing)}; start it so, or "
                    "use --rollout-pause-mode retract",
                )

    def _check_flushes(self) -> None:
        """Before anything is stopped: else the first push with running responses would end the run."""
        for url, info in zip(self._updated.base_urls, self._loop.call(self._updated.server_info()), strict=True):
            version = str(info.get("version"))
            if () < version_key(version) < version_key(FLUSHES_PAUSED_SINCE):
                raise RolloutProtocolError(
                    url, "/server_info",
                    f"SGLang {version} can't drop cached prefixes while the requests wait that a push has retracted, "
                    f"and --rollout-max-lag is above 0; serve with SGLang {FLUSHES_PAUSED_SINCE} or newer, or use "
                    "--rollout-pause-mode abort or --rollout-max-lag 0",
                )

    def _close_sessions(self) -> None:
        """Each server's for itself: where an update was broken off, some have an open one and some have none."""
        for url in self._updated.base_urls:
            try:
                self._loop.call(self._client.control([url]).end_weight_update())
            except RolloutServerError as error:
                if error.status != 400:
                    raise


async def _briefly(question: Coroutine[Any, Any, object]) -> None:
    """Ask, and let the answer come when it may: a server takes up what it was sent though nobody waits any more."""
    try:
        async with asyncio.timeout(RELEASE_S / 3):
            await question
    except (RolloutError, TimeoutError) as error:
        logger.warning("a rollout server did not answer at the end: %s", error)

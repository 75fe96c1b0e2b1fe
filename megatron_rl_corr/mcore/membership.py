"""The servers of a run whose servers come and go: who is asked for, checked, taken in and let go.

Rank 0 reads the list and checks who is new, on a thread. Every other rank learns of a change at a meeting
that takes place anyway, while groups are awaited or as a push begins, so all ranks have the same servers at
the same step, in the same order. A new server gets the current weights by a push of its own, proves them,
and is sampled from then; whatever it fails at leaves it out, and the run goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.addresses import may_change
from megatron_rl_corr.engines.errors import RolloutError, may_be_gone
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.mcore.checks.joining_check import REACH_S, FoundAtStart, check_joining
from megatron_rl_corr.mcore.checks.server_check import check_servers
from megatron_rl_corr.mcore.checks.source_check import texts_of
from megatron_rl_corr.mcore.feature import Feature
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    PeerFailure,
    StartupError,
    broadcast_made,
    communication_device,
)
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.server_sources import EMPTY_READINGS, ServerList, behind_router
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.servers import LEFT, LOST, Changing, WeightServers, tell_removed
from megatron_rl_corr.weight_sync.update import push_weights

RETRY_S = 30.0
"""Seconds after which a server that failed a check is checked again; one that does not answer is asked at
every reading of the list.
"""
CHECKS_AT_ONCE = 8
OTHERS_S = 30.0
"""Seconds that a start waits for further servers' checks, once it could begin with those that passed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Change:
    """What rank 0 tells all ranks. Example: Change(("http://a:1",), (), {"http://c:1": "sglang"})."""

    leaving: tuple[str, ...]
    """Servers that are not in the list any more."""
    lost: tuple[str, ...]
    """Servers that were restarted: they have other weights, and join anew."""
    joining: Mapping[str, str]
    """Checked servers that get the weights: address -> name of the engine there."""


class Candidates:
    """Rank 0's thread: reads the list, and checks the servers in it that the run does not have.

    Args:
        options: the run's.
        source: its client has the servers of the run.
        servers: where they are listed.
    """

    def __init__(self, options: RunConfig, source: SampleSource, servers: ServerList):
        self._options, self._source, self._list = options, source, servers
        self._client, self._loop = source.client, source.loop
        self.samplings: Sequence[SamplingParams] = ()
        """A server must be able to sample so."""
        self.found: FoundAtStart | None = None
        self._texts: Mapping[str, list[int]] | None = None
        self._lock = threading.Lock()
        self._listed: tuple[str, ...] = ()
        self._checked: dict[str, str] = {}
        """Servers that may join: address -> name of the engine there."""
        self._lost: dict[str, str] = {}
        """Servers that were restarted -> the version that they should have."""
        self._joining: frozenset[str] = frozenset()
        """Servers that all ranks are taking in now."""
        self._later: dict[str, float] = {}
        """Address -> when it is checked again."""
        self._told: dict[str, str] = {}
        """Address -> what was last told of it."""
        self._checks: dict[str, Future[None]] = {}
        """Under way: by the address of each server."""
        self._threads = ThreadPoolExecutor(CHECKS_AT_ONCE, "server-check")
        self._awaited = False
        self._failure: BaseException | None = None
        self._stopped, self._thread = threading.Event(), None

    def first(self) -> dict[str, str]:
        """The servers to begin with: address -> engine; once all that are listed have been checked, or those
        that were not OTHERS_S after the first one join later.

        Raises:
            StartupError: there is none within servers_wait_s.
        """
        end, looks = time.monotonic() + self._options.servers_wait_s, 0
        enough = None
        while True:
            self.look(self._options.servers_poll_s)
            looks += 1
            # a source that can't be read must not hold up a run that the others give servers
            if self._checked and (self._list.known or looks > EMPTY_READINGS):
                enough = enough or time.monotonic() + OTHERS_S
                if not self._checks or time.monotonic() > enough:
                    self._awaited = False
                    return dict(self._checked)
            if time.monotonic() > end and not self._checked:
                told = [f"{name}: {why}" for name, why in (self._list.unread | self._told).items()]
                raise StartupError(
                    f"--rollout-servers-file: there is no server after {self._options.servers_wait_s:g} s "
                    f"(--rollout-servers-wait-s). {'; '.join(told) or 'The list is empty'}"
                )
            if not self._checked:
                self._tell_awaited()
            self._stopped.wait(self._options.servers_poll_s)

    def start(self) -> None:
        """Go on looking from now on; the run has the servers of `first`."""
        with self._lock:
            self._checked = {}
        self._thread = threading.Thread(target=self._run, name="server-list", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(2 * REACH_S)

    def asks(self) -> bool:
        """True if the servers of the run should change."""
        return bool(self._failure or self._checked or self.leaving() or self._lost)

    def leaving(self) -> tuple[str, ...]:
        """Servers of the run that are not listed any more."""
        listed = set(self._listed)
        return tuple(url for url in self._client.base_urls if url not in listed)

    def change(self) -> Change:
        """What should change now. Raises what has ended the thread."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            expected, out = self._client.expected_version, self._client.left_out
            # one that was let go, or has joined anew, since it was looked at is no more left out
            lost = [url for url, version in self._lost.items() if version == expected and url in out]
            self._lost.clear()
        leaving = self.leaving()
        with self._lock:  # `look` sees each as checked, as joining, or as a server of the run
            joining = {url: name for url, name in self._checked.items() if url in self._listed}
            self._checked, self._joining = {}, frozenset(joining)
        return Change(leaving, tuple(url for url in lost if url not in leaving), joining)

    def end_change(self) -> None:
        """All ranks have the servers of `change`, but those that were refused."""
        with self._lock:
            self._joining = frozenset()

    def refuse(self, url: str, why: str) -> None:
        """A server can't join, and is checked again later."""
        with self._lock:
            self._later[url] = time.monotonic() + RETRY_S
        self._tell(url, why)

    def joined(self, urls: Sequence[str]) -> None:
        """Servers have joined."""
        for url in urls:
            self._told.pop(url, None)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._options.servers_poll_s):
                # a server that answers slowly must not keep others from leaving
                self.look(self._options.servers_poll_s)
                self._look_for_restarted()
                if len(self._client.left_out) < len(self._client.base_urls):
                    self._awaited = False
                elif not self._checked:
                    self._tell_awaited()
        except BaseException as error:  # noqa: BLE001  raised by `change`, on the main thread
            if not self._stopped.is_set():
                self._failure = error

    def look(self, wait_s: float | None = None) -> None:
        """Read the list, and check who is new: until all checks have ended, or for wait_s, and they go on."""
        listed = self._list.look()
        with self._lock:
            self._listed = listed
            now = time.monotonic()
            self._checked = {url: name for url, name in self._checked.items() if url in listed}
            for known in (self._later, self._told):
                for url in known.keys() - set(listed):  # it is new when it comes back
                    known.pop(url, None)
            new = [
                url
                for url in listed
                if url not in self._client.base_urls
                and url not in self._checked
                and url not in self._joining
                and url not in self._checks
                and self._later.get(url, 0.0) <= now
            ]
        if new and self._texts is None:  # before the run samples: prompts are read by one thread at a time
            tokenizer, prompts = self._source.tokenizer, self._source.prompts
            self._texts = {} if tokenizer is None else texts_of(tokenizer, prompts)
        for url in new:
            self._checks[url] = self._threads.submit(self._check, url)
        ended, _ = wait(self._checks.values(), wait_s)
        self._checks = {url: check for url, check in self._checks.items() if check not in ended}
        for check in ended:
            check.result()

    def _check(self, url: str) -> None:
        client, found = self._client.another([url]), self.found
        try:
            names = self._loop.call(
                check_joining(client, self._options, samplings=self.samplings, texts=self._texts, found=found)
            )
        except (RolloutError, ValueError, OSError) as error:
            if isinstance(error, RolloutError) and may_change(error):
                self._tell(url, f"it does not answer yet: {error}")
            else:
                self.refuse(url, str(error))
        else:
            with self._lock:
                if found is self.found:  # else the run has begun meanwhile: it must be like the others
                    self._checked |= names
        finally:
            self._loop.call(client.close())

    def _look_for_restarted(self) -> None:
        """Servers of the run that are left out, and answer with other weights, as after a restart."""
        for url in self._client.left_out:
            expected = self._client.expected_version
            if expected is None or self._client.is_updating or url not in self._client.base_urls:
                continue
            try:
                (version,) = self._loop.call(self._client.control([url]).reported_versions(timeout_s=REACH_S))
            except RolloutError as error:
                if not may_be_gone(error):
                    logger.debug("%s: %s", url, error)
                continue
            if version not in (None, expected) and not self._client.is_updating:
                with self._lock:
                    self._lost[url] = expected

    def _tell(self, url: str, why: str) -> None:
        if self._told.get(url) != why:
            self._told[url] = why
            logger.warning("rollout server %s is left out: %s", url, why)
            EVENTS.tell("server_refused", why, server=url)

    def _tell_awaited(self) -> None:
        if not self._awaited:
            self._awaited = True
            why = (
                f"no server is there to sample from; waiting up to {self._options.servers_wait_s:g} s for "
                f"one in {', '.join(self._options.servers_file)}"
            )
            print(f"[rollout] {why}", flush=True)
            EVENTS.tell("servers_awaited", why)


@dataclass
class Membership:
    """Every rank's part of a fleet that changes.

    `asks` and `take` are the `MeetingTurns` of ranks that wait for groups.
    """

    options: RunConfig
    source: SampleSource
    candidates: Candidates | None
    """On rank 0."""
    version: str = ""
    """The name of the trainer's weights, since the last push."""
    joins: Joins | None = None
    """Once the run has begun."""

    @property
    def changing(self) -> Changing:
        """What updates of the run's servers need to know."""
        leaving = tuple if self.candidates is None else self.candidates.leaving
        return Changing(self.options.servers_drain_s, leaving)

    def begin(self, joins: Joins, found: FoundAtStart | None, samplings: Sequence[SamplingParams]) -> None:
        """The run's first servers have the weights: others may join from now on. found: on rank 0."""
        self.joins = joins
        if self.candidates is not None:
            self.candidates.found, self.candidates.samplings = found, samplings
            self.candidates.start()

    def close(self) -> None:
        """Look for servers no more."""
        if self.candidates is not None:
            self.candidates.close()

    def asks(self) -> bool:
        """True on rank 0 if the servers should change."""
        return self.joins is not None and self.candidates is not None and self.candidates.asks()

    @collective
    def take(self) -> None:
        """Let servers go, and take others in; every rank calls it, with whole and current weights, and while
        no update is made.
        """
        client, loop = self.source.client, self.source.loop
        change = broadcast_made(lambda: self.candidates.change())
        for urls, drain_s, why in (
            (change.leaving, self.options.servers_drain_s, LEFT),
            (change.lost, 0.0, LOST),
        ):
            if urls:
                loop.call(client.retire(urls, drain_s, why))
                tell_removed(urls, why)
        if change.joining:
            self._join(change.joining)
        if self.candidates is not None:
            self.candidates.end_change()

    @collective
    def _join(self, names: Mapping[str, str]) -> None:
        """Send the weights to new servers, have them prove these, and sample from those that could."""
        client, loop = self.source.client.another(list(names)), self.source.loop
        client.use_servers(names)
        joined: dict[str, str] = {}
        error: Exception | None = None
        try:
            urls = self.joins.send(client, self.version)
            joined = {url: names[url] for url in urls}
        except (RolloutError, OSError, ValueError, PeerFailure) as failure:
            error = failure
        finally:
            loop.call(client.close())
        if error is not None:
            self._put_off(error, list(names))
            return
        loop.call(self.source.client.admit(joined))
        self.joins.servers.note_admitted(joined)
        if self.candidates is not None:
            self.candidates.joined(list(joined))
            for url in joined:
                print(f"[rollout] server {url} joins, with weights {self.version}", flush=True)
                EVENTS.tell("server_joined", "checked, and has the weights", server=url, version=self.version)

    @collective
    def _put_off(self, error: Exception, urls: Sequence[str]) -> None:
        """Leave out the server whose failure a rank has seen, or all of them; every rank calls it."""
        own = getattr(error, "url", None) if isinstance(error, RolloutError) else None
        place = urls.index(own) + 1 if own in urls else 0
        if not isinstance(error, PeerFailure):
            logger.warning("servers could not join (%s): %s", ", ".join(urls), error)
        shared = torch.tensor(place, device=communication_device())
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        if self.candidates is None:
            return
        guilty = [urls[int(shared) - 1]] if shared else list(urls)
        why = "another rank's message says why" if isinstance(error, PeerFailure) else str(error)
        for url in guilty:
            self.candidates.refuse(url, f"it could not join: {why}")


@dataclass(frozen=True)
class Joins:
    """Sends the current weights to servers that join, on every rank."""

    exporter: StageExporter
    servers: WeightServers
    """What updates the run's own servers."""
    make_servers: Callable[[RolloutClient], WeightServers]
    """Makes the same for others, whose failures do not end the run; collective."""
    gathered: Callable[[], AbstractContextManager]
    """The model has whole and current weights within it."""
    bucket_bytes: int
    check_live: Callable[[str], None]
    """`Reference.check_live`."""
    sampling: SamplingParams
    server_check: str
    features: Sequence[Feature] = field(default=())

    @collective
    def send(self, client: RolloutClient, version: str) -> tuple[str, ...]:
        """Push to all servers of a client, and check them as at the start; every rank calls it.

        Returns:
            The addresses of those that have the weights, and may be sampled from.

        Raises:
            RolloutError, OSError, StartupError: on one rank, for a server that can't join.
            PeerFailure: then, on the other ranks.
        """
        self.check_live("pushed")
        with ExitStack() as opened:
            opened.enter_context(self.gathered())
            servers = self.make_servers(client)
            opened.callback(servers.close)
            push_weights(self.exporter, servers, version=version, bucket_bytes=self.bucket_bytes)
            for one in self.features:
                one.after_join(servers, version)
            urls = servers.urls
            further = [sampled for one in self.features for sampled in one.samplings()]
            check_servers(self.server_check, self.sampling, client, servers.loop, further, urls=servers.urls)
        return urls


def make_candidates(options: RunConfig, source: SampleSource) -> Candidates | None:
    """Rank 0's; None on others."""
    if dist.get_rank() != 0:
        return None
    fixed = [url.rstrip("/") for url in options.urls]
    ask_router = partial(behind_router, source.client, source.loop)
    return Candidates(options, source, ServerList(options.servers_file, fixed, ask_router))

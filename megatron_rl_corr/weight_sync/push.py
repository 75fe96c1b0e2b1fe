"""One weight update: pause, begin, send stage after stage, end, prove, continue; a server that dies is left out."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.parallel.failure import (
    WATCH,
    PeerFailure,
    all_reduce_done,
    all_reduce_failure,
    all_reduce_results,
    communication_device,
)
from megatron_rl_corr.weight_sync.buckets import buckets
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.servers import WeightServers

_FAILURES = (RolloutError, OSError)
"""What all_reduce_failure may raise here, beside PeerFailure: of a server, or of a folder."""

PARAMETERS_A_ROUND = 8
"""Of one rank's: with the other expert-parallel ranks' siblings that may be tens of gigabytes."""

logger = logging.getLogger(__name__)


def push_weights(
    exporter: StageExporter, client: WeightServers, *, version: str, bucket_bytes: int
) -> None:
    """Send the current weights to every server that answers, under the name `version`; every rank calls it.

    The client samples from no other server until the next update. Rank 0 finds out which servers answer, opens and
    closes the update for all; each stage's sender sends its own part, in buckets of bucket_bytes. The servers resume
    whatever happens. Where a server fails and does not answer any more, everything is sent again to the others, if the
    transport can (DistributedTransport can't). Any other failure is raised on the rank that saw it and as PeerFailure
    on every other.
    """
    _broadcast_servers(exporter, client)
    while True:
        try:
            _push_once(exporter, client, version, bucket_bytes)
            return
        except (*_FAILURES, PeerFailure) as error:
            if not _broadcast_fewer_servers(exporter, client, error):
                _abandon(exporter, client, error)
                raise
            if exporter.leads:
                logger.warning("weights are sent again, to the %d servers that are left", client.updated)
        except BaseException as error:
            _abandon(exporter, client, error)
            raise


def _push_once(exporter: StageExporter, client: WeightServers, version: str, bucket_bytes: int) -> None:
    _all_reduce_led(exporter, partial(client.start, version))
    if client.stopped_while_sending:
        _all_reduce_led(exporter, client.begin)
    for stage in range(exporter.num_stages):
        _all_reduce_sent(exporter, client, version, bucket_bytes, stage)
    client.all_reduce_coverage()
    if not client.stopped_while_sending:
        _all_reduce_led(exporter, client.begin)
    _all_reduce_led(exporter, partial(client.deliver, version))
    _all_reduce_led(exporter, partial(client.end, version))
    if client.proves:
        _broadcast_and_compare(exporter, client)
    client.expect(version)
    all_reduce_failure(None)  # on every rank, before a server samples with them
    _all_reduce_led(exporter, client.resume)


def _all_reduce_led(exporter: StageExporter, call: Callable[[], None]) -> None:
    """Rank 0 does it, however long it takes; what goes wrong, all ranks learn.

    They meet every MEETING_INTERVAL_S: servers may read a folder of a terabyte, or all of their weights for the
    checksums, for longer than a collective may wait.
    """
    all_reduce_results(_in_thread(call) if exporter.leads else None, lambda nothing: None)


def _in_thread(call: Callable[[], None]) -> Future[None]:
    """A daemon's: a process that ends does not wait for a server that does not answer."""
    asked: Future[None] = Future()

    def run() -> None:
        asked.set_running_or_notify_cancel()  # it can't be cancelled
        try:
            asked.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the answer is read
            asked.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return asked


def _broadcast_servers(exporter: StageExporter, client: WeightServers) -> None:
    """All ranks update the same servers, those that rank 0 reaches: one without a stage's weights must not be used."""
    states, error = [0] * client.count, None
    if exporter.leads:
        try:
            states = client.look()
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)
    told = torch.tensor(states, device=communication_device())
    dist.broadcast(told, src=0)
    client.use(told.tolist())


def _broadcast_fewer_servers(exporter: StageExporter, client: WeightServers, error: Exception) -> bool:
    """Whether the failure was a server's that is gone now, and others are left; those are updated from here on."""
    before = client.updated
    try:
        _all_reduce_broken(client)
        can_go_on = isinstance(error, (RolloutServerError, PeerFailure)) and not client.broken
        all_reduce_failure(None if can_go_on else error)
        _broadcast_servers(exporter, client)
    except (*_FAILURES, PeerFailure):
        return False
    return client.updated < before


def _all_reduce_broken(client: WeightServers) -> None:
    """All ranks learn that servers may be waiting in what one rank began: rank 0 must not ask them for more."""
    broken = torch.tensor(int(client.broken), device=communication_device())
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    client.broken = bool(broken.item())


def _all_reduce_sent(
    exporter: StageExporter, client: WeightServers, version: str, bucket_bytes: int, stage: int
) -> None:
    """One stage sends. All ranks meet it every PARAMETERS_A_ROUND of its parameters: the whole of it may take longer
    than a collective may wait. What goes wrong, all ranks learn."""
    if stage != exporter.stage:
        while not all_reduce_done(True, None):
            pass
        return
    parameters = itertools.count(1)

    def meet() -> None:
        if next(parameters) % PARAMETERS_A_ROUND == 0:
            all_reduce_done(False, None)

    all_reduce_failure(_send_stage(exporter, client, version, bucket_bytes, meet))


def _send_stage(
    exporter: StageExporter, client: WeightServers, version: str, bucket_bytes: int, meet: Callable[[], None]
) -> Exception | None:
    """Run through the stage's weights, after a failure too: the other ranks gather together with this one."""
    error = None
    for bucket in buckets(exporter.units(meet), bucket_bytes):
        if exporter.sends and error is None:
            error = _failure_of(partial(client.send, bucket, version))
    return error


def _broadcast_and_compare(exporter: StageExporter, client: WeightServers) -> None:
    """The servers compute checksums once, and each stage's sender compares those of its own weights."""
    shown: list[Any] = [None]

    def show() -> None:
        shown[0] = client.show()

    _all_reduce_led(exporter, show)
    dist.broadcast_object_list(shown, src=0, device=communication_device())
    all_reduce_failure(_failure_of(partial(client.compare, shown[0])) if exporter.sends else None)


def _abandon(exporter: StageExporter, client: WeightServers, error: BaseException) -> None:
    WATCH.report(error)  # before the servers: one of them may not answer, and the other ranks wait
    if exporter.leads:
        failure = _failure_of(client.abandon)
        if failure is not None:
            error.add_note(f"and the servers could not be told to go on: {failure}")


def _failure_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except _FAILURES as error:
        return error
    return None

"""Updates the servers' weights: pause, begin, send stage after stage, end, verify, resume; every
rank takes part.

A server that dies in the middle is left out, and the others are sent everything again. A failure that may
pass, as of a proxy, costs one repetition.
"""

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

from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError, may_pass
from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.engines.weight_changes import end_of_stage, packed
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    WATCH,
    PeerFailure,
    all_reduce_done,
    all_reduce_failure,
    all_reduce_results,
    communication_device,
)
from megatron_rl_corr.weight_sync.changes import Changes, DeltaPushes, changed_units, on_host
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from megatron_rl_corr.weight_sync.export import StageExporter, buckets
from megatron_rl_corr.weight_sync.quantization import quantised_units
from megatron_rl_corr.weight_sync.rounding import rounded_units
from megatron_rl_corr.weight_sync.servers import WeightServers

_FAILURES = (RolloutError, OSError)
"""Failures of a server or a shared folder; all_reduce_failure raises them, or PeerFailure on
the other ranks.
"""

PARAMETERS_BETWEEN_MEETINGS = 8
"""Parameters of one rank; with the siblings on other expert-parallel ranks they may be tens of gigabytes."""

logger = logging.getLogger(__name__)


@collective
def push_weights(
    exporter: StageExporter,
    servers: WeightServers,
    *,
    version: str,
    bucket_bytes: int,
    deltas: DeltaPushes | None = None,
) -> None:
    """Send the current weights to every server that answers; every rank calls it.

    Rank 0 finds out which servers answer, and opens and closes the update; each stage's sender sends the
    stage's weights. Whatever happens, the servers resume. If a server fails and answers no more, or one was
    waited for in vain, everything is sent again to the others; if all answer and the failure `may_pass`, or
    only changes were sent, they are sent everything once more. Neither if the transport is `broken`, as a
    group of NCCL's may be, nor if the client's `push_timeout_s` is over. Afterwards the client samples only
    from servers with the new weights.

    Args:
        exporter: gathers this rank's stage.
        servers: this rank's view of the servers.
        version: the name of the new weights.
        bucket_bytes: size of a bucket; only a unit that is larger makes a larger bucket.
        deltas: sends changes alone where it can; None: always everything.

    Where servers come and go, an update of none sends nothing: what joins later gets these weights.

    Raises:
        RolloutError: on the rank that saw it, for any other failure of a server.
        IncompletePush: on one rank, if not all of the checkpoint's tensors were sent.
        OSError: on the rank that saw it, for a folder or a process group.
        PeerFailure: on every other rank.
    """
    servers.changes_follow = deltas is not None
    servers.begin_push()
    try:
        _push_to_those_that_can(exporter, servers, version, bucket_bytes, deltas)
    finally:
        servers.end_push()


@collective
def _push_to_those_that_can(
    exporter: StageExporter,
    servers: WeightServers,
    version: str,
    bucket_bytes: int,
    deltas: DeltaPushes | None,
) -> None:
    """Attempts, as `push_weights` has them."""
    _use_reachable_servers(exporter, servers)
    repeated = False
    changes = None if deltas is None else deltas.changes(same_servers=servers.same_as_before)
    while True:
        if not servers.urls:
            servers.expect(version)
            return
        try:
            _push_once(exporter, servers, version, bucket_bytes, changes)
            if deltas is not None:
                if changes is not None and changes.due:
                    _prove_changes(exporter, servers, version, bucket_bytes, deltas, changes)
                    changes = None
                deltas.note_pushed(version, changes)
            return
        except (*_FAILURES, PeerFailure) as error:
            of_changes, changes = changes is not None, None
            if deltas is not None:
                deltas.note_failure()
            before = set(servers.urls)
            passes = _use_servers_that_answer(exporter, servers, error)
            gone = before - set(servers.urls)
            if passes is None or not (gone or of_changes or (passes and not repeated)):
                _abandon(exporter, servers, error)
                raise
            if of_changes and not (gone or passes) and deltas.note_refusal() and exporter.leads:
                _tell_end_of_changes(version, "servers that were well refused too many of them")
            repeated = repeated or not (gone or of_changes)
            if not isinstance(error, PeerFailure):  # the rank that knows why
                logger.warning("sending the weights again to %s: %s", ", ".join(servers.urls), error)
                EVENTS.tell("push_repeated", str(error), servers=list(servers.urls), version=version)
        except BaseException as error:
            _abandon(exporter, servers, error)
            raise


@collective
def _prove_changes(
    exporter: StageExporter,
    servers: WeightServers,
    version: str,
    bucket_bytes: int,
    deltas: DeltaPushes,
    changes: Changes,
) -> None:
    """Send everything behind the changes, under the same version: no parameter of a server may change by it.

    Its loaders, and what it makes of weights for its kernels, are the server's own, and of a large model only
    a sample is compared with the trainer's weights.
    """
    before, urls = dict(servers.loaded), servers.urls
    _use_reachable_servers(exporter, servers)
    _push_once(exporter, servers, version, bucket_bytes)
    if servers.urls != urls:
        deltas.note_no_proof()
        return
    same = set(urls) <= before.keys() and before == servers.loaded
    differs = torch.tensor(float(exporter.leads and not same), device=communication_device())
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    deltas.note_proof(changes, is_right=not differs)
    if differs and exporter.leads:
        _tell_end_of_changes(version, "servers had other weights by them than by everything")


def _tell_end_of_changes(version: str, why: str) -> None:
    logger.warning("from version %s on every push sends everything, not changes alone: %s", version, why)
    EVENTS.tell("changes_given_up", why, version=version)


@collective
def _push_once(
    exporter: StageExporter,
    servers: WeightServers,
    version: str,
    bucket_bytes: int,
    changes: Changes | None = None,
) -> None:
    transport, coverage = servers.transport, servers.coverage
    prepared: list[list[NamedTensor]] | None = None
    if changes is not None:
        _keep_for_comparison(exporter, servers, version)
        prepared = _packed_changes(exporter, servers, bucket_bytes, changes)
    _led_by_first_rank(exporter, partial(servers.start, version))
    if servers.planned is None and transport.in_session:
        servers.planned = servers.drafts.planned(_tensors_of_all_stages(exporter))
    if transport.in_session:
        _led_by_first_rank(exporter, servers.begin)
    if changes is not None:
        _led_by_first_rank(exporter, partial(servers.begin_changes, changes.base, exporter.num_stages))
    for stage in range(exporter.num_stages):
        if prepared is None:
            _send_stage_by_stage(exporter, servers, version, bucket_bytes, stage)
        else:
            _send_packed(servers, prepared if exporter.sends and stage == exporter.stage else [])
    if prepared is not None and coverage is not None and exporter.sends:
        # what is not in a bucket has not changed
        coverage.count_names(servers.drafts.planned(exporter.planned()))
    if coverage is not None:
        coverage.check_all_sent()
    if not transport.in_session:
        _led_by_first_rank(exporter, servers.begin)
    if isinstance(servers, ColocatedServers):
        # the ranks meet once more before rank 0 has servers take memory for their caches
        servers.free_cached()
    _led_by_first_rank(exporter, partial(transport.deliver, version))
    _led_by_first_rank(exporter, partial(servers.end, version))
    if servers.verifiers:
        _compare_checksums(exporter, servers)
    servers.expect(version)
    all_reduce_failure(None)  # every rank expects the new version before a server samples with it
    _led_by_first_rank(exporter, servers.resume)


@collective
def release_servers(exporter: StageExporter, servers: ColocatedServers) -> None:
    """Let every server free its memory for the trainer on its GPUs; every rank calls it, once none
    samples any more.

    The next `push_weights` gives it back.

    Raises:
        RolloutError: on rank 0, for a server that refuses, or that runs requests of others.
        PeerFailure: then, on every other rank.
    """
    servers.expect_release()
    all_reduce_failure(None)  # on every rank, before the first server is asked
    _led_by_first_rank(exporter, servers.release_memory)


@collective
def _tensors_of_all_stages(exporter: StageExporter) -> dict[str, list[int]]:
    """Names and shapes of all tensors of all stages, which servers check before the first byte, on rank 0;
    {} on others. Once a run.

    Only the stages' senders exchange them: of a model of 1T they are 35 MB.
    """
    if exporter.num_stages == 1 or not exporter.sends:
        return exporter.planned() if exporter.leads else {}
    stages: list[Any] = [None] * exporter.num_stages
    dist.gather_object(exporter.planned(), stages if exporter.leads else None, dst=0, group=exporter.senders)
    return {name: shape for stage in stages for name, shape in (stage or {}).items()}


@collective
def _led_by_first_rank(exporter: StageExporter, call: Callable[[], None]) -> None:
    """Rank 0 makes the call, however long it takes; its failure is raised on every rank.

    The ranks meet while they wait: servers may read a folder of a terabyte, or hash all of their weights,
    for longer than a collective may wait.
    """
    all_reduce_results(_in_thread(call) if exporter.leads else None, lambda result: None)


def _in_thread(call: Callable[[], None]) -> Future[None]:
    """The result of a call on a daemon thread: a process that ends does not wait for a server
    that never answers.
    """
    future: Future[None] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # it can't be cancelled
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the answer is read
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return future


@collective
def _use_reachable_servers(exporter: StageExporter, servers: WeightServers) -> None:
    """Every rank updates the servers that rank 0 reaches: one without a stage's weights must not
    be sampled from.
    """
    states, error = [0] * len(servers.client.base_urls), None
    if exporter.leads:
        try:
            states = servers.find()
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)
    shared = torch.tensor(states, device=communication_device())
    dist.broadcast(shared, src=0)
    servers.use(shared.tolist())


@collective
def _use_servers_that_answer(
    exporter: StageExporter, servers: WeightServers, error: Exception
) -> bool | None:
    """After a failure: use the servers that answer now. Whether the failure may pass; None: the
    push can't go on.
    """
    try:
        passes = _judge_failures(servers, error)
        # A protocol error is that of a server, or of its proxy, whose other answers are no better:
        # or it comes again.
        of_server = isinstance(error, (RolloutServerError, RolloutProtocolError, PeerFailure))
        can_go_on = of_server and not servers.transport.broken and servers.has_time
        all_reduce_failure(None if can_go_on else error)
        servers.begin_attempt()
        _use_reachable_servers(exporter, servers)
    except (*_FAILURES, PeerFailure):
        return None
    return passes


@collective
def _judge_failures(servers: WeightServers, error: Exception) -> bool:
    """True if the failure of a rank may pass; and each learns that one's transport is broken, and which
    servers a rank has waited for in vain.

    Servers may be waiting in what that rank began, and rank 0 must send them no more requests then.
    """
    causes = torch.tensor(
        [servers.transport.broken, may_pass(error), *servers.stuck(error)],
        dtype=torch.int,
        device=communication_device(),
    )
    dist.all_reduce(causes, op=dist.ReduceOp.MAX)
    servers.transport.broken, passes, *stuck = map(bool, causes.tolist())
    servers.leave_out_stuck(stuck)
    return passes


@collective
def _send_stage_by_stage(
    exporter: StageExporter,
    servers: WeightServers,
    version: str,
    bucket_bytes: int,
    stage: int,
) -> None:
    """One stage sends; its failure is raised on every rank.

    All ranks meet after every PARAMETERS_BETWEEN_MEETINGS parameters of the stage, because sending all of
    them may take longer than a collective may wait.
    """
    if stage != exporter.stage:
        while not all_reduce_done(True, None):
            pass
        return
    parameters = itertools.count(1)

    def meet() -> None:
        if next(parameters) % PARAMETERS_BETWEEN_MEETINGS == 0:
            all_reduce_done(False, None)

    all_reduce_failure(_send_stage(exporter, servers, version, bucket_bytes, meet))


@collective
def _send_stage(
    exporter: StageExporter, servers: WeightServers, version: str, bucket_bytes: int, meet: Callable[[], None]
) -> Exception | None:
    """Run through all of the stage's weights, after a failure too: the other ranks gather
    together with this one.
    """
    error, units = None, servers.drafts.without_unsent(exporter.units(meet))
    if exporter.sends:
        units = quantised_units(rounded_units(units, servers.rounding), servers.quantization)
    for bucket in buckets(units, bucket_bytes):
        if exporter.sends and error is None:
            error = _failure_of(partial(servers.send, bucket, version))
    if exporter.sends:
        last = _failure_of(servers.finish)
        error = error or last
    return error


@collective
def _packed_changes(
    exporter: StageExporter, servers: WeightServers, bucket_bytes: int, changes: Changes
) -> list[list[NamedTensor]]:
    """The buckets of changes of this rank's stage, on its sender, in the host's memory.

    Made before servers are paused, by all stages at once.
    """
    units = servers.drafts.without_unsent(exporter.units(gather=changes.gather_changed))
    found = buckets(changed_units(units), bucket_bytes)
    made = [
        [(name, on_host(tensor)) for name, tensor in packed(bucket, stage=exporter.stage, number=number)]
        for number, bucket in enumerate(found)
    ]
    return [*made, end_of_stage(stage=exporter.stage, buckets=len(made))] if exporter.sends else []


@collective
def _send_packed(servers: WeightServers, prepared: list[list[NamedTensor]]) -> None:
    """Send a stage's buckets of changes; every rank calls it, all but its sender with none.

    All meet after each bucket: servers may take long.
    """
    device, error = communication_device(), None
    for bucket in prepared:
        sent = [(name, tensor.to(device)) for name, tensor in bucket]
        error = _failure_of(partial(servers.send_changes, sent))
        if error is not None:
            break
        all_reduce_done(False, None)
    if prepared:
        last = _failure_of(servers.finish)
        error = error or last
    while not all_reduce_done(True, error):
        pass


@collective
def _keep_for_comparison(exporter: StageExporter, servers: WeightServers, version: str) -> None:
    """Gather, before any server is paused, the weights that will be compared with the servers' checksums."""
    servers.share_sample()
    names = exporter.names()
    kept = [any(servers.is_compared(name, version) for name in own) for own in names]
    for unit in servers.drafts.without_unsent(exporter.units(only=kept.__getitem__)):
        servers.keep(unit, version)


@collective
def _compare_checksums(exporter: StageExporter, servers: WeightServers) -> None:
    """The servers compute checksums once, and each stage's sender compares those of its own weights; no other
    rank gets them.
    """
    checksums: list[Any] = [None]

    def read() -> None:
        checksums[0] = servers.checksums()

    _led_by_first_rank(exporter, read)
    if exporter.sends and exporter.num_stages > 1:
        dist.broadcast_object_list(checksums, src=0, group=exporter.senders, device=communication_device())
    compare = partial(servers.compare, checksums[0])
    all_reduce_failure(_failure_of(compare) if exporter.sends else None)


def _abandon(exporter: StageExporter, servers: WeightServers, error: BaseException) -> None:
    if servers.ends_run:
        WATCH.report(error)  # before the servers: one of them may not answer, and the other ranks wait
    if exporter.leads:
        failure = _failure_of(servers.abandon)
        if failure is not None:
            error.add_note(f"and the servers could not be resumed: {failure}")


def _failure_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except _FAILURES as error:
        return error
    return None

"""One weight update: pause, begin, send stage after stage, end, verify, flush, continue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl_corr.parallel.failure import all_reduce_failure, communication_device
from megatron_rl_corr.rollout.errors import RolloutError
from megatron_rl_corr.weight_sync.buckets import buckets
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.servers import WeightServers


def push_weights(
    exporter: StageExporter, client: WeightServers, *, version: str, bucket_bytes: int
) -> None:
    """Send the current weights to every server that answers, under the name `version`; every rank calls it.

    The client samples from no other server until the next update. Rank 0 finds out which servers answer, opens and
    closes the update for all; each stage's sender broadcasts its own part, in buckets of bucket_bytes. The servers
    resume whatever happens. A server's failure in the middle is raised as RolloutError on the rank that saw it and
    as PeerFailure on every other.
    """
    _broadcast_servers(exporter, client)
    try:
        all_reduce_failure(_failure_of(client.begin) if exporter.leads else None)
        for stage in range(exporter.num_stages):
            mine = stage == exporter.stage
            all_reduce_failure(_send_stage(exporter, client, bucket_bytes) if mine else None)
        all_reduce_failure(_failure_of(partial(client.end, version)) if exporter.leads else None)
        client.expect(version)  # before a server samples with them
        all_reduce_failure(_failure_of(client.resume) if exporter.leads else None)
    except BaseException as error:
        if exporter.leads:
            failure = _failure_of(client.abandon)
            if failure is not None:
                error.add_note(f"and the servers could not be told to go on: {failure}")
        raise


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


def _send_stage(exporter: StageExporter, client: WeightServers, bucket_bytes: int) -> RolloutError | None:
    """Run through the stage's weights, after a failure too: the other ranks gather together with this one."""
    error = None
    for bucket in buckets(exporter.tensors(), bucket_bytes):
        if exporter.sends and error is None:
            error = _failure_of(partial(client.send, bucket))
    return error


def _failure_of(call: Callable[[], None]) -> RolloutError | None:
    try:
        call()
    except RolloutError as error:
        return error
    return None

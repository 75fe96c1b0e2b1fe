"""The servers of a run: reached, checked, and sent the first weights and those of every batch."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore.collect import SampleSource
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.push_probe import PushProbe
from megatron_rl_corr.mcore.reference import Reference
from megatron_rl_corr.mcore.server_check import broadcast_first_step, check_servers
from megatron_rl_corr.mcore.source_check import check_source
from megatron_rl_corr.parallel.failure import WATCH, StartupError, all_reduce_failure, all_reduce_startup
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.parallel.restarts import is_restart
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.servers import WeightServers, wait_updatable
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers

WAIT_FOR_SERVERS_S = 60.0
WAIT_AT_RESTART_S = 10.0
"""How long a server may be silent where torchrun has started the run again, before it goes on without that server."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightPush:
    """Sends the current weights of this run to its servers."""

    exporter: StageExporter
    servers: WeightServers
    run_id: str
    """The name of this start within the names of its weight versions."""
    bucket_bytes: int
    reference: Reference
    probe: PushProbe | None = None
    """--rollout-probe-push."""

    def __call__(self, version: int) -> dict[str, float]:
        """What the probe found, on every rank. Every rank calls it, with whole and current weights.

        Raises:
            ReferenceInPlace: as `Reference.check_live`.
            RolloutError, OSError, PeerFailure: as `push_weights` and `PushProbe.all_reduce_compared`.
        """
        self.reference.check_live("pushed")
        name = versions.name(self.run_id, version)
        if self.probe is not None:
            self.probe.before_push()
        push_weights(self.exporter, self.servers, version=name, bucket_bytes=self.bucket_bytes)
        return {} if self.probe is None else self.probe.all_reduce_compared(self.servers, name)


def reach_servers(
    options: RunConfig, exporter: StageExporter, source: SampleSource, reference: Reference, probe: PushProbe | None,
    layout: Layout,
) -> WeightPush:
    """Find the servers, and make what sends them weights; every rank calls it.

    Raises:
        StartupError, RolloutError: on one rank, for servers that do not answer or a transport that can't work.
        PeerFailure: then, on the other ranks.
    """
    client, loop = source.client, source.loop
    run_id = _broadcast_reached(client, loop)
    servers = _weight_servers(options, exporter, client, loop, samples=layout.is_data_leader)
    return WeightPush(exporter, servers, run_id, int(options.bucket_mib * 2**20), reference, probe)


def broadcast_checked(
    options: RunConfig, args: argparse.Namespace, sampling: SamplingParams, source: SampleSource, layout: Layout,
    evaluation: SamplingParams | None = None,
) -> FirstStep:
    """Check servers, which have the first weights, and prompts; the bound of the first step's KL. Every rank calls it.

    Raises:
        StartupError, RolloutError: as `check_servers`, `check_source` and `broadcast_first_step`.
    """
    check_servers(options.server_check, sampling, source.client, source.loop, evaluation)
    check_source(options.server_check, source, layout)
    return broadcast_first_step(
        options.max_first_step_kl, args, source.client, source.loop, rounded=options.push_rounding != "none"
    )


def _weight_servers(
    options: RunConfig, exporter: StageExporter, client: RolloutClient, loop: LoopThread, *, samples: bool
) -> WeightServers:
    checkpoint = Path(options.hf_checkpoint)
    transport = all_reduce_startup(lambda: make_transport(
        options.weight_transport, client, loop, backend="nccl" if torch.cuda.is_available() else "gloo",
        checkpoint=checkpoint, folder=options.weight_dir, stage=exporter.stage, sends=exporter.sends,
        address=options.weight_address,
    ))  # fmt: skip
    servers = WeightServers(
        client, loop, transport, verifiers=make_verifiers(options.verify_push, checkpoint, client.fleet.engines),
        coverage=make_coverage(checkpoint), pause_mode=options.pause_mode,
        samples=samples, samples_ahead=options.max_lag > 0, rounding=options.push_rounding,
    )
    if dist.get_rank() == 0:
        WATCH.on_failure(servers.release)  # whichever rank fails
    return servers


def _broadcast_reached(client: RolloutClient, loop: LoopThread) -> str:
    """Check from rank 0 that every server answers: failing here is cheaper than in the middle of a step.

    The servers behind a router are listed once, so that all ranks talk to the same ones. Returns the id of this start
    in the names of its weight versions, also rank 0's.
    """
    error, found = None, [{}, versions.new_run_id()]
    if dist.get_rank() == 0:
        try:
            if is_restart():
                _go_on_without_silent(client, loop)
            found[0] = loop.call(client.find_servers(WAIT_FOR_SERVERS_S))
            loop.call(wait_updatable(client, WAIT_FOR_SERVERS_S))
        except (RolloutError, ValueError) as failure:
            error = StartupError(f"--rollout-url: {failure}")
            error.__notes__ = [*getattr(failure, "__notes__", ())]
    all_reduce_failure(error)
    dist.broadcast_object_list(found, src=0)
    names, run_id = found
    client.use_servers(names)
    return run_id


def _go_on_without_silent(client: RolloutClient, loop: LoopThread) -> None:
    """Leave out, for this attempt, the servers that do not answer: nobody may be there to mend the command line."""
    for url, cause in loop.call(client.fleet.drop_silent(WAIT_AT_RESTART_S)).items():
        reason = f"it does not answer at a restart, and is left out until the next start: {cause}"
        logger.warning("rollout server %s: %s", url, reason)
        EVENTS.tell("server_left_out", reason, server=url)

"""The servers of a run: reached, checked, and sent the first weights and those of every batch."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError
from megatron_rl_corr.engines.local_faults import descriptors_needed, raise_descriptor_limit
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint
from megatron_rl_corr.mcore.checks.joining_check import found_at_start
from megatron_rl_corr.mcore.checks.server_check import bound_first_step, check_servers
from megatron_rl_corr.mcore.checks.source_check import check_source
from megatron_rl_corr.mcore.colocation import Colocation, TrainerMemory
from megatron_rl_corr.mcore.feature import Feature, RunParts
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.membership import Joins, Membership, make_candidates
from megatron_rl_corr.mcore.reference.policy import Reference
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.models.names import CheckpointNames
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    WATCH,
    StartupError,
    all_reduce_failure,
    all_reduce_results,
    all_reduce_startup,
    broadcast_made,
)
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.restarts import is_restart
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.changes import DeltaPushes, check_sizes
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.drafts import NO_DRAFTS, DraftLayers, find_drafting
from megatron_rl_corr.weight_sync.export import StageExporter, default_bucket_mib
from megatron_rl_corr.weight_sync.memory import ServerMemory
from megatron_rl_corr.weight_sync.quantization import find_quantization
from megatron_rl_corr.weight_sync.servers import Changing, WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.transports.ipc import check_same_host
from megatron_rl_corr.weight_sync.updatable import is_interrupted, wait_updatable
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers

WAIT_FOR_SERVERS_S = 60.0
WAIT_AT_RESTART_S = 10.0
"""How long a server may be silent where torchrun has started the run again, before it goes on
without that server.
"""

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
    features: Sequence[Feature] = ()
    deltas: DeltaPushes | None = None
    """--rollout-push delta."""
    colocation: Colocation | None = None
    """--rollout-colocate: a push ends the trainer's turn on the GPUs."""
    membership: Membership | None = None
    """--rollout-servers-file: servers come and go."""

    def close(self) -> None:
        """Look for servers no more, and remove what the transport has set up at those of the run."""
        if self.membership is not None:
            self.membership.close()
        self.servers.close()

    def __call__(self, version: int) -> dict[str, float]:
        """What the features found, and what took time, on every rank; all call it, with whole and
        current weights.

        Raises:
            ReferenceInPlace: as `Reference.check_live`.
            RolloutError, OSError, PeerFailure: as `push_weights` and `Feature.after_push`.
        """
        self.reference.check_live("pushed")
        name = versions.name(self.run_id, version)
        for one in self.features:
            one.before_push()
        if self.colocation is not None:
            self.colocation.before_push()
        push_weights(
            self.exporter,
            self.servers,
            version=name,
            bucket_bytes=self.bucket_bytes,
            deltas=self.deltas,
        )
        if self.membership is not None:
            self.membership.version = name
        numbers = {} if self.colocation is None else self.colocation.begin_serving_turn()
        if self.deltas is not None:
            numbers["rollout/push_changed"] = self.deltas.share
        for one in self.features:
            numbers |= one.after_push(self, name)
        return numbers


@collective
def release_servers_at_start(options: RunConfig, opened: ExitStack) -> ServerMemory | None:
    """Colocated servers free their memory before the model is made; None without --rollout-colocate.

    Every rank calls it.

    Args:
        options: the run's.
        opened: gets what tells which servers are left without memory.

    Returns:
        What rank 0 knows of their memory.

    Raises:
        StartupError: on rank 0, for a server that does not answer, or that can't release its memory.
        PeerFailure: then, on the other ranks.
    """
    if not options.colocate:
        return None
    memory, error = ServerMemory(), None
    opened.callback(memory.tell_left)
    if dist.get_rank() == 0:
        try:
            _release(options, memory)
        except (RolloutError, ValueError) as failure:
            error = StartupError(f"--rollout-colocate: {failure}")
            error.__notes__ = [*getattr(failure, "__notes__", ())]
    all_reduce_failure(error)
    return memory


def _release(options: RunConfig, memory: ServerMemory) -> None:
    with LoopThread() as loop, naming_checkpoint(options.hf_checkpoint):
        vocab_size = read_model(options.hf_checkpoint)["vocab_size"]
        client = RolloutClient(options.urls, vocab_size=vocab_size, **options.client_arguments())
        try:
            _reach(client, loop)
            check_same_host(client.base_urls)
            versions = loop.call(client.versions_for_update())
            names = {
                url: name for url, name in zip(client.base_urls, versions, strict=True) if name is not None
            }
            for url, name in names.items():
                if is_interrupted(name):
                    logger.warning("rollout server %s has weights %r: a trainer ended in its turn", url, name)
                    EVENTS.tell("server_taken_over", "a trainer ended in its turn", server=url, version=name)
            loop.call(memory.release(client.control(list(names)), names))
        finally:
            loop.call(client.close())
    print(
        f"[rollout] servers that have released their memory to the trainer: {len(memory.lacking)}", flush=True
    )


@collective
def reach_servers(
    options: RunConfig,
    exporter: StageExporter,
    source: SampleSource,
    reference: Reference,
    features: Sequence[Feature],
    layout: Layout,
    trainer: TrainerMemory,
    memory: ServerMemory | None,
    *,
    mtp_layers: int,
) -> WeightPush:
    """Find the servers, and make what sends them weights; every rank calls it.

    Args:
        trainer: what it frees while colocated servers sample.
        memory: what `release_servers_at_start` knows of the servers' memory, if they are colocated.
        mtp_layers: of the model that predict further tokens, which are sent where servers draft with them.

    Raises:
        StartupError, RolloutError: on one rank, for servers that do not answer or a transport
            that can't work.
        PeerFailure: then, on the other ranks.
    """
    client, loop, membership = source.client, source.loop, None
    _print_at_start(f"reaching the servers: {', '.join((*options.urls, *options.servers_file))}")
    if options.servers_file:
        all_reduce_startup(lambda: _check_transport(options))
        membership = Membership(options, source, make_candidates(options, source))
    run_id = _reach_from_first_rank(client, loop, membership)
    _print_at_start(f"{len(client.base_urls)} servers answer, and get the weights next")
    all_reduce_startup(lambda: _raise_descriptor_limit(options, client) if layout.is_data_leader else None)
    quantization = _find_quantization(options, client, loop)
    drafts = _find_drafts(options, client, loop, quantization) if mtp_layers else NO_DRAFTS
    servers = _weight_servers(
        options,
        exporter,
        client,
        loop,
        quantization,
        drafts,
        memory,
        samples=layout.is_data_leader,
        changing=None if membership is None else membership.changing,
    )
    colocation = Colocation(exporter, servers, trainer) if isinstance(servers, ColocatedServers) else None
    bucket_mib = options.bucket_mib or default_bucket_mib(len(client.base_urls))
    deltas = None
    if options.push == "delta":
        deltas = DeltaPushes(exporter, full_every=options.push_full_every)
        _check_deltas(client, loop, quantization, drafts)
        all_reduce_startup(lambda: check_sizes(exporter.planned()))
    return WeightPush(
        exporter,
        servers,
        run_id,
        int(bucket_mib * 2**20),
        reference,
        features,
        deltas,
        colocation,
        membership,
    )


@collective
def begin_changes_of_servers(options: RunConfig, push: WeightPush, run: RunParts) -> Membership | None:
    """Let servers join and leave from now on, where the run's come and go; every rank calls it.

    Args:
        options: the run's.
        push: has sent the first weights, and the servers have passed their checks.
        run: its source's client has the servers.

    Returns:
        What collecting ranks give a turn to; None: servers do not change.

    Raises:
        RolloutError: on rank 0, for a server that does not tell what it computes in; PeerFailure on others.
    """
    membership, servers = push.membership, push.servers
    if membership is None:
        return None
    client, loop = run.source.client, run.source.loop
    sampling = replace(run.collector.sampling, batch_invariant=options.batch_invariant)
    found = broadcast_made(
        lambda: loop.call(found_at_start(client, servers.quantization, drafts=servers.drafts.sent))
    )

    def make_servers(joining: RolloutClient) -> WeightServers:
        return _weight_servers(
            options,
            push.exporter,
            joining,
            loop,
            servers.quantization,
            servers.drafts,
            None,
            samples=False,
            ends_run=False,
        )

    joins = Joins(
        push.exporter,
        servers,
        make_servers,
        lambda: compat.gathered_parameters(run.model, run.optimizer),
        push.bucket_bytes,
        push.reference.check_live,
        sampling,
        options.server_check,
        push.features,
    )
    further = [sampled.sampling for one in push.features for sampled in one.samplings()]
    membership.begin(joins, found, [sampling, *further])
    return membership


def _check_transport(options: RunConfig) -> None:
    """StartupError for a push in which servers can't change."""
    if options.weight_transport == "distributed" and torch.cuda.is_available():
        raise StartupError(
            "--rollout-servers-file with --rollout-weight-transport distributed over NCCL: a server that "
            "ends in a broadcast of all holds up the others, and the trainer with them; use disk, or tensor "
            "for servers on this host"
        )


@collective
def check_servers_and_prompts(
    options: RunConfig,
    args: argparse.Namespace,
    sampling: SamplingParams,
    source: SampleSource,
    push: WeightPush,
    layout: Layout,
    features: Sequence[Feature] = (),
) -> FirstStep:
    """Check servers, which have the first weights, and prompts; the bound of the first step's KL.
    Every rank calls it.

    Raises:
        StartupError, RolloutError: as `check_servers`, `check_source` and `bound_first_step`.
    """
    further = [sampled for one in features for sampled in one.samplings()]
    sampling = replace(sampling, batch_invariant=options.batch_invariant)
    check_servers(options.server_check, sampling, source.client, source.loop, further)
    check_source(options.server_check, source, layout)
    rounded = options.push_rounding != "none" or push.servers.quantization is not None
    return bound_first_step(options.max_first_step_kl, args, source.client, source.loop, rounded=rounded)


@collective
def _weight_servers(
    options: RunConfig,
    exporter: StageExporter,
    client: RolloutClient,
    loop: LoopThread,
    quantization: BlockFP8 | None,
    drafts: DraftLayers,
    memory: ServerMemory | None,
    *,
    samples: bool,
    changing: Changing | None = None,
    ends_run: bool = True,
) -> WeightServers:
    checkpoint = Path(options.hf_checkpoint)
    transport = all_reduce_startup(
        lambda: make_transport(
            options.weight_transport,
            client,
            loop,
            backend="nccl" if torch.cuda.is_available() else "gloo",
            checkpoint=checkpoint,
            folder=options.weight_dir,
            stage=exporter.stage,
            sends=exporter.sends,
            address=options.weight_address,
            group_per_server=options.weight_group_per_server,
            quantization=quantization,
        )
    )
    make = WeightServers if memory is None else partial(ColocatedServers, memory=memory)
    servers = make(
        client,
        loop,
        transport,
        verifiers=make_verifiers(options.verify_push, checkpoint, client.fleet.engines),
        coverage=make_coverage(checkpoint, quantization),
        pause_mode=options.pause_mode,
        samples=samples,
        samples_ahead=options.max_lag > 0,
        rounding=options.push_rounding,
        quantization=quantization,
        quantized_checkpoint=options.quantized_checkpoint,
        drafts=drafts,
        changing=changing,
        ends_run=ends_run,
    )
    if dist.get_rank() == 0 and ends_run:
        WATCH.on_failure(servers.release)  # whichever rank fails
    return servers


@collective
def _check_deltas(
    client: RolloutClient, loop: LoopThread, quantization: BlockFP8 | None, drafts: DraftLayers
) -> None:
    """Raise StartupError on rank 0 where a server can't take pushes of changes, PeerFailure on others."""

    def ask() -> None:
        if quantization is not None:
            raise StartupError(
                "--rollout-push delta: the servers have FP8 weights, whose scales change with their blocks, "
                "and changes of these are not sent; use full"
            )
        if drafts.sent:
            raise StartupError(
                "--rollout-push delta: the servers draft with the layers of --mtp-num-layers, whose arrival "
                "is seen by pushes of all of them only; use full, or leave out --mtp-num-layers"
            )
        control = client.control(client.base_urls)
        for url, info in zip(control.base_urls, loop.call(control.server_info()), strict=True):
            if (problem := control.engine_of(url).changes_problem(info)) is not None:
                raise StartupError(f"--rollout-push delta: {url}: {problem}")

    _ask_from_first_rank(ask)


@collective
def _find_quantization(options: RunConfig, client: RolloutClient, loop: LoopThread) -> BlockFP8 | None:
    """How all servers have their weights quantised, which rank 0 finds out; None: they have not.

    Raises:
        StartupError: on rank 0, for weights that can't be sent, or are rounded already.
        PeerFailure: then, on the other ranks.
    """

    def ask() -> BlockFP8 | None:
        found = loop.call(find_quantization(client.control(client.base_urls), options.quantized_checkpoint))
        if found is not None and options.colocate:
            raise StartupError(
                "--rollout-colocate: the servers have FP8 weights, and whether every value and scale comes "
                "back with a push is not tested; serve the model in 16 bits"
            )
        if found is not None and options.push_rounding != "none":
            raise StartupError(
                f"--rollout-push-rounding {options.push_rounding}: the servers have FP8 weights, and are "
                "sent what they hold; leave it out"
            )
        return found

    return _ask_from_first_rank(ask)


@collective
def _find_drafts(
    options: RunConfig, client: RolloutClient, loop: LoopThread, quantization: BlockFP8 | None
) -> DraftLayers:
    """Whether all servers draft with the trained layers that predict further tokens, which rank 0 finds out.

    Raises:
        StartupError, RolloutError: on rank 0, as `find_drafting`.
        PeerFailure: then, on the other ranks.
    """
    config = read_model(options.hf_checkpoint)
    sent = _ask_from_first_rank(
        lambda: loop.call(find_drafting(client.control(client.base_urls), quantization))
    )
    return DraftLayers(CheckpointNames(config).is_of_mtp, sent=sent)


@collective
def _ask_from_first_rank[Found](ask: Callable[[], Found]) -> Found:
    """What rank 0 learns of the servers, on every rank; an answer that is none ends the start with
    the server's URL.
    """

    def asked() -> Found:
        try:
            return ask()
        except RolloutProtocolError as failure:
            raise StartupError(f"--rollout-url {failure.url}: {failure.detail}") from None

    return broadcast_made(asked)


@collective
def _reach_from_first_rank(client: RolloutClient, loop: LoopThread, membership: Membership | None) -> str:
    """Check from rank 0 that every server answers: failing here is cheaper than in the middle of a step.

    The servers behind a router are listed once, so that all ranks talk to the same ones. Returns the id of
    this start in the names of its weight versions, also rank 0's.
    """

    listed: list[dict[str, str]] = []
    if membership is not None:
        first = membership.candidates and loop.submit(asyncio.to_thread(membership.candidates.first))
        all_reduce_results(first, listed.append)

    def reached() -> tuple[dict[str, str], str]:
        try:
            return listed[0] if listed else _reach(client, loop), versions.new_run_id()
        except (RolloutError, ValueError) as failure:
            error = StartupError(f"--rollout-url: {failure}")
            error.__notes__ = [*getattr(failure, "__notes__", ())]
            raise error from None

    names, run_id = broadcast_made(reached)
    client.use_servers(names)
    return run_id


def _print_at_start(line: str) -> None:
    """Say on rank 0 what may take long."""
    if dist.get_rank() == 0:
        print(f"[rollout] {line}", flush=True)


def _raise_descriptor_limit(options: RunConfig, client: RolloutClient) -> None:
    """Let this leader open as many connections as its samples may take. Raises ValueError
    where it may not.
    """
    policies = 1 + bool(options.reference_urls) + bool(options.teacher_urls)
    servers = len(client.base_urls) + len(options.scoring_urls)
    needed = descriptors_needed(policies * options.max_concurrency, servers)
    what = f"--rollout-max-concurrency {options.max_concurrency} with {len(client.base_urls)} servers"
    if (told := raise_descriptor_limit(needed, what)) is not None:
        logger.warning("%s", told)


def _reach(client: RolloutClient, loop: LoopThread) -> dict[str, str]:
    """Find the servers, which can take an update now; address -> engine. Raises RolloutError, ValueError."""
    if is_restart():
        _go_on_without_silent(client, loop)
    found = loop.call(client.find_servers(WAIT_FOR_SERVERS_S))
    loop.call(wait_updatable(client, WAIT_FOR_SERVERS_S))
    return found


def _go_on_without_silent(client: RolloutClient, loop: LoopThread) -> None:
    """Leave out, for this attempt, the servers that do not answer: nobody may be there to mend
    the command line.
    """
    for url, cause in loop.call(client.fleet.drop_silent(WAIT_AT_RESTART_S)).items():
        reason = f"it does not answer at a restart, and is left out until the next start: {cause}"
        logger.warning("rollout server %s: %s", url, reason)
        EVENTS.tell("server_left_out", reason, server=url)

"""Builds a corrected run once Megatron has made its model: checks, weights, servers, the
first push, the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import check_branches
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.replay import last_replayed
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.core.auto_weights import AutoWeights
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.mcore import checkpoint_cursor, checkpoint_groups, compat
from megatron_rl_corr.mcore.abandoned_steps import clear_abandoned_folders
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.packing import pack_limits
from megatron_rl_corr.mcore.batch.replay_collector import ReplayCollector
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.batch.server_collector import Collector, SampleSource
from megatron_rl_corr.mcore.bridge_names import parameter_names
from megatron_rl_corr.mcore.checkpoint_groups import SavedGroups, WaitingWriter
from megatron_rl_corr.mcore.checks.batch_invariance import check_in_force
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint
from megatron_rl_corr.mcore.checks.model_check import check_models
from megatron_rl_corr.mcore.checks.policy_check import check_model
from megatron_rl_corr.mcore.checks.prompt_checks import training_prompts
from megatron_rl_corr.mcore.colocation import TrainerMemory
from megatron_rl_corr.mcore.feature import Feature, RunParts, RunSettings, features_of
from megatron_rl_corr.mcore.forward import LogprobSettings
from megatron_rl_corr.mcore.reference.policy import Reference
from megatron_rl_corr.mcore.reference.start import make_reference, make_teacher
from megatron_rl_corr.mcore.scoring import describe_start
from megatron_rl_corr.mcore.serving import (
    WeightPush,
    begin_changes_of_servers,
    check_servers_and_prompts,
    reach_servers,
)
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.step_reports import StepReports
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.shards import LocalParameter, load_shards, local_parameters
from megatron_rl_corr.moe.padding import check_packed_routers
from megatron_rl_corr.moe.routes import Routes, make_routes
from megatron_rl_corr.moe.statistics import ExpertLog
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_startup
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import SavedCursor
from megatron_rl_corr.rollout.episodes import SampleMaker, make_samples_with
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.memory import ServerMemory


@dataclass(frozen=True)
class MegatronRun:
    """What Megatron has set up."""

    args: argparse.Namespace
    model: list
    """This rank's chunks."""
    optimizer: Any
    servers: ServerMemory | None = None
    """What colocated servers lack at the start, as rank 0 knows."""

    @property
    def trained(self) -> tuple[list, Any]:
        """(model, optimizer)."""
        return self.model, self.optimizer

    @property
    def trainer(self) -> TrainerMemory:
        """What is freed while colocated servers sample."""
        return TrainerMemory(
            self.model, self.optimizer, on_host=bool(vars(self.args).get("optimizer_cpu_offload"))
        )


@dataclass(frozen=True)
class _Parts:
    """What is made before the servers are reached."""

    source: SampleSource | None
    """None in a replay."""
    loop: LoopThread
    """Runs everything that speaks HTTP."""
    collector: BatchCollector
    vocab_size: int
    parameters: list[LocalParameter]


@dataclass(frozen=True)
class Session:
    """A corrected run from the first push to the end."""

    step: CorrectedStep
    features: Sequence[Feature]
    parts: _Parts
    waiting: WaitingWriter | None
    """Saves groups that wait to be trained; None: they are not saved."""


def start(
    config: RolloutCorrectionConfig,
    options: RunConfig,
    megatron: MegatronRun,
    reports: StepReports,
    opened: ExitStack,
) -> Session:
    """Load the weights, reach the servers, push the first version; every rank calls it.

    Args:
        config, options: of the launcher's flags.
        megatron: what it has set up.
        reports: take a step's numbers, on the job's last rank.
        opened: receives the clean-up of every resource that was opened so far.

    Raises:
        StartupError: on one rank, for whatever keeps the run from starting.
        PeerFailure: then, on the other ranks.
    """
    args, layout = megatron.args, compat.layout(sequence_parallel=megatron.args.sequence_parallel)
    if options.linear_logprobs:
        all_reduce_startup(lambda: compat.check_output_processor(compat.unwrapped(megatron.model)))
    shape = batch_shape(options, args)
    if shape.packing is not None:
        all_reduce_startup(lambda: check_packed_routers(megatron.model))
    features, saved = features_of(options), checkpoint_cursor.broadcast_saved(args)
    routes = _routes(options, megatron, layout, features)
    sampled_with, restored = checkpoint_groups.load(options, args, layout, saved)
    updates, auto = Updates.of(options, args.seed, args.iteration, saved), _auto_weights(options, args, saved)
    for one in features:
        opened.callback(one.close)
    parts = all_reduce_startup(
        lambda: _prepare(options, megatron, layout, shape, routes, updates, saved, restored, features, opened)
    )
    if args.iteration == 0:
        megatron.optimizer.reload_model_params()
    reference = make_reference(
        config, options, args, parts.parameters, layout, loop=parts.loop, vocab_size=parts.vocab_size
    )
    opened.callback(reference.close)
    teacher = make_teacher(config, options, args, layout, loop=parts.loop, vocab_size=parts.vocab_size)
    opened.callback(teacher.close)
    exporter, collector = StageExporter.of(parts.parameters, layout), parts.collector
    if collector.agent_branches is not None:
        check_branches(config)
    logprobs = _logprobs(options, layout, parts.vocab_size, megatron.model)
    settings = RunSettings(options, args, layout, parts.vocab_size)
    run = RunParts(settings, *megatron.trained, parts.source, exporter, collector, shape, logprobs, reports)
    all_reduce_startup(lambda: [one.open(run) for one in features])
    for one in features:
        one.start(run)
    if parts.source is None:
        push = _no_push(reference)
        first_step = collector.bound_first_step(options.max_first_step_kl)
    else:
        push = reach_servers(
            options,
            exporter,
            parts.source,
            reference,
            features,
            layout,
            megatron.trainer,
            megatron.servers,
            mtp_layers=args.mtp_num_layers or 0,
        )
        opened.callback(push.close)
        opened.callback(collector.close)  # once more: what samples ends before the servers are left
        check_models(options, parts.source.client, parts.loop)
        with compat.gathered_parameters(*megatron.trained):
            push(updates.batches(args.iteration))
        try:
            first_step = check_servers_and_prompts(
                options, args, collector.sampling, parts.source, push, layout, features
            )
            collector.turns = begin_changes_of_servers(options, push, run)
        except BaseException:
            opened.close()
            raise
    step = CorrectedStep(
        config=config if auto is None else auto.corrected(config),
        auto=auto,
        layout=layout,
        shape=shape,
        collector=collector,
        push=push,
        report=reports.numbers.update,
        routes=routes,
        updates=updates,
        logprob_settings=logprobs,
        features=features,
        first_step=first_step and replace(first_step, restored=bool(restored and restored.has_any)),
        reference=reference,
        teacher=teacher,
        colocation=push.colocation if isinstance(push, WeightPush) else None,
    )
    clear_abandoned_folders(options, layout, args.iteration)
    _print_start(config, step)
    return Session(step, features, parts, _waiting_writer(options, layout, parts, sampled_with, opened))


def _waiting_writer(
    options: RunConfig, layout: Layout, parts: _Parts, sampled_with: dict[str, Any], opened: ExitStack
) -> WaitingWriter | None:
    if options.replay is not None or not options.save_waiting_gib:
        return None
    waiting = WaitingWriter(
        layout,
        options,
        sampled_with,
        parts.collector.sampling,
        row_of=lambda number: parts.source.prompts.index_at(number),  # a rank that draws none has no prompts
    )
    opened.callback(waiting.close)
    return waiting


def _auto_weights(
    options: RunConfig, args: argparse.Namespace, saved: SavedCursor | None
) -> AutoWeights | None:
    """The weights that a run goes on with which chooses them. saved: the cursor of its checkpoint."""
    if options.correction is None:
        return None
    begun = AutoWeights(args.global_batch_size)
    if saved is not None and saved.auto_level:
        return replace(begun, level=saved.auto_level)
    if args.iteration and dist.get_rank() == 0:
        print(
            f"[rollout] --rollout-correction auto: the checkpoint of iteration {args.iteration} does not say "
            f"which weights the run had; it goes on with {begun}",
            file=sys.stderr,
            flush=True,
        )
    return begun


def _print_start(config: RolloutCorrectionConfig, step: CorrectedStep) -> None:
    if dist.get_rank() != 0:
        return
    for line in describe_start(config, step.scoring_reasons, step.updates.count):
        print(f"[rollout] {line}", flush=True)


def _no_push(reference: Reference) -> Callable[[int], dict[str, float]]:
    """What takes the place of a push where there are no servers."""

    def check(version: int) -> dict[str, float]:
        reference.check_live("pushed")
        return {}

    return check


def _prepare(
    options: RunConfig,
    megatron: MegatronRun,
    layout: Layout,
    shape: BatchShape,
    routes: Routes,
    updates: Updates,
    saved: SavedCursor | None,
    restored: SavedGroups | None,
    features: Sequence[Feature],
    opened: ExitStack,
) -> _Parts:
    """Everything that needs neither servers nor other ranks. Raises ValueError or OSError
    for what is wrong.
    """
    args, problems = megatron.args, Problems()

    def opened_checkpoint() -> tuple[HFCheckpoint, int]:
        with naming_checkpoint(options.hf_checkpoint):
            checkpoint = HFCheckpoint(options.hf_checkpoint)
            return checkpoint, checkpoint.config["vocab_size"]

    opened_now = problems.check("checkpoint", opened_checkpoint)
    problems.raise_all()  # all that follows needs it
    checkpoint, vocab_size = opened_now
    loop = LoopThread()
    opened.callback(loop.close)
    batches = updates.batches(args.iteration), updates.batches(args.train_iters)
    source = None
    if options.replay is not None:
        batches = (
            batches[0],
            updates.batches(last_replayed(args.iteration, args.train_iters, args.exit_interval)),
        )
        collector: BatchCollector | None = problems.check(
            "collector",
            lambda: ReplayCollector(
                options,
                layout,
                shape,
                batches=batches,
                iteration=args.iteration,
                vocab_size=vocab_size,
                routes=routes,
            ),
        )
    else:
        settings = RunSettings(options, args, layout, vocab_size)
        source = sample_source(settings, loop, routes, features, opened, problems)
        collector = collector_of(
            settings,
            shape,
            source,
            features,
            problems,
            batches=batches,
            saved=saved,
            restored=restored,
            routes=routes,
        )
    if collector is not None:
        opened.callback(collector.close)
    # Weights take minutes to load: not where it is known that the run can't start.
    parameters = problems.check(
        "parameters",
        lambda: loaded_parameters(checkpoint, args, megatron.model, layout, load=not problems),
    )
    problems.raise_all()
    return _Parts(source, loop, collector, vocab_size, parameters)


def collector_of(
    settings: RunSettings,
    shape: BatchShape,
    source: SampleSource | None,
    features: Sequence[Feature],
    problems: Problems,
    **how: Any,
) -> Collector | None:
    """What collects batches, once the features are prepared too; problems gets what is wrong.

    Args:
        settings, shape: the run's.
        source: of the samples; None: it could not be made, and of these nothing is known.
        features: the run's.
        problems: what was wrong with its prompts is in it.
        how: `Collector`'s.
    """
    if source is None:
        return None
    how["traces"] = any(one.needs_traces for one in features)
    how["origins"] = any(one.needs_origins for one in features)

    def make() -> Collector:
        wanted = [one.samples_aside(shape.rows(settings.layout.dp_size)) for one in features]
        assert sum(map(bool, wanted)) <= 1, "take_aside gives all to one feature"
        how["aside"] = sum(wanted)
        return Collector(settings.options, settings.layout, shape, source, **how)

    collector = problems.check("collector", make, needs=["prompts"])
    for one in features:
        with problems.catch():
            one.prepare(settings, source)
    return collector


def batch_shape(options: RunConfig, args: argparse.Namespace) -> BatchShape:
    """Sizes of the run's batches, from our flags and Megatron's."""
    return BatchShape(
        group_size=options.group_size,
        packing=pack_limits(args),
        updates_per_batch=options.updates_per_batch,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
    )


def sample_source(
    settings: RunSettings,
    loop: LoopThread,
    routes: Routes,
    features: Sequence[Feature],
    opened: ExitStack,
    problems: Problems,
) -> SampleSource | None:
    """Client, prompts and what gives rewards, which is started on the ranks that ask for samples.

    No server is asked.

    Args:
        settings: the run's.
        loop: runs everything that speaks HTTP.
        routes: says which experts servers must return.
        features: whose data is looked at where no source can be made.
        opened: gets what closes the client, and ends the workers of rewards and what makes episodes.
        problems: gets what is wrong, under the names tokenizer, client, rewards, episodes and prompts.

    Returns:
        The source, without prompts where they can't be used; None where nothing else can be told without it.
    """
    options, args = settings.options, settings.args
    layout, vocab_size = settings.layout, settings.vocab_size

    def made_client() -> RolloutClient:
        client = RolloutClient(
            options.urls,
            vocab_size=vocab_size,
            experts=routes.server_shape,
            seed=args.seed,
            keyed_cache=options.pause_mode == "in_place",
            pushes_retract=options.pause_mode == "retract",
            decode=tokenizer and tokenizer.decode_all,
            replica=layout.dp_rank,
            replicas=layout.dp_size,
            **options.client_arguments(),
        )
        opened.callback(lambda: loop.call(client.close()))
        return client

    def started_rewards() -> Rewards:
        rewards = Rewards.of(options, tokenizer)
        if layout.is_data_leader:
            loop.call(rewards.start())
            opened.callback(lambda: loop.call(rewards.close()))
        return rewards

    def made_episodes() -> SampleMaker | None:
        maker = make_samples_with(options, tokenizer, seq_length=args.seq_length, replica=layout.dp_rank)
        if maker is not None and layout.is_data_leader:
            loop.call(maker.start())
            opened.callback(lambda: loop.call(maker.close()))
        return maker

    tokenizer = problems.check("tokenizer", lambda: Tokenizer.from_folder(options.hf_checkpoint))
    client = problems.check("client", made_client, needs=["tokenizer"])
    rewards = problems.check("rewards", started_rewards, needs=["tokenizer"])
    episodes = problems.check("episodes", made_episodes, needs=["tokenizer"])
    prompts = problems.check(
        "prompts", lambda: training_prompts(options, args, layout, tokenizer, vocab_size), needs=["tokenizer"]
    )
    if prompts is not None and problems.passed("rewards"):
        drop = options.unread_labels == "drop"
        problems.check(
            "labels", lambda: loop.call(rewards.check_readable(prompts, "--rollout-prompts", drop=drop))
        )
    if not problems.passed("client", "rewards"):  # a feature can't be made, but its data can be looked at
        for one in features:
            name = f"data of {type(one).__name__}"
            problems.check(name, lambda one=one: one.check_data(settings, tokenizer), needs=["tokenizer"])
        return None
    return SampleSource(client, loop, prompts, rewards, episodes, tokenizer)


@collective
def _logprobs(options: RunConfig, layout: Layout, vocab_size: int, model: list) -> LogprobSettings:
    if options.batch_invariant:
        all_reduce_startup(lambda: check_in_force(compat.unwrapped(model)))
    return LogprobSettings(
        layout.tp_group,
        options.temperature,
        vocab_size,
        from_hidden=options.linear_logprobs,
        fp32_lm_head=options.fp32_lm_head,
        inplace_gradient=options.inplace_gradient,
        whole_rows=options.batch_invariant,
        before_copies=not options.linear_logprobs and compat.has_output_processor(compat.unwrapped(model)),
    )


def _routes(options: RunConfig, megatron: MegatronRun, layout: Layout, features: Sequence[Feature]) -> Routes:
    log = None
    if options.expert_statistics:
        from megatron.training import training

        log = ExpertLog(options.log_dir, training.get_tensorboard_writer)
    routes = make_routes(
        options.router_replay,
        megatron.model,
        layout,
        num_layers=megatron.args.num_layers,
        min_agreement=options.router_replay_min_agreement,
        log=log,
    )
    for one in features:
        routes = one.steered(routes, megatron.model, megatron.args, layout)
    return routes


def loaded_parameters(
    checkpoint: HFCheckpoint, args: argparse.Namespace, model: list, layout: Layout, *, load: bool = True
) -> list[LocalParameter]:
    """This rank's parameters, with the weights of a Hugging Face folder where no checkpoint of Megatron had
    any.

    Args:
        checkpoint: the folder.
        args: Megatron's.
        model: this rank's chunks.
        layout: its place in the job.
        load: False: weights stay as they are.

    Raises:
        ValueError: the script built another model than its arguments say, or the folder has not its weights.
    """
    chunks = compat.unwrapped(model)
    check_model(chunks, args)
    experts = (args.num_experts or 0) // args.expert_model_parallel_size
    with naming_checkpoint(str(checkpoint.path)):
        table = parameter_names(
            checkpoint.config, args.rollout_model_provider, padded_vocab_size=args.padded_vocab_size
        )
        parameters = local_parameters(chunks, table, experts_per_rank=experts)
        if load and args.iteration == 0 and not compat.begins_with_pretrained(args):
            load_shards(parameters, checkpoint, layout.shard)
    return parameters

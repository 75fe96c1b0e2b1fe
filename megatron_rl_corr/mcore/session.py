"""Builds what a corrected run needs once Megatron has made its model: checks, weights, servers, the step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import idle_clips
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.user_calls import UserCalls
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore import checkpoint_cursor, compat
from megatron_rl_corr.mcore.collection import Collector, check_they_fit, check_vocabulary
from megatron_rl_corr.mcore.evaluation import Evaluation
from megatron_rl_corr.mcore.logprobs import LogprobSettings
from megatron_rl_corr.mcore.policy_check import check_model
from megatron_rl_corr.mcore.scoring import describe_scoring
from megatron_rl_corr.mcore.server_check import broadcast_first_step, check_servers
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.trajectory_log import TrajectoryLog
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import LocalParameter, load_shards, local_parameters
from megatron_rl_corr.moe.statistics import ExpertLog, ExpertStatistics
from megatron_rl_corr.parallel.failure import WATCH, StartupError, all_reduce_failure, all_reduce_startup
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import load_environment
from megatron_rl_corr.rollout.episodes import Episodes
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.push import push_weights
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports.choice import make_coverage, make_proof, make_transport

Report = Callable[[dict[str, float]], None]
WAIT_FOR_SERVERS_S = 60.0


def start(
    config: RolloutCorrectionConfig, options: RunConfig, args: argparse.Namespace, model: list,
    optimizer: Any, encode: Callable[[str], list[int]], report: Report,
) -> CorrectedStep:
    """Load the weights, reach the servers, push the first version, return the step; every rank calls it."""
    layout, loop = compat.layout(sequence_parallel=args.sequence_parallel), LoopThread()
    if options.linear_logprobs:
        all_reduce_startup(lambda: compat.check_output_processor(compat.unwrapped(model)))

    replay = _replay(options, args, model, layout)
    from_servers = replay if options.router_replay == "R3" else None
    saved = checkpoint_cursor.broadcast_saved(args)

    def prepare() -> tuple:
        checkpoint = HFCheckpoint(options.hf_checkpoint)
        vocab_size = checkpoint.config["vocab_size"]
        client, scores = _client(options, args, vocab_size, from_servers), _scores(options, layout, loop)
        collector = Collector(
            options, layout, samples=args.global_batch_size, length=args.seq_length,
            steps=(args.iteration, args.train_iters), client=client, loop=loop,
            prompts=PromptDataset.from_jsonl(options.prompts, encode, seed=args.seed),
            saved=saved, replay=from_servers, sequence_parallel=args.sequence_parallel, **scores,
        )
        evaluation = _evaluation(options, args, layout, client, loop, collector.sampling, encode, scores)
        parameters = _parameters(checkpoint, args, model)
        if args.iteration == 0:
            load_shards(parameters, checkpoint, layout.shard)
        folder = options.save_trajectories
        log = None if folder is None else TrajectoryLog(Path(folder), layout, collector.sampling)
        return parameters, client, collector, evaluation, log, vocab_size

    parameters, client, collector, evaluation, log, vocab_size = all_reduce_startup(prepare)
    if args.iteration == 0:
        optimizer.reload_model_params()
    run_id = _broadcast_reached(client, loop)
    exporter = StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )
    servers = _weight_servers(options, exporter, client, loop)

    def push(version: int) -> None:
        push_weights(
            exporter, servers, version=versions.name(run_id, version), bucket_bytes=int(options.bucket_mib * 2**20)
        )

    def close() -> None:
        collector.close()
        servers.close()
        loop.call(client.close())
        loop.close()

    with compat.gathered_parameters(model, optimizer):
        push(args.iteration)
    try:
        check_servers(options.server_check, collector.sampling, client, loop)
        first_step = broadcast_first_step(options.max_first_step_kl, args, client, loop)
    except BaseException:
        close()
        raise
    step = CorrectedStep(
        config=config, layout=layout, collector=collector, logprobs=_logprobs(options, layout, vocab_size),
        push=push, report=report, evaluation=evaluation, log=log, close=close, micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size, seq_length=args.seq_length, group_size=options.group_size,
        replay=replay, min_agreement=options.router_replay_min_agreement, sequence_parallel=args.sequence_parallel,
        experts=_experts(options, args, replay, layout), first_step=first_step,
    )
    _tell(describe_scoring(config, step.scored_for), idle_clips(config))
    return step


def _tell(*lines: str | None) -> None:
    """Once, not from every rank."""
    for line in lines if dist.get_rank() == 0 else ():
        if line is not None:
            print(f"[rollout] {line}", flush=True)


def _scores(options: RunConfig, layout: Layout, loop: LoopThread) -> dict[str, Any]:
    """What scores samples, ready on the ranks that ask for them."""
    rewards = Rewards(options.reward_function, workers=options.reward_workers, limit_s=options.reward_timeout_s)
    episodes = None
    if options.environment is not None:
        calls = UserCalls(options.environment_timeout_s)
        episodes = Episodes(load_environment(options.environment), options.max_turns, calls)
    if layout.is_data_leader:
        loop.call(rewards.start())
    return {"rewards": rewards, "episodes": episodes}


def _evaluation(
    options: RunConfig, args: argparse.Namespace, layout: Layout, client: RolloutClient, loop: LoopThread,
    sampling: SamplingParams, encode: Callable[[str], list[int]], scores: dict[str, Any],
) -> Evaluation | None:
    if options.eval_prompts is None:
        return None
    prompts = PromptDataset.from_jsonl(options.eval_prompts, encode)
    check_they_fit(prompts, "--rollout-eval-prompts", options.max_new_tokens, args.seq_length)
    check_vocabulary(prompts, "--rollout-eval-prompts", client.vocab_size)
    return Evaluation(
        layout, client, loop, prompts.prompts, sampling, every=args.eval_interval, **scores
    )


def _client(options: RunConfig, args: argparse.Namespace, vocab_size: int, replay: Any) -> RolloutClient:
    experts = None if replay is None else replay.shape
    return RolloutClient(
        options.urls, vocab_size=vocab_size, experts=experts, seed=args.seed,
        keyed_cache=options.pause_mode == "in_place", **options.client_arguments(),
    )  # fmt: skip


def _logprobs(options: RunConfig, layout: Layout, vocab_size: int) -> LogprobSettings:
    return LogprobSettings(
        layout.tp_group, options.temperature, vocab_size, from_hidden=options.linear_logprobs,
        fp32_lm_head=options.fp32_lm_head, inplace_gradient=options.inplace_gradient,
    )


def _replay(options: RunConfig, args: argparse.Namespace, model: list, layout: Layout) -> Any:
    """The `Replay` of --router-replay, or None. Imported here, because older Megatrons have no RouterReplay."""
    if options.router_replay == "off" and not options.expert_statistics:
        return None
    from megatron_rl_corr.moe.replay import Replay

    watch = options.expert_statistics
    return Replay(options.router_replay, model, layout, num_layers=args.num_layers, watch=watch)


def _experts(
    options: RunConfig, args: argparse.Namespace, replay: Any, layout: Layout
) -> ExpertStatistics | None:
    if not options.expert_statistics:
        return None
    from megatron.training import training

    tell = ExpertLog(options.log_dir, replay.shape.layers, training.get_tensorboard_writer)
    return ExpertStatistics(replay, layout, tell)


def _parameters(checkpoint: HFCheckpoint, args: argparse.Namespace, model: list) -> list[LocalParameter]:
    chunks, table = compat.unwrapped(model), NameTable(checkpoint.config, padded_vocab_size=args.padded_vocab_size)
    check_model(chunks, args)
    experts = (args.num_experts or 0) // args.expert_model_parallel_size
    return local_parameters(chunks, table, experts_per_rank=experts)


def _weight_servers(
    options: RunConfig, exporter: StageExporter, client: RolloutClient, loop: LoopThread
) -> WeightServers:
    checkpoint = Path(options.hf_checkpoint)
    transport = all_reduce_startup(lambda: make_transport(
        options.weight_transport, client, loop, backend="nccl" if torch.cuda.is_available() else "gloo",
        checkpoint=checkpoint, folder=options.weight_dir, stage=exporter.stage, sends=exporter.sends,
    ))  # fmt: skip
    proof = make_proof(options.verify_push, checkpoint)
    servers = WeightServers(
        client, loop, transport, proof=proof, coverage=make_coverage(checkpoint), pause_mode=options.pause_mode,
        samples_ahead=options.max_lag > 0,
    )
    if dist.get_rank() == 0:
        WATCH.on_failure(servers.release)  # of whichever rank
    return servers


def _broadcast_reached(client: RolloutClient, loop: LoopThread) -> str:
    """Every server answers, seen from rank 0; failing here is cheaper than in the middle of a step.

    What is behind a router is asked once, so that all ranks speak to the same servers. Returns the id of this start in
    the names of its weight versions, rank 0's too.
    """
    error, found = None, [client.base_urls, versions.new_run_id()]
    if dist.get_rank() == 0:
        try:
            found[0] = loop.call(client.find_servers(WAIT_FOR_SERVERS_S))
            loop.call(client.wait_healthy(WAIT_FOR_SERVERS_S))
        except (RolloutError, ValueError) as failure:
            error = failure if isinstance(failure, RolloutError) else StartupError(f"--rollout-url: {failure}")
    all_reduce_failure(error)
    dist.broadcast_object_list(found, src=0)
    urls, run_id = found
    client.use_servers(urls)
    return run_id

"""Builds what a corrected run needs once Megatron has made its model: checks, weights, servers, the step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.arguments import RolloutOptions
from megatron_rl_corr.mcore.collection import Collector, check_they_fit
from megatron_rl_corr.mcore.evaluation import Evaluation
from megatron_rl_corr.mcore.expert_statistics import ExpertLog, ExpertStatistics
from megatron_rl_corr.mcore.logprobs import LogprobSettings
from megatron_rl_corr.mcore.refusal import Refusal, all_reduce_refusal
from megatron_rl_corr.mcore.router_flags import check_router_replay
from megatron_rl_corr.mcore.server_check import check_servers
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.trajectory_log import TrajectoryLog
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import load_environment
from megatron_rl_corr.rollout.errors import RolloutError
from megatron_rl_corr.rollout.prompts import PromptDataset
from megatron_rl_corr.rollout.rewards import load_function
from megatron_rl_corr.rollout.trajectory import SamplingParams
from megatron_rl_corr.weight_sync.choice import make_proof, make_transport
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.weight_sync.names import NameTable
from megatron_rl_corr.weight_sync.push import push_weights
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.shards import LocalParameter, load_shards, local_parameters

Report = Callable[[dict[str, float]], None]
WAIT_FOR_SERVERS_S = 60.0


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """ValueError for Megatron flags that a corrected step can't honour."""
    check_router_replay(args)
    chunks = 2 * args.context_parallel_size
    if args.context_parallel_size > 1 and args.seq_length % chunks:
        raise ValueError(
            f"--seq-length {args.seq_length} must be a multiple of 2 * --context-parallel-size, {chunks}: "
            "every row is cut into so many chunks"
        )
    compat.check_expert_layout(args)
    if args.yaml_cfg is not None:
        raise ValueError(
            "--yaml-cfg replaces every flag, the rollout ones too; give Megatron's settings as flags"
        )
    if args.rampup_batch_size is not None:
        raise ValueError(
            "--rampup-batch-size is not supported with rollouts: every step takes --global-batch-size"
        )
    if args.finetune or args.pretrained_checkpoint is not None:
        raise ValueError(
            "--finetune and --pretrained-checkpoint begin at iteration 0, where the weights of --rollout-hf-checkpoint "
            "are loaded over theirs; convert the checkpoint to Hugging Face format, or leave the flag out"
        )
    if args.iterations_to_skip:
        raise ValueError(
            f"--iterations-to-skip {args.iterations_to_skip}: samples of a step that is skipped would train a later "
            "one; leave it out"
        )
    if args.eval_iters:
        raise ValueError(
            f"--eval-iters {args.eval_iters}: evaluation would score the script's data set, not rollouts; "
            "use --eval-iters 0, and --rollout-eval-prompts for rollouts on held-out prompts"
        )
    if args.rollout_eval_prompts and not 0 < (args.eval_interval or 0) <= args.train_iters:
        raise ValueError(
            f"--rollout-eval-prompts would never be asked: --eval-interval {args.eval_interval}, the steps from one "
            f"evaluation to the next, must be from 1 to --train-iters {args.train_iters}"
        )


def start(
    config: RolloutCorrectionConfig, options: RolloutOptions, args: argparse.Namespace, model: list,
    optimizer: Any, encode: Callable[[str], list[int]], report: Report,
) -> CorrectedStep:
    """Load the weights, reach the servers, push the first version, return the step; every rank calls it."""
    layout, loop = compat.layout(), LoopThread()
    if options.linear_logprobs:
        all_reduce_refusal(lambda: compat.check_output_processor(compat.unwrapped(model)))

    replay = _replay(options, args, model, layout)
    from_servers = replay if options.router_replay == "R3" else None

    def prepare() -> tuple:
        checkpoint = HFCheckpoint(options.hf_checkpoint)
        vocab_size = checkpoint.config["vocab_size"]
        experts = from_servers and from_servers.shape
        client = RolloutClient(options.urls, vocab_size=vocab_size, experts=experts, **options.client.arguments())
        reward = None if options.reward_function is None else load_function(options.reward_function)
        environment = None if options.environment is None else load_environment(options.environment)
        collector = Collector(
            options, layout, samples=args.global_batch_size, length=args.seq_length,
            steps=(args.iteration, args.train_iters), client=client, loop=loop,
            prompts=PromptDataset.from_jsonl(options.prompts, encode, seed=args.seed),
            reward=reward, environment=environment, replay=from_servers, sequence_parallel=args.sequence_parallel,
        )
        scores = {"reward": reward, "environment": environment}
        evaluation = _evaluation(options, args, layout, client, loop, collector.sampling, encode, scores)
        parameters = _parameters(checkpoint, args, model)
        if args.iteration == 0:
            load_shards(parameters, checkpoint, layout.shard)
        folder = options.save_trajectories
        log = None if folder is None else TrajectoryLog(Path(folder), layout, collector.sampling)
        return parameters, client, collector, evaluation, log, vocab_size

    parameters, client, collector, evaluation, log, vocab_size = all_reduce_refusal(prepare)
    if args.iteration == 0:
        optimizer.reload_model_params()
    _broadcast_reached(client, loop)
    exporter = StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )
    servers = _weight_servers(options, exporter, client, loop)

    def push(version: int) -> None:
        push_weights(
            exporter, servers, version=str(version), bucket_bytes=int(options.bucket_mib * 2**20)
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
    except BaseException:
        close()
        raise
    return CorrectedStep(
        config=config, layout=layout, collector=collector,
        logprobs=_logprobs(options, layout, vocab_size),
        push=push, report=report, evaluation=evaluation, log=log, close=close, micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size, seq_length=args.seq_length, group_size=options.group_size,
        replay=replay, min_agreement=options.router_replay_min_agreement, sequence_parallel=args.sequence_parallel,
        experts=_experts(options, args, replay, layout),
    )


def _evaluation(
    options: RolloutOptions, args: argparse.Namespace, layout: compat.Layout, client: RolloutClient, loop: LoopThread,
    sampling: SamplingParams, encode: Callable[[str], list[int]], scores: dict[str, Any],
) -> Evaluation | None:
    if options.eval_prompts is None:
        return None
    prompts = PromptDataset.from_jsonl(options.eval_prompts, encode)
    check_they_fit(prompts, "--rollout-eval-prompts", options.max_new_tokens, args.seq_length)
    return Evaluation(
        layout, client, loop, prompts.prompts, sampling, max_turns=options.max_turns, every=args.eval_interval,
        **scores,
    )  # fmt: skip


def _logprobs(options: RolloutOptions, layout: compat.Layout, vocab_size: int) -> LogprobSettings:
    return LogprobSettings(
        layout.tp_group, options.temperature, vocab_size, from_hidden=options.linear_logprobs,
        fp32_lm_head=options.fp32_lm_head, inplace_gradient=options.inplace_gradient,
    )


def _replay(options: RolloutOptions, args: argparse.Namespace, model: list, layout: compat.Layout) -> Any:
    """The `Replay` of --router-replay, or None. Imported here, because older Megatrons have no RouterReplay."""
    if options.router_replay == "off" and not options.expert_statistics:
        return None
    from megatron_rl_corr.mcore.router_replay import Replay

    watch = options.expert_statistics
    return Replay(options.router_replay, model, layout, num_layers=args.num_layers, watch=watch)


def _experts(
    options: RolloutOptions, args: argparse.Namespace, replay: Any, layout: compat.Layout
) -> ExpertStatistics | None:
    if not options.expert_statistics:
        return None
    from megatron.training import training

    tell = ExpertLog(options.log_dir, replay.shape.layers, training.get_tensorboard_writer)
    return ExpertStatistics(replay, layout, compat.expert_groups(), args.sequence_parallel, tell)


def _parameters(checkpoint: HFCheckpoint, args: argparse.Namespace, model: list) -> list[LocalParameter]:
    table = NameTable(checkpoint.config, padded_vocab_size=args.padded_vocab_size)
    experts = (args.num_experts or 0) // args.expert_model_parallel_size
    return local_parameters(compat.unwrapped(model), table, experts_per_rank=experts)


def _weight_servers(
    options: RolloutOptions, exporter: StageExporter, client: RolloutClient, loop: LoopThread
) -> WeightServers:
    checkpoint = Path(options.hf_checkpoint)
    transport = all_reduce_refusal(lambda: make_transport(
        options.weight_transport, client, loop, backend="nccl" if torch.cuda.is_available() else "gloo",
        checkpoint=checkpoint, folder=options.weight_dir, stage=exporter.stage, sends=exporter.sends,
    ))  # fmt: skip
    proof = make_proof(options.verify_push, checkpoint)
    return WeightServers(client, loop, transport, proof=proof, pause_mode=options.pause_mode)


def _broadcast_reached(client: RolloutClient, loop: LoopThread) -> None:
    """Every server answers, seen from rank 0; failing here is cheaper than in the middle of a step.

    What is behind a router is asked once, so that all ranks speak to the same servers.
    """
    error, urls = None, [client.base_urls]
    if dist.get_rank() == 0:
        try:
            urls = [loop.call(client.find_servers(WAIT_FOR_SERVERS_S))]
            loop.call(client.wait_healthy(WAIT_FOR_SERVERS_S))
        except (RolloutError, ValueError) as failure:
            error = failure if isinstance(failure, RolloutError) else Refusal(f"--rollout-url: {failure}")
    all_reduce_failure(error)
    dist.broadcast_object_list(urls, src=0)
    client.use_servers(urls[0])

"""Checks a whole command line and ends: Megatron's validation, ours, the folders, the data and the rewards.

The script runs as it would, up to where processes would meet; no weights are made or read, and no
server is asked.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from megatron.training import arguments as megatron_arguments
from megatron.training import training

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import name_flags
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore import hooks, session
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.checks import file_checks, start_checks
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint
from megatron_rl_corr.mcore.feature import RunSettings, features_of
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.rollout.blocking import LoopThread


class Finished(SystemExit):
    """All checks have passed; ends the script with status 0. Holds lines that describe the run."""

    def __init__(self, lines: list[str]):
        super().__init__(0)
        self.lines = lines


@dataclass(frozen=True)
class _FirstLeader:
    """The first replica's data leader: what is made before the servers are reached asks no
    more of a layout.
    """

    dp_size: int
    is_data_leader: bool = True
    dp_rank: int = 0


def install(config: RolloutCorrectionConfig, options: RunConfig) -> None:
    """Replace Megatron's `validate_args` and `pretrain`, so that the script ends, in `Finished`,
    where it would train.

    Up to megatron-core 0.17 `pretrain` validates the arguments itself, later the script does it before; there
    the check waits for `pretrain`, so that what the script makes of the arguments in between is checked too.

    Args:
        config: the correction.
        options: of the launcher's flags.

    Raises:
        UnsupportedMegatron: this Megatron has other functions.
    """
    validated: list[argparse.Namespace] = []
    training_began: list[bool] = []

    def finish() -> None:
        raise Finished(check(config, options, validated[-1]))

    def wrap_validate(original: Callable) -> Callable:
        @functools.wraps(original)
        def validate_args(args, *more, **named):
            result = original(args, *more, **named)
            validated.append(args)
            if training_began:
                finish()
            return result

        return validate_args

    def wrap_pretrain(original: Callable) -> Callable:
        @functools.wraps(original)
        def pretrain(*args, **kwargs):
            training_began.append(True)
            if validated:
                finish()
            return original(*args, **kwargs)

        return pretrain

    hooks.replace(megatron_arguments, "validate_args", ("args",), wrap_validate)
    hooks.replace(training, "pretrain", ("forward_step_func",), wrap_pretrain)


def check(config: RolloutCorrectionConfig, options: RunConfig, args: argparse.Namespace) -> list[str]:
    """Everything about a run that can be known without other processes, servers or weights.

    Args:
        config: the correction.
        options: of the launcher's flags.
        args: Megatron's, validated.

    Returns:
        Lines that describe the run.

    Raises:
        ValueError: lists everything that is wrong: flag, value and remedy.
    """
    problems = Problems()
    start_checks.collect_arguments(config, options, args, problems)
    problems.check("model", lambda: _check_model(args))
    shape = problems.check("shape", lambda: session.batch_shape(options, args))
    without_weights = problems.check("files", lambda: file_checks.check_files_of_all_ranks(options, args))
    rows = None
    if options.replay is None:
        vocab_size = problems.check("config", lambda: _vocab_size(options))
        rows = problems.check(
            "", lambda: _check_data(options, args, shape, vocab_size), needs=["shape", "config"]
        )
    problems.raise_all()
    lines = [_layout(args), _step(options, args)]
    if rows is not None:
        lines.append(f"prompts: {rows} rows; router replay {options.router_replay}")
    if without_weights:
        lines.append(f"weights: {' '.join(without_weights)} has none yet, and a run would need them")
    return [
        *lines,
        f"servers: {' '.join((*options.urls, *options.servers_file)) or 'none'}; not asked",
        "checked, and nothing was started",
    ]


def _check_model(args: argparse.Namespace) -> None:
    try:
        megatron_arguments.core_transformer_config_from_args(args)
    except AssertionError as error:
        raise ValueError(str(error) or repr(error)) from error


def _vocab_size(options: RunConfig) -> int:
    with naming_checkpoint(options.hf_checkpoint):
        return read_model(options.hf_checkpoint)["vocab_size"]


def _check_data(options: RunConfig, args: argparse.Namespace, shape: BatchShape, vocab_size: int) -> int:
    """Rows of the training prompts: what a run collects and evaluates with is made as on a
    leader, and closed.
    """
    layout, loop, problems = _FirstLeader(args.data_parallel_size), LoopThread(), Problems()
    settings, features = RunSettings(options, args, layout, vocab_size), features_of(options)
    with ExitStack() as opened:
        opened.callback(loop.close)
        source = session.sample_source(settings, loop, Routes(), features, opened, problems)
        collector = session.collector_of(settings, shape, source, features, problems, batches=(0, 1))
        if collector is not None:
            opened.callback(collector.close)
        problems.raise_all()
        return len(source.prompts)


def _layout(args: argparse.Namespace) -> str:
    sizes = {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "expert tensor": args.expert_tensor_parallel_size if args.num_experts else 1,
        "data": args.data_parallel_size,
    }
    return f"{args.world_size} processes: " + ", ".join(f"{name} {size}" for name, size in sizes.items())


def _step(options: RunConfig, args: argparse.Namespace) -> str:
    samples, most = args.global_batch_size * options.updates_per_batch, options.max_tokens_per_microbatch
    per = (
        f"rows of {args.seq_length}"
        if options.pad_sequences
        else (f"microbatches of at most {most or args.seq_length * args.micro_batch_size} tokens")
    )
    return name_flags(
        f"a batch: {samples} samples, {samples // options.group_size} prompts of {options.group_size}; "
        f"responses of at most {options.max_new_tokens} tokens; {per}"
    )

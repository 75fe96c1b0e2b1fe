"""What can be known of a run from Megatron's arguments, before a model is made: all of it is told at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore import session
from megatron_rl_corr.mcore.checks import file_checks, run_flags
from megatron_rl_corr.mcore.checks.prompt_checks import prompt_limits
from megatron_rl_corr.mcore.user_functions import check_user_functions


def check_start(config: RolloutCorrectionConfig, options: RunConfig, args: argparse.Namespace) -> None:
    """All checks of a run that makes a model next, for this rank.

    Args:
        config: the correction.
        options: the plugin's flags.
        args: Megatron's.

    Raises:
        ValueError: lists everything that is wrong, each with its flag and the remedy.
    """
    problems = Problems()
    collect_arguments(config, options, args, problems)
    problems.check("files", lambda: file_checks.check_files(options, args))
    problems.raise_all()


def collect_arguments(
    config: RolloutCorrectionConfig, options: RunConfig, args: argparse.Namespace, problems: Problems
) -> None:
    """The checks that need neither files nor other ranks; problems gets what is wrong."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: run_flags.check_megatron_arguments(args),
        lambda: session.batch_shape(options, args).rows(args.data_parallel_size),
        lambda: check_room(options, args),
        lambda: check_user_functions(config, options.group_size),
    )
    for check in checks:
        with problems.catch():
            check()


def check_room(options: RunConfig, args: argparse.Namespace) -> None:
    """ValueError where --seq-length leaves no room for prompts, or `max_prompt_tokens` has no effect."""
    if options.replay is None:
        prompt_limits(options, vocab_size=0, seq_length=args.seq_length, drop=True)

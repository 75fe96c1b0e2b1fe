"""Puts our correction into Megatron's own RL (train_rl.py, with --perform-rl-step), and its
numbers into our log.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import (
    CORRECTION,
    PREFIX,
    add_group,
    given_flags,
    name_flags,
    read_correction,
)
from megatron_rl_corr.config.problems import Problems, Refusal
from megatron_rl_corr.config.run import LogsConfig
from megatron_rl_corr.integrations.settings import check_settings

ASKS = "--perform-rl-step"
NEEDS = "--rl-inference-logprobs-is-correction"


def parse(arguments: Sequence[str]) -> tuple[RolloutCorrectionConfig, str | None]:
    """The correction and --rollout-log-dir. ValueError for a flag of ours that has no effect
    there, or one missing.
    """
    problems = Problems()
    config, log_dir = read(arguments, problems)
    if problems:
        raise Refusal(problems.found).each(name_flags)
    return config, log_dir


def read(arguments: Sequence[str], problems: Problems) -> tuple[RolloutCorrectionConfig, str | None]:
    """As `parse`, for who collects problems: of what is refused nothing can be read in the correction."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_group(parser, CORRECTION)
    add_group(parser, (LogsConfig,), only=["log_dir"])
    given = given_flags(parser, arguments, problems)
    for other in given.others:
        if other.startswith(PREFIX):
            problems.add(
                f"{other.split('=')[0]} has no effect with {ASKS}, where Megatron samples and has its own "
                "loss; drop it"
            )
    if NEEDS not in arguments:
        problems.add(f"{ASKS} needs {NEEDS} beside it: without it Megatron keeps no rollout log-probs")
    config = read_correction(given, problems)
    with problems.catch():
        check_settings(config, "Megatron's RL")
    return config, given.values.get("log_dir")


def install(config: RolloutCorrectionConfig, report: Callable[[dict, Any], None]) -> Callable[[], None]:
    """Replace the loss and what tells it the loss mask; report(metrics, writer) is called as in
    mcore.hooks.install.

    Returns what is to be done after the last step: nothing, as Megatron has its own servers.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.rl import rl_utils
    from megatron.training import arguments as megatron_arguments
    from megatron.training import global_vars, training

    from megatron_rl_corr.integrations.megatron_rl import GRPOCorrection
    from megatron_rl_corr.mcore import hooks
    from megatron_rl_corr.mcore.versions import megatron_version
    from megatron_rl_corr.reduce.collectives import all_reduce_metrics, merge

    correction = GRPOCorrection(config)
    loss = (
        "current_logprobs",
        "old_logprobs",
        "advantages",
        "kl_beta",
        "entropy_weight",
        "inference_logprobs",
        "is_truncation_coef",
    )

    def all_gather_and_report() -> None:
        metrics, correction.metrics = merge(correction.metrics), []
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        numbers = all_reduce_metrics(
            {f"rollout_corr/{name}": metric for name, metric in metrics.items()},
            # Megatron gathers the log-probs of a whole row on each of its context-parallel ranks.
            parallel_state.get_data_parallel_group(),
        )
        if dist.get_rank() == dist.get_world_size() - 1:
            step = global_vars.get_args().curr_iteration + 1
            report({"step": step, **numbers}, global_vars.get_tensorboard_writer())

    def corrected(original: Callable) -> Callable:
        @functools.wraps(original)
        def train_step(forward_step_func: Callable, *args: Any, **kwargs: Any) -> tuple:
            cp = parallel_state.get_context_parallel_world_size()
            # Before there is this function, every context-parallel rank is given all tokens as if
            # they were its part.
            if cp > 1 and not hasattr(rl_utils, "_scatter_for_context_parallel"):
                raise ValueError(
                    f"--context-parallel-size {cp}: the RL of megatron-core {megatron_version} has no "
                    "context parallelism, that of 0.20 has (Megatron-LM's main since 2026-08-17); use 0.20, "
                    "or 1 rank"
                )
            result = original(correction.forward_step(forward_step_func), *args, **kwargs)
            all_gather_and_report()
            return result

        return train_step

    hooks.replace(megatron_arguments, "add_megatron_arguments", ("parser",), hooks.with_our_flags)
    hooks.replace(rl_utils, "calculate_grpo_loss", loss, correction.calculate_grpo_loss)
    # from 0.16 on; packed sequences of 0.15 are refused in the loss
    if hasattr(rl_utils, "load_packed_data_by_index"):
        hooks.replace(
            rl_utils, "load_packed_data_by_index", ("bin_idx",), correction.load_packed_data_by_index
        )
    hooks.replace(training, "train_step", ("forward_step_func", "data_iterator"), corrected)
    return lambda: None

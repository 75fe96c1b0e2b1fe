"""Puts the corrected step into an unmodified Megatron: what is replaced, where, and by what.

Three functions: the one that adds arguments, the one that sets up the model, and the train step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.training import arguments as megatron_arguments
from megatron.training import training

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.mcore import session, versions
from megatron_rl_corr.mcore.arguments import RolloutOptions, add_rollout_arguments
from megatron_rl_corr.mcore.refusal import all_reduce_refusal


def install(
    config: RolloutCorrectionConfig, options: RolloutOptions, report: Callable[[dict, Any], None]
) -> Callable[[], None]:
    """Replace them, once, before the script runs; returns what leaves the servers after the script has ended.

    report(metrics, writer) takes each step's numbers on the job's last rank, with Megatron's TensorBoard
    writer or None. RuntimeError for a Megatron that is not known.
    """
    steps: dict[str, Any] = {}
    replace(megatron_arguments, "add_megatron_arguments", ("parser",), with_our_flags)

    def set_up(original: Callable) -> Callable:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args, **kwargs):
            settings = training.get_args()
            all_reduce_refusal(lambda: session.check_megatron_arguments(settings))
            model, optimizer, scheduler = original(*args, **kwargs)
            steps["step"] = session.start(
                config, options, settings, model, optimizer, _encode,
                lambda metrics: report(metrics, training.get_tensorboard_writer()),
            )
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def corrected(original: Callable) -> Callable:
        @functools.wraps(original)
        def train_step(
            forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, model_config, *args,
            **kwargs,
        ):
            def megatrons(forward_step: Callable, iterator: Any) -> tuple:
                return original(
                    forward_step, iterator, model, optimizer, opt_param_scheduler, model_config, *args,
                    **kwargs,
                )

            return steps["step"].run(
                megatrons, training.get_args().curr_iteration, model, optimizer,
                model_config.calculate_per_token_loss,
            )

        return train_step

    replace(training, "setup_model_and_optimizer", ("model_type",), set_up)
    replace(training, "train_step", ("forward_step_func", "data_iterator", "model", "optimizer",
                                      "opt_param_scheduler", "config"), corrected)
    return lambda: steps["step"].close() if steps else None


def wrap_pretrain(wrap: Callable[[Callable], Callable]) -> None:
    """Replace `pretrain`, for a script that no launcher runs: what is to happen after the last step goes around it."""
    replace(training, "pretrain", ("forward_step_func",), wrap)


def with_our_flags(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        return add_rollout_arguments(original(parser))

    return add_megatron_arguments


def _encode(text: str) -> list[int]:
    return training.get_tokenizer().tokenize(text)


def replace(
    module: ModuleType, name: str, parameters: tuple[str, ...], wrap: Callable[[Callable], Callable]
) -> None:
    """Bind a wrapped function in its module and wherever it was imported: a copy keeps the original."""
    original = getattr(module, name)
    versions.check_parameters(original, parameters)
    replacement = wrap(original)
    for holder in list(sys.modules.values()):
        if getattr(holder, "__name__", "").startswith("megatron.") and vars(holder).get(name) is original:
            setattr(holder, name, replacement)

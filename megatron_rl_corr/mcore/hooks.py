"""Puts the corrected step into an unmodified Megatron: what is replaced, where, and by what.

Five functions: those that add arguments, set up the model and save it, the train step, and the one that names the file
which makes a checkpoint a finished one.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.training import arguments as megatron_arguments
from megatron.training import checkpointing, global_vars, training

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import add_flags
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore import checkpoint_cursor, compat, run_flags, session, versions
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.parallel.failure import all_reduce_startup, communication_device

logger = logging.getLogger(__name__)

Report = Callable[[dict[str, float], Any], None]


@dataclass(frozen=True)
class Hook:
    """One function of Megatron that is replaced."""

    module: ModuleType
    name: str
    parameters: tuple[str, ...]
    """What it must take, or nothing is replaced."""
    by: str
    """What takes its place."""


ARGUMENTS = Hook(megatron_arguments, "add_megatron_arguments", ("parser",), "the same, plus the rollout flags")
SET_UP = Hook(
    training, "setup_model_and_optimizer", ("model_type",),
    "the same; then weights are loaded, the servers reached, the first weights pushed",
)
TRAIN_STEP = Hook(
    training, "train_step",
    ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
    "collect, score if need be; then the original with our forward step, batch and corrected loss; then the push",
)
SAVE = Hook(
    checkpointing, "save_checkpoint", ("iteration", "model", "optimizer"),
    "all replicas' places in the prompts are brought together; then the original",
)
TRACKER = Hook(
    checkpointing, "get_checkpoint_tracker_filename", ("checkpoints_path",),
    "within a save, the places are written first; then the original",
)
HOOKS = (ARGUMENTS, SET_UP, TRAIN_STEP, SAVE, TRACKER)

CONSOLE = {
    "reward/mean": "rollout reward",
    "rollout_corr/k3_kl": "rollout k3 kl",
    "rollout_corr/kept_fraction": "rollout kept fraction",
}
"""Metrics in Megatron's own log line, under names that are no tags of ours: its TensorBoard holds those already.

The policy loss is not among them, as Megatron leaves out an average that is negative."""


def install(config: RolloutCorrectionConfig, options: RunConfig, report: Report) -> Callable[[], None]:
    """Replace them, once, before the script runs; returns what leaves the servers after the script has ended.

    report(metrics, writer) takes each step's numbers on the job's last rank, with Megatron's TensorBoard
    writer or None. UnsupportedMegatron, and nothing replaced, for a Megatron that is not known.
    """
    for hook in HOOKS:
        checked(hook.module, hook.name, hook.parameters)
    steps: dict[str, CorrectedStep] = {}
    told: dict[str, float] = {}

    def tell() -> None:
        if "step" not in told:  # another rank tells
            return
        report(dict(told), global_vars.get_tensorboard_writer())
        wandb = global_vars.get_wandb_writer()
        if wandb is not None:
            wandb.log({name: value for name, value in told.items() if name != "step"}, told["step"])

    def set_up(original: Callable) -> Callable:
        @functools.wraps(original)
        def setup_model_and_optimizer(*args, **kwargs):
            if "step" in steps:  # Megatron's in-process restart: the servers are left, and reached anew
                try:
                    steps.pop("step").close()
                except (RuntimeError, ValueError, OSError) as error:  # what failed may be a group that it has to close
                    logger.warning("what the step before the restart had open was not all closed: %s", error)
            settings = training.get_args()
            all_reduce_startup(lambda: run_flags.check_megatron_arguments(settings))
            model, optimizer, scheduler = original(*args, **kwargs)
            steps["step"] = session.start(config, options, settings, model, optimizer, _encode, told.update)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def corrected(original: Callable) -> Callable:
        @functools.wraps(original)
        def train_step(
            forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs
        ):
            def megatrons(forward_step: Callable, iterator: Any) -> tuple:
                return original(
                    forward_step, iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs
                )

            step, iteration = steps["step"], training.get_args().curr_iteration
            told.clear()
            result = step.run(megatrons, iteration, model, optimizer, config.calculate_per_token_loss)
            if compat.is_leaving(result):
                return result
            losses, *rest = result
            if step.evaluation is not None and step.evaluation.is_due(iteration + 1):
                evaluated = step.evaluation.all_reduce_metrics()
                if "step" in told:
                    told.update(evaluated)
                    # Not in Megatron's line, which averages over the steps between two lines.
                    reward = evaluated["eval/reward"]
                    print(f"[rollout] held-out reward after step {iteration + 1}: {reward:.4f}", flush=True)
            tell()
            return (losses | _logged(told), *rest)

        return train_step

    wraps = (with_our_flags, set_up, corrected, _with_cursor(steps), checkpoint_cursor.written_before)
    for hook, wrap in zip(HOOKS, wraps, strict=True):
        replace(hook.module, hook.name, hook.parameters, wrap)
    return lambda: steps["step"].close() if steps else None


def wrap_pretrain(wrap: Callable[[Callable], Callable]) -> None:
    """Replace `pretrain`, for a script that no launcher runs: what is to happen after the last step goes around it."""
    replace(training, "pretrain", ("forward_step_func",), wrap)


def describe() -> str:
    """What `install` would replace in this Megatron, and where; nothing is replaced."""
    lines = [f"megatron-core {versions.megatron_version} in {versions.tree()}; supported are {versions.SUPPORTED}"]
    for hook in HOOKS:
        original = checked(hook.module, hook.name, hook.parameters)
        places = [f"{module.__name__}.{name}" for module, name in _holders(original)]
        lines += [f"{hook.module.__name__}.{hook.name}({', '.join(hook.parameters)}, ...)",
                  f"    by: {hook.by}", f"    at: {', '.join(sorted(places))}"]  # fmt: skip
    return "\n".join(lines)


def with_our_flags(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        return add_flags(original(parser))

    return add_megatron_arguments


def _with_cursor(steps: dict[str, CorrectedStep]) -> Callable[[Callable], Callable]:
    """What wraps a save, once there is a step."""

    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def save_checkpoint(iteration, *args, **kwargs):
            if "step" not in steps:
                return original(iteration, *args, **kwargs)
            with checkpoint_cursor.saved_with(iteration, steps["step"].collector.all_gather_cursor()):
                return original(iteration, *args, **kwargs)

        return save_checkpoint

    return wrap


def _encode(text: str) -> list[int]:
    return global_vars.get_tokenizer().tokenize(text)


def _logged(told: dict[str, float]) -> dict[str, torch.Tensor]:
    """What Megatron's `training_log` is to show of the step, as losses; nothing but on the last rank."""
    shown = {shown: told[name] for name, shown in CONSOLE.items() if math.isfinite(told.get(name, math.nan))}
    return {name: torch.tensor(value, device=communication_device()) for name, value in shown.items()}


def _holders(function: Callable) -> list[tuple[ModuleType, str]]:
    """Every module's name that is bound to it, wherever it was imported and whatever it is called there."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]


def checked(module: ModuleType, name: str, parameters: tuple[str, ...]) -> Callable:
    """The function; UnsupportedMegatron if it is not there, or does not take the parameters."""
    function = vars(module).get(name)
    if function is None:
        raise versions.UnsupportedMegatron(
            f"{module.__name__} of megatron-core {versions.megatron_version} has no {name}: this Megatron was changed "
            f"in a way that megatron_rl_corr does not know; supported are {versions.SUPPORTED}"
        )
    versions.check_parameters(function, parameters)
    return function


def replace(
    module: ModuleType, name: str, parameters: tuple[str, ...], wrap: Callable[[Callable], Callable]
) -> None:
    """Bind the wrapped function wherever the original is bound: a copy would go on with the original."""
    original = checked(module, name, parameters)
    replacement = wrap(original)
    for holder, bound in _holders(original):
        setattr(holder, bound, replacement)

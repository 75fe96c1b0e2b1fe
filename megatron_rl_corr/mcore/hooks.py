"""Puts the corrected step into an unmodified Megatron: what is replaced, where, and by what.

Six functions, of which HOOKS has each with what takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.training import arguments as megatron_arguments
from megatron.training import checkpointing, global_vars, training

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import add_flags
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore import checkpoint_cursor, checkpoint_files, compat, serving, session, versions
from megatron_rl_corr.mcore.checks import run_flags, start_checks
from megatron_rl_corr.mcore.checks.batch_invariance import set_batch_invariance
from megatron_rl_corr.mcore.checks.packed_flags import set_packed
from megatron_rl_corr.mcore.colocation import trainers_turn
from megatron_rl_corr.mcore.feature import EndedStep
from megatron_rl_corr.mcore.optimizer_state import begin_optimizer_state
from megatron_rl_corr.mcore.reference import checkpoint as reference_checkpoint
from megatron_rl_corr.mcore.step_reports import StepReports
from megatron_rl_corr.mcore.supervision import Supervision
from megatron_rl_corr.models.megatron_flags import add_missing_flags
from megatron_rl_corr.reduce.failure import WATCH, all_reduce_startup, communication_device

logger = logging.getLogger(__name__)
Report = Callable[[dict[str, float], Any], None]


@dataclass(frozen=True)
class Hook:
    """One function of Megatron that is replaced."""

    module: ModuleType
    name: str
    parameters: tuple[str, ...]
    """Arguments that it must take, or nothing is replaced."""
    by: str
    """What takes its place."""


ARGUMENTS = Hook(
    megatron_arguments, "add_megatron_arguments", ("parser",), "the same, plus the rollout flags"
)
SET_UP = Hook(
    training,
    "setup_model_and_optimizer",
    ("model_type",),
    "the same; then weights are loaded, the servers reached, the first weights pushed",
)
TRAIN_STEP = Hook(
    training,
    "train_step",
    (
        "forward_step_func",
        "data_iterator",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "config",
        "forward_backward_func",
    ),
    "collect, score if need be; then the original with our forward step, batch and corrected loss; then the "
    "push",
)
SAVE = Hook(
    checkpointing,
    "save_checkpoint",
    ("iteration", "model", "optimizer"),
    "all replicas' places in the prompts are brought together; then the original",
)
TRACKER = Hook(
    checkpointing,
    "get_checkpoint_tracker_filename",
    ("checkpoints_path",),
    "within a save, the places are written first; then the original",
)
DECIDE_EXIT = Hook(
    training,
    "checkpoint_and_decide_exit",
    ("iteration",),
    "within a batch of several updates nobody saves or leaves; else the original",
)
HOOKS = (ARGUMENTS, SET_UP, TRAIN_STEP, SAVE, TRACKER, DECIDE_EXIT)

CONSOLE = {
    "reward/mean": "rollout reward",
    "rollout_corr/k3_kl": "rollout k3 kl",
    "rollout_corr/kept_fraction": "rollout kept fraction",
}
"""Metrics in Megatron's own log line: names differ from our TensorBoard tags, as the line goes to
TensorBoard too. The policy loss is not among them, as Megatron leaves out an average that is negative.
"""


class CorrectedTraining:
    """The corrected run that the hooks call: set up, one step after the other, saves, the end.

    `session` is None until Megatron has set up its model; Megatron's in-process restart replaces it.
    """

    def __init__(self, config: RolloutCorrectionConfig, options: RunConfig, report: Report):
        self._config, self._options, self._report = config, options, report
        self.session: session.Session | None = None
        self._opened = ExitStack()
        """Closes what a start has opened, also one that failed."""
        self._reports, self._supervision = StepReports(self._write_report), Supervision(options)
        self._shown: dict[str, float] = {}
        """The last batch's numbers in Megatron's own log line, which averages over steps."""

    def wrap_set_up(self, original: Callable) -> Callable:
        """Wraps `setup_model_and_optimizer`: the run starts after it."""

        @functools.wraps(original)
        def setup_model_and_optimizer(*args, **kwargs):
            # Megatron's in-process restart: leave the servers, and reach them anew
            if self._supervision.begun:
                self._supervision.restart()
                WATCH.forget()
                try:
                    self.close()
                # what failed may be a group that it has to close
                except (RuntimeError, ValueError, OSError) as error:
                    logger.warning("what the step before the restart had open was not all closed: %s", error)
            settings = training.get_args()
            all_reduce_startup(lambda: self._check_start(settings))
            if not self._options.pad_sequences:
                set_packed(settings)
            if self._options.batch_invariant:
                set_batch_invariance(settings)
            memory = serving.release_servers_at_start(self._options, self._opened)
            model, optimizer, scheduler = original(*args, **kwargs)
            all_reduce_startup(lambda: run_flags.check_loaded_iteration(settings))
            megatron = session.MegatronRun(settings, model, optimizer, memory)
            self.session = session.start(self._config, self._options, megatron, self._reports, self._opened)
            WATCH.on_failure(self._close_reports)  # whichever rank fails
            self._supervision.started(self.session, settings.iteration)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def _check_start(self, settings: Any) -> None:
        """Open what supervision needs, and check all else too. settings: Megatron's arguments."""
        problems = Problems()
        problems.check("supervision", self._supervision.open)
        problems.check("start", lambda: start_checks.check_start(self._config, self._options, settings))
        problems.raise_all()

    def wrap_train_step(self, original: Callable) -> Callable:
        """Wraps `train_step`: the original is called by a corrected step."""

        @functools.wraps(original)
        def train_step(
            forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs
        ):
            def uncorrected(forward_step: Callable, iterator: Any, microbatches: int) -> tuple:
                return compat.with_microbatches(original, microbatches)(
                    forward_step, iterator, model, optimizer, opt_param_scheduler, config, *args, **kwargs
                )

            iteration = training.get_args().curr_iteration
            self._reports.begin_step()
            result = self.session.step.run(
                uncorrected, iteration, model, optimizer, config.calculate_per_token_loss
            )
            if compat.is_leaving(result):
                self._settle()
                return result
            losses, *rest = result
            ahead = self._options.max_lag > 0 and iteration + 1 < training.get_args().train_iters
            ended = EndedStep(iteration + 1, self.session.step.times, ahead)
            for one in self.session.features:
                one.end_step(ended)
            self._supervision.end_step(iteration + 1, ended.times.seconds.get("time/collect_s", 0.0))
            for one in self.session.features:
                one.after_step(ended)
            self._reports.end_step()
            self._shown |= {name: value for name, value in self._reports.numbers.items() if name in CONSOLE}
            return (losses | _console_losses(self._shown), *rest)

        return train_step

    def wrap_save(self, original: Callable) -> Callable:
        """Wraps `save_checkpoint`: the place in the prompts is saved with it."""

        @functools.wraps(original)
        def save_checkpoint(iteration, model, optimizer, *args, **kwargs):
            if self.session is None:
                return original(iteration, model, optimizer, *args, **kwargs)
            # A step's numbers may wait for a feature: a run that goes on from here would never write them.
            self._settle()
            step, source = self.session.step, self._options.hf_checkpoint
            waiting = self.session.waiting
            if waiting is not None:
                waiting.settle()  # the last checkpoint's
            step.reference.check_live("saved")
            # A batch whose first update ends the run is still there; within one, nobody else saves.
            batches, lost = step.updates.batches(iteration), step.training is not None
            cursor = step.collector.cursor_of_all_replicas(batches, with_last=lost)
            if cursor is not None and step.auto is not None:
                cursor = dataclasses.replace(cursor, auto_level=step.auto.level)
            reference = reference_checkpoint.saved_with(
                iteration, step.reference, training.get_args(), source
            )
            turn = trainers_turn(step.colocation, step.push, batches)
            with checkpoint_cursor.saved_with(iteration, cursor) as folder, reference, turn:
                begin_optimizer_state(optimizer)
                result = original(iteration, model, optimizer, *args, **kwargs)
            if waiting is not None:
                waiting.begin(folder[0] if folder else None, step.collector.take_open())
            return result

        return save_checkpoint

    def wrap_decide_exit(self, original: Callable) -> Callable:
        """Wraps `checkpoint_and_decide_exit`: what a signal or a time limit asks for within a batch
        waits for its end.

        A checkpoint does not hold a batch, and what is left of it would be lost.
        """
        signature = inspect.signature(original)

        @functools.wraps(original)
        def checkpoint_and_decide_exit(*args, **kwargs):
            if self.session is None:
                return original(*args, **kwargs)
            if signature.bind(*args, **kwargs).arguments["iteration"] % self._options.updates_of_batch:
                return False
            with compat.leaving(self.session.step.leaves_after_batch):
                leaves = original(*args, **kwargs)
            if leaves:
                self._settle()
            return leaves

        return checkpoint_and_decide_exit

    def _settle(self) -> None:
        for one in self.session.features:
            one.settle()

    def _close_reports(self) -> None:
        """Write what waits for a feature, without what that was to find."""
        for one in () if self.session is None else self.session.features:
            one.close()
        self._reports.close()

    def close(self) -> None:
        """Leave the servers, if they were reached."""
        try:
            self._close_reports()
        finally:
            self.session = None
        self._opened.close()
        self._supervision.close()

    def _write_report(self, numbers: dict[str, float]) -> None:
        self._report(numbers, global_vars.get_tensorboard_writer())
        wandb = global_vars.get_wandb_writer()
        if wandb is not None:
            wandb.log({name: value for name, value in numbers.items() if name != "step"}, numbers["step"])


def install(config: RolloutCorrectionConfig, options: RunConfig, report: Report) -> Callable[[], None]:
    """Replace Megatron's functions, once, before the script runs.

    Args:
        config: the correction.
        options: of the launcher's flags.
        report: report(metrics, writer) takes each step's numbers on the job's last rank, with Megatron's
            TensorBoard writer or None.

    Returns:
        What leaves the servers after the script has ended.

    Raises:
        UnsupportedMegatron: and nothing is replaced, for a Megatron that is not known.
    """
    originals = [checked(hook.module, hook.name, hook.parameters) for hook in HOOKS]
    run = CorrectedTraining(config, options, report)
    wraps = (
        with_our_flags,
        run.wrap_set_up,
        run.wrap_train_step,
        run.wrap_save,
        checkpoint_files.with_ours_first,
        run.wrap_decide_exit,
    )
    _replace(originals, wraps)
    return run.close


def wrap_pretrain(wrap: Callable[[Callable], Callable]) -> None:
    """Replace `pretrain`, for a script that no launcher runs, so that something can happen
    after the last step.
    """
    replace(training, "pretrain", ("forward_step_func",), wrap)


def describe() -> str:
    """What `install` would replace in this Megatron, and where; nothing is replaced."""
    lines = [
        f"megatron-core {versions.megatron_version} in {versions.tree()}; supported are "
        f"{versions.SUPPORTED}; Transformer Engine: {versions.transformer_engine()}"
    ]
    originals = [checked(hook.module, hook.name, hook.parameters) for hook in HOOKS]
    for hook, holders in zip(HOOKS, _holders(originals), strict=True):
        places = [f"{module.__name__}.{name}" for module, name in holders]
        lines += [
            f"{hook.module.__name__}.{hook.name}({', '.join(hook.parameters)}, ...)",
            f"    by: {hook.by}",
            f"    at: {', '.join(sorted(places))}",
        ]
    return "\n".join(lines)


def with_our_flags(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        return add_flags(add_missing_flags(original(parser)))

    return add_megatron_arguments


def _console_losses(numbers: dict[str, float]) -> dict[str, torch.Tensor]:
    """What Megatron's `training_log` shows of the step, as losses; {} without numbers."""
    shown = {
        shown: numbers[name] for name, shown in CONSOLE.items() if math.isfinite(numbers.get(name, math.nan))
    }
    return {name: torch.tensor(value, device=communication_device()) for name, value in shown.items()}


def _holders(functions: Sequence[Callable]) -> list[list[tuple[ModuleType, str]]]:
    """Every (module, name) that is bound to each function, wherever it was imported and whatever it
    is called there.
    """
    found: dict[int, list] = {id(function): [] for function in functions}
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        # Thousands of modules have a million names, and every rank looks through them as it starts.
        if not found.keys().isdisjoint(map(id, list(vars(module).values()))):
            for name, value in list(vars(module).items()):
                if id(value) in found:
                    found[id(value)].append((module, name))
    return [found[id(function)] for function in functions]


def checked(module: ModuleType, name: str, parameters: tuple[str, ...]) -> Callable:
    """The function; UnsupportedMegatron if it is not there, or does not take the parameters."""
    function = vars(module).get(name)
    if function is None:
        raise versions.UnsupportedMegatron(
            f"{module.__name__} of megatron-core {versions.megatron_version} has no {name}: this Megatron "
            f"was changed in a way that megatron_rl_corr does not know; supported are {versions.SUPPORTED}"
        )
    versions.check_parameters(function, parameters)
    return function


def replace(
    module: ModuleType, name: str, parameters: tuple[str, ...], wrap: Callable[[Callable], Callable]
) -> None:
    """Bind the wrapped function wherever the original is bound: a copy would go on with the original."""
    _replace([checked(module, name, parameters)], [wrap])


def _replace(originals: Sequence[Callable], wraps: Sequence[Callable[[Callable], Callable]]) -> None:
    for original, holders, wrap in zip(originals, _holders(originals), wraps, strict=True):
        replacement = wrap(original)
        for holder, bound in holders:
            setattr(holder, bound, replacement)

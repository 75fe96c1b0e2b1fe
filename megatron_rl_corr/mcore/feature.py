"""The protocol of megatron_rl_corr/features, the optional parts of a run, and when it calls them.

    once        check_arguments, intervals, check_folders   run_flags.py, file_checks.py: every feature
                steered                                     session.start, before the run is prepared
                check_data, samples_aside, prepare          session.collector_of
                open, start                                 session.start, before the servers are reached
                samplings                                   serving.check_servers_and_prompts
    a batch     after_scoring, save_batch                   step.py, corrected and not trained yet
    an update   in_training_pass, stops_update, why_stopped step.py, before the optimizer's step
                settle                                      step.py, before the push of the batch's last one
                before_push, after_push                     serving.WeightPush, the start's push too
                after_join                                  membership.Joins, where servers come and go
                end_step, after_step                        hooks.py, behind the push
    else        settle                                      hooks.py, before a checkpoint and when leaving
                close                                       when the run has ended or failed

A batch is collected, corrected and pushed once; it makes --rollout-updates-per-batch x
--rollout-epochs-per-batch updates, and each update is a step, which is an iteration of Megatron. mcore/
imports no feature: it calls those of config/features.FEATURES in their order, on all ranks, so that a method
may be collective where it says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_rl_corr.config.features import FEATURES, feature_options
from megatron_rl_corr.config.run import RunConfig

if TYPE_CHECKING:  # a feature's settings are read without Megatron
    from torch import Tensor

    from megatron_rl_corr.data.tokenizer import Tokenizer
    from megatron_rl_corr.engines.trajectory import SamplingParams
    from megatron_rl_corr.mcore.batch.collector import BatchCollector
    from megatron_rl_corr.mcore.batch.microbatch import LossInputs, Microbatch
    from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch
    from megatron_rl_corr.mcore.batch.server_collector import SampleSource
    from megatron_rl_corr.mcore.forward import BatchForward, LogprobSettings
    from megatron_rl_corr.mcore.step_metrics import StepTimes
    from megatron_rl_corr.mcore.step_reports import StepReports
    from megatron_rl_corr.moe.routes import Routes
    from megatron_rl_corr.reduce.layout import Layout
    from megatron_rl_corr.reduce.metrics import Metric
    from megatron_rl_corr.weight_sync.export import StageExporter


@dataclass(frozen=True)
class RunSettings:
    """What is known of a run before its model and its servers are."""

    options: RunConfig
    args: argparse.Namespace
    """Megatron's."""
    layout: Layout
    vocab_size: int


@dataclass(frozen=True)
class CorrectedBatch:
    """A batch with its samples and, as far as they are known before it trains, its corrections; also where
    there was no pass for old log-probs.
    """

    number: int
    """Number of the batch, from 0."""
    iteration: int
    """Steps before its first one."""
    batch: RolloutBatch
    """This rank's tokens."""
    inputs: LossInputs | None
    """On the last stage."""
    forward: BatchForward
    """Runs a pass over the whole batch, under the current weights."""
    routes: Routes
    """With the servers' experts of the batch."""
    has_old_logprobs: bool
    """There was a pass for old log-probs, so pi_old's log-probs and the final mask are known."""


@dataclass(frozen=True)
class EndedStep:
    """A step that has ended."""

    number: int
    """From 1."""
    times: StepTimes
    ahead: bool
    """Another one follows, whose samples are taken meanwhile."""


@dataclass(frozen=True)
class RunParts:
    """What a run is made of, just before its servers are reached."""

    settings: RunSettings
    model: list
    """This rank's chunks."""
    optimizer: Any
    source: SampleSource | None
    """None in a replay, which has no servers."""
    exporter: StageExporter
    collector: BatchCollector
    shape: BatchShape
    logprob_settings: LogprobSettings
    reports: StepReports


@dataclass(frozen=True)
class FurtherSampling:
    """Sampling beside the training's that every server must be able to do.

    Example: FurtherSampling(SamplingParams(16), {"top_p": "eval_top_p"}, "evaluations are sampled so").
    """

    sampling: SamplingParams
    options: Mapping[str, str] = field(default_factory=dict)
    """Option of the training's sampling -> the one that sets this."""
    why: str = ""

    def explain(self, problem: str) -> str:
        """A server's refusal in the names of these options."""
        for name, own in self.options.items():
            problem = problem.replace(f"`{name}`", f"`{own}`")
        return f"{problem} ({self.why})"


class Feature:
    """An optional part of a run; a method that it does not need does nothing."""

    waits_as: ClassVar[str] = "feature"
    """time/WAITS_AS_s: seconds that a step waited in `settle` and `save_batch`."""
    needs_scoring: ClassVar[tuple[str, ...]] = ()
    """Its flags that need the whole batch's old log-probs before the loss."""
    needs_origins: ClassVar[bool] = False
    """Samples must know which row of the data they are of."""
    needs_traces: ClassVar[bool] = False
    """Samples must know when they were queued, sampled and scored."""

    def __init__(self, options: RunConfig):
        self.options = options

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        """True if a run has it, by its flags."""
        raise NotImplementedError(f"{cls.__name__} must say which flags ask for it")

    @classmethod
    def check_arguments(cls, args: argparse.Namespace) -> None:
        """ValueError for flags of Megatron that do not go with it; called whether it is asked for or not."""

    @classmethod
    def intervals(cls, args: argparse.Namespace) -> Mapping[str, int | None]:
        """Flag -> iterations, which must be whole batches; called whether it is asked for or not."""
        return {}

    @classmethod
    def check_folders(cls, options: RunConfig, args: argparse.Namespace) -> None:
        """ValueError for a folder that is another's too; called whether it is asked for or not."""

    def check_data(self, settings: RunSettings, tokenizer: Tokenizer) -> None:
        """ValueError for data that is wrong, where a run can't be prepared for other reasons."""

    def steered(self, routes: Routes, model: list, args: argparse.Namespace, layout: Layout) -> Routes:
        """What steers the passes of the trained model: `routes`, or what does more. Every rank calls it,
        before the run is prepared. May be collective.
        """
        return routes

    def samples_aside(self, rows: int) -> int:
        """Samples of filtered groups that a replica's leader keeps for this feature in each batch, and gives
        by `BatchCollector.take_aside`. Only one feature may ask for them.

        Args:
            rows: samples of a batch on a replica.
        """
        return 0

    def prepare(self, settings: RunSettings, source: SampleSource) -> None:
        """Make what needs neither servers nor other ranks. Raises ValueError, OSError. Not in a replay."""

    def samplings(self) -> Sequence[FurtherSampling]:
        """What servers must be able to sample beside the training; once it is prepared."""
        return ()

    def open(self, run: RunParts) -> None:
        """Take what the run is made of, and open files. In a run from saved samples too.

        Raises:
            OSError: a folder can't be made.
        """

    def start(self, run: RunParts) -> None:
        """Begin; all features are open, and the servers are reached next. May be collective. In a run from
        saved samples too.
        """

    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """This rank's share of metrics of a batch before it trains. May be collective."""
        return {}

    def in_training_pass(self, micro: Microbatch, logprobs: Tensor) -> dict[str, Metric]:
        """This rank's share of metrics of a microbatch, by logged name, the same names for each.

        Called in the training pass, on the last stage, where no pass for old log-probs came before. It must
        not read from the device.

        Args:
            micro: the microbatch.
            logprobs: [b * L] float32 of its labels, without a gradient.
        """
        return {}

    def stops_update(self, numbers: dict[str, float]) -> bool:
        """True if the run must end before this update; on ranks of the last stage, all of which say the same.

        Args:
            numbers: of the update, over the global batch; what is not to be logged may be taken out.
        """
        return False

    def why_stopped(self, numbers: Mapping[str, float]) -> Exception | None:
        """The error that ends the run, on one rank; called where a feature's `stops_update` was True. May be
        collective. numbers: as there, on the last stage.
        """
        return None

    def save_batch(self, scored: CorrectedBatch) -> bool:
        """Write what is kept of a batch before it trains; False: nothing is. May be collective."""
        return False

    def settle(self) -> bool:
        """Wait for what is under way and needs the servers' present weights, or ends the numbers of a step;
        False: for nothing. A feature has no state of its own in checkpoints.

        May be collective.
        """
        return False

    def before_push(self) -> None:
        """Every rank has whole and current weights, and the servers still the ones before.
        May be collective.
        """

    def after_push(self, push: Any, version: str) -> dict[str, float]:
        """Numbers of the step, now that the servers have the weights of this name. May be collective.

        Args:
            push: serving.WeightPush.
            version: the weights' name.

        Raises:
            RolloutError: on one rank, for servers that must not be sampled from.
        """
        return {}

    def after_join(self, servers: Any, version: str) -> None:
        """Servers that join the run have the weights of this name, and are not sampled from yet. May be
        collective.

        Args:
            servers: WeightServers of these alone.
            version: the weights' name.

        Raises:
            RolloutError: on one rank, for servers that must not be sampled from.
        """

    def end_step(self, ended: EndedStep) -> None:
        """Write what is kept of a step that has ended. May be collective. In a run from saved samples too."""

    def after_step(self, ended: EndedStep) -> None:
        """Begin what goes on beside the next step, before this step's numbers are written. May be
        collective.
        """

    def close(self) -> None:
        """Give up what is under way: the run has ended or failed. From any thread, on this rank alone."""


def feature_classes() -> tuple[type[Feature], ...]:
    """FEATURE of features/NAME/feature.py of each feature."""
    return tuple(import_module(f"megatron_rl_corr.features.{name}.feature").FEATURE for name in FEATURES)


def features_of(options: RunConfig) -> tuple[Feature, ...]:
    """Those that a run asks for; in a replay those that need no servers."""
    return tuple(
        feature(options)
        for feature, owner in zip(feature_classes(), feature_options(), strict=True)
        if (options.replay is None or owner.acts_in_replay) and feature.is_asked_for(options)
    )


def number_of_steps(args: argparse.Namespace) -> int:
    """Iterations of the run; with --train-samples Megatron works them out later, while it sets
    up the optimizer.
    """
    return args.train_iters if args.train_samples is None else args.train_samples // args.global_batch_size

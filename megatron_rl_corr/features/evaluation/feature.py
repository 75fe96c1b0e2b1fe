"""When a run evaluates: after every --eval-interval steps, while its servers have the weights of that step.

Without samples ahead of training an evaluation is waited for at once. With them the trainer goes on with
the next step, and waits before the next push, which would change the weights: an evaluation is of one
version of them. The numbers of the step that it belongs to wait with it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence

from megatron_rl_corr.config.problems import check_each
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.features.evaluation.evaluation import Evaluation, RunningEvaluation
from megatron_rl_corr.features.evaluation.held_out import held_out_prompts
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.mcore.feature import (
    EndedStep,
    Feature,
    FurtherSampling,
    RunParts,
    RunSettings,
    number_of_steps,
)
from megatron_rl_corr.mcore.step_reports import StepReports
from megatron_rl_corr.reduce.collectives import collective

SAMPLED = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Options of sampling that an evaluation has its own of."""


class EvaluationFeature(Feature):
    """Rollouts on held-out prompts."""

    waits_as = "eval"

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self.evaluation: Evaluation | None = None
        self._reports: StepReports | None = None
        self._collector: BatchCollector | None = None
        self._running: RunningEvaluation | None = None

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return bool(options.eval_prompts)

    @classmethod
    def check_arguments(cls, args: argparse.Namespace) -> None:
        steps = number_of_steps(args)
        if args.rollout_eval_prompts and not 0 < (args.eval_interval or 0) <= steps:
            raise ValueError(
                f"--rollout-eval-prompts would never be asked: --eval-interval {args.eval_interval}, the "
                f"steps from one evaluation to the next, must be from 1 to the run's {steps} steps, by "
                "--train-iters or --train-samples"
            )

    @classmethod
    def intervals(cls, args: argparse.Namespace) -> Mapping[str, int | None]:
        return {"--eval-interval": args.eval_interval} if args.rollout_eval_prompts else {}

    def check_data(self, settings: RunSettings, tokenizer: Tokenizer) -> None:
        args, layout = settings.args, settings.layout
        check_each(
            lambda one: held_out_prompts(
                one.path, self.options, args, layout, tokenizer, settings.vocab_size
            ),
            self.options.evaluation_sets(),
        )

    def prepare(self, settings: RunSettings, source: SampleSource) -> None:
        self.evaluation = Evaluation.of(settings, source)

    def samplings(self) -> Sequence[FurtherSampling]:
        names = {name: f"eval_{name}" for name in SAMPLED}
        return [FurtherSampling(self.evaluation.sampling, names, "evaluations are sampled so")]

    def open(self, run: RunParts) -> None:
        self._reports, self._collector = run.reports, run.collector

    def after_step(self, ended: EndedStep) -> None:
        if not self.evaluation.is_due(ended.number):
            return
        assert self._running is None, "an evaluation was not waited for before a push"
        self._running = self.evaluation.start(ended.number)
        self._reports.hold()
        if not ended.ahead:
            self._wait_for_evaluation(waited=True)

    def settle(self) -> bool:
        """Wait for the evaluation that is running, and write its step's numbers; False: none was.

        Raises:
            RolloutError: the servers failed; on other ranks PeerFailure.
        """
        return self._wait_for_evaluation(waited=False)

    @collective
    def _wait_for_evaluation(self, *, waited: bool) -> bool:
        """waited: the seconds of the evaluation are among the numbers of its step."""
        if self._running is None:
            return False
        running, self._running = self._running, None
        evaluated: dict[str, float] = {}
        try:
            # not waited: it goes on while the weights have changed, which nobody who joins may get
            evaluated = running.all_reduce_metrics(self._collector.turns if waited else None)
        finally:  # without the evaluation where it failed
            found = dict(evaluated)
            if waited:
                before = self._reports.numbers.get(
                    "time/eval_s", 0.0
                )  # for the evaluation of an earlier step
                found["time/eval_s"] = before + time.monotonic() - running.begun
            told = self._reports.release(found)
        if told:
            for line in _lines(running, evaluated):
                print(line, flush=True)
        return True

    def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()


def _lines(running: RunningEvaluation, metrics: dict[str, float]) -> list[str]:
    """A line for each set, as Megatron's own line averages over the steps between two lines."""
    lines = []
    for one in running.evaluation.sets:
        name = f" of {one.options.name}" if one.options.name else ""
        reward = metrics[f"{one.options.prefix}reward"]
        line = f"[rollout] held-out reward{name} after step {running.step}: {reward:.4f}"
        passed = metrics[f"{one.options.prefix}pass@{one.options.samples}"]
        if one.options.samples > 1 and not math.isnan(passed):
            line += f", pass@{one.options.samples} {passed:.4f}"
        lines.append(line)
    return lines


FEATURE = EvaluationFeature

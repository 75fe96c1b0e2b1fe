"""One corrected optimizer step: collect, score, correct, train, push, report.

N samples of this replica, L = --seq-length tokens a row.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import inputs_of
from megatron_rl_corr.core.metrics import Metric, Sum
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch import RolloutBatch, TrainingTargets, microbatches
from megatron_rl_corr.mcore.collection import Collector
from megatron_rl_corr.mcore.evaluation import Evaluation
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.forward_step import make_forward_step
from megatron_rl_corr.mcore.logprobs import LogprobSettings
from megatron_rl_corr.mcore.loss import CorrectedLoss
from megatron_rl_corr.mcore.scoring import reasons_to_score, score
from megatron_rl_corr.mcore.targets import batch_metrics, make_targets, make_unscored_targets
from megatron_rl_corr.mcore.trajectory_log import TrajectoryLog
from megatron_rl_corr.moe.routed_step import RoutedStep
from megatron_rl_corr.moe.statistics import ExpertStatistics, means, summary
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.parallel.groups import ParallelGroups
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.parallel.reduce import all_gather_metrics, merge

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import Replay

TrainStep = Callable[..., tuple]

DECISION = ("kept", "pulling", "first_step_kl")
"""What the loss counts for the decision between backward pass and update."""
NO_TOKEN = (
    "no token of the batch is left: no update in this step. See rollout_corr/rejected_fraction/* for the rule that "
    "took them, and widen its --rollout-rs-threshold; or the step's train-infer KL was above --rollout-batch-filter-kl "
    "(rollout_corr/batch_filtered)"
)
NO_GRADIENT = (
    "no token of the batch has a gradient, as every advantage or weight is 0: no update in this step. If the rewards "
    "of each prompt's samples are equal (rollout/groups_without_spread), the prompts are too easy or too hard, or the "
    "servers gave one sample many times (rollout/duplicate_samples)"
)


@dataclass
class StepTimes:
    """Wall seconds of a step's parts on this rank, in order."""

    last: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """What passed since the last mark belongs to `name`."""
        now = time.perf_counter()
        self.seconds[f"time/{name}_s"] = now - self.last
        self.last = now


@dataclass(frozen=True)
class CorrectedStep:
    """Stands in for Megatron's train step: makes the batch from rollouts, lets the original train on it."""

    config: RolloutCorrectionConfig
    layout: Layout
    collector: Collector
    logprobs: LogprobSettings
    push: Callable[[int], None]
    """push(version): send the current weights; every rank calls it."""
    report: Callable[[dict[str, float]], None]
    """Takes a step's numbers, on the job's last rank."""
    close: Callable[[], None]
    """Leave the servers, after the last step."""
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    group_size: int
    evaluation: Evaluation | None = None
    """Rollouts on held-out prompts, if they are asked for."""
    log: TrajectoryLog | None = None
    """Where the samples are kept, if they are."""
    replay: Replay | None = None
    """What the routers replay, if they do."""
    min_agreement: float | None = None
    """--router-replay-min-agreement; None without R3."""
    sequence_parallel: bool = False
    experts: ExpertStatistics | None = None
    """Of --expert-statistics."""
    first_step: FirstStep | None = None
    """What must hold in the first step after the start; None asks nothing."""

    @property
    def groups(self) -> ParallelGroups:
        return ParallelGroups(cp=self.layout.cp_group, dp_cp=self.layout.dp_cp_group)

    @property
    def scored_for(self) -> tuple[str, ...]:
        """What needs the scoring pass; with none, log-probs, weights and metrics are those of the training pass."""
        return reasons_to_score(
            self.config, saves=self.log is not None, experts=self.experts is not None,
            records=self.replay is not None and self.replay.kind == "R2",
        )

    def run(
        self, train_step: TrainStep, iteration: int, model: list, optimizer: Any, per_token: bool
    ) -> tuple:
        """The step after `iteration` others; train_step(forward_step, data_iterator) is Megatron's own."""
        times = StepTimes()
        batch = self.collector.collect(iteration)
        times.mark("collect")
        scored = bool(self.scored_for)
        routed = RoutedStep(
            self.replay, batch, self.layout, sequence_parallel=self.sequence_parallel, length=self.seq_length,
            observe_training=not scored,
        )
        targets, metrics = self._targets(batch, model, optimizer, routed)
        if scored:
            metrics |= self._all_reduce_agreement(routed, iteration)
        if self.experts is not None:
            metrics |= self._all_gather_experts(batch, targets, iteration)
        times.mark("score")
        if self.log is not None:
            self.log.all_reduce_write(iteration, batch, self.collector.trajectories, targets, with_train=scored)
            times.mark("save")
        loss, numbers = self._loss(batch, per_token, iteration), {}
        iterators = [RerunDataIterator(microbatches(batch, self.micro_batch_size, targets)) for _ in model]
        forward_step = make_forward_step(loss, self.logprobs, with_entropy=loss.with_entropy, replay=routed.replay)
        routers = compat.RouterState(model)

        def may_update() -> bool:
            # Only the training pass knows it all, so the step's one gather of metrics comes before the update.
            found = metrics if scored else metrics | self._all_reduce_agreement(routed, iteration)
            numbers.update(self._all_gather_numbers(found, loss))
            decision = {name: numbers.pop(f"decision/{name}", 0.0) for name in DECISION}
            if targets is not None and scored:  # and here the whole batch may have been filtered out
                decision["kept"] = min(decision["kept"], float(targets.correction.kept_tokens))
            updates = self._broadcast_decision(decision, iteration)
            if not updates:
                routers.forget_attention_logits()
            return updates

        with compat.asked_before_update(optimizer, may_update), routed.training():
            result = train_step(forward_step, iterators if len(model) > 1 else iterators[0])
        if compat.was_skipped(result):
            routers.restore()
        if compat.is_leaving(result):
            return result  # to write a checkpoint: there was no update, and nobody is left to sample for
        times.mark("train")
        with compat.gathered_parameters(model, optimizer):
            self.push(iteration + 1)
        times.mark("push")
        self._log(iteration, numbers, result, times)
        return result

    def _targets(
        self, batch: RolloutBatch, model: list, optimizer: Any, routed: RoutedStep
    ) -> tuple[TrainingTargets | None, dict[str, Metric]]:
        """What the loss needs, and the batch's metrics; None and none but on the last stage."""
        if not self.scored_for:
            if not self.layout.is_last_stage:
                return None, {}
            targets = make_unscored_targets(batch, self.config, self.groups, group_size=self.group_size)
            return targets, batch_metrics(batch, targets, None, self.groups)
        with compat.gathered_parameters(model, optimizer), routed.scoring():
            scored = score(model, batch, self.logprobs, micro_batch_size=self.micro_batch_size,
                           seq_length=self.seq_length, replay=routed.replay)
        by_routing = "routing" in inputs_of(self.config.rollout_rs)
        routing = routed.all_gather_disagreement() if by_routing else None
        if scored is None:
            return None, {}
        old_logprobs, entropy = scored
        targets = make_targets(
            batch, old_logprobs, self.config, self.groups, group_size=self.group_size, routing=routing
        )
        return targets, batch_metrics(batch, targets, entropy, self.groups)

    def _all_reduce_agreement(self, routed: RoutedStep, iteration: int) -> dict[str, Metric]:
        """Refuses routes that can't be right; how far the others agree with Megatron's own choice."""
        routed.all_reduce_check(self.min_agreement, step=iteration, group_size=self.group_size)
        return routed.all_reduce_metrics()

    def _all_gather_experts(
        self, batch: RolloutBatch, targets: TrainingTargets | None, iteration: int
    ) -> dict[str, Metric]:
        """The experts' tables, told by the job's last rank; their curves, once over the ranks of the last stage."""
        table = self.experts.all_gather(batch, targets)
        if not self.layout.is_last_stage:
            return {}
        if self.experts.tell is not None and dist.get_rank() == dist.get_world_size() - 1:
            self.experts.tell(iteration + 1, means(table))
        curves = summary(table, self.replay.shape.layers)
        alone = self.layout.dp_cp_group.rank() == 0
        return curves if alone else {name: Sum(torch.zeros_like(one.values)) for name, one in curves.items()}

    def _loss(self, batch: RolloutBatch, per_token: bool, iteration: int) -> CorrectedLoss:
        return CorrectedLoss(
            self.config, self.logprobs, num_microbatches=len(batch.tokens) // self.micro_batch_size,
            dp_size=self.layout.dp_size, per_token=per_token,
            global_positions=self.global_batch_size * self.seq_length, scored=bool(self.scored_for),
            groups=self.groups, first_step=self._is_first(iteration),
        )

    def _is_first(self, iteration: int) -> bool:
        return self.first_step is not None and self.first_step.iteration == iteration

    def _broadcast_decision(self, decision: dict[str, float], iteration: int) -> bool:
        """Whether the step updates the weights: the last stage knows (others give zeros), all learn it.

        A host read. A step without a token, or without a gradient, must be skipped by all, or Adam's momentum and
        weight decay, or MoE's auxiliary losses, would still move the weights. In the first step StartupError, on every
        rank's behalf, where what is trained is not what was sampled.
        """
        told = torch.tensor(list(decision.values()), dtype=torch.float64, device=self.collector.device)
        if self.layout.pp_size > 1:
            last = dist.get_process_group_ranks(self.layout.pp_group)[-1]
            dist.broadcast(told, last, group=self.layout.pp_group)
        kept, pulling, first_step_kl = told.tolist()
        if self._is_first(iteration):
            all_reduce_failure(self.first_step.judge(first_step_kl))
        if kept > 0 and pulling > 0:
            return True
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"[rollout] {NO_GRADIENT if kept > 0 else NO_TOKEN}", file=sys.stderr, flush=True)
        return False

    def _all_gather_numbers(self, metrics: dict[str, Metric], loss: CorrectedLoss) -> dict[str, float]:
        """The step's metrics over the global batch, by their logged names; none but on the last stage."""
        if not self.layout.is_last_stage:
            return {}
        for prefix, parts in (
            ("loss", loss.metrics), ("rollout_corr", loss.corrections), ("decision", loss.decisions)
        ):
            metrics = metrics | {f"{prefix}/{name}": metric for name, metric in merge(parts.values()).items()}
        return all_gather_metrics(metrics | self.collector.metrics, self.layout.dp_cp_group)

    def _log(self, iteration: int, numbers: dict[str, float], result: tuple, times: StepTimes) -> None:
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        # A probability band or a kind of turn without a token has no mean: it is left out, not told as NaN.
        numbers = {name: value for name, value in numbers.items() if "/by_" not in name or not math.isnan(value)}
        step_s = sum(times.seconds.values())
        grad_norm = compat.grad_norm_of(result)
        samples_tokens = numbers["response_length/mean"] * self.global_batch_size
        self.report({
            "step": iteration + 1, **numbers, **times.seconds, "time/step_s": step_s,
            "tokens_per_s": samples_tokens / step_s, "weight_version": iteration + 1,
            "skipped": int(compat.was_skipped(result)),
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
        })

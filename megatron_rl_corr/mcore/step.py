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
from torch import Tensor

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.metrics import Metric, Sum
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch import RolloutBatch, TrainingTargets, microbatches
from megatron_rl_corr.mcore.collection import Collector
from megatron_rl_corr.mcore.evaluation import Evaluation
from megatron_rl_corr.mcore.expert_statistics import ExpertStatistics, means, summary
from megatron_rl_corr.mcore.forward_step import make_forward_step
from megatron_rl_corr.mcore.logprobs import LogprobSettings
from megatron_rl_corr.mcore.loss import CorrectedLoss
from megatron_rl_corr.mcore.routed_step import RoutedStep
from megatron_rl_corr.mcore.scoring import score
from megatron_rl_corr.mcore.targets import batch_metrics, make_bypass_targets, make_targets
from megatron_rl_corr.mcore.trajectory_log import TrajectoryLog
from megatron_rl_corr.parallel.groups import ParallelGroups
from megatron_rl_corr.parallel.reduce import all_gather_metrics, merge

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.router_replay import Replay

TrainStep = Callable[..., tuple]


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
    layout: compat.Layout
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

    @property
    def groups(self) -> ParallelGroups:
        return ParallelGroups(cp=self.layout.cp_group, dp_cp=self.layout.dp_cp_group)

    def run(
        self, train_step: TrainStep, iteration: int, model: list, optimizer: Any, per_token: bool
    ) -> tuple:
        """The step after `iteration` others; train_step(forward_step, data_iterator) is Megatron's own."""
        times = StepTimes()
        batch = self.collector.collect(iteration)
        times.mark("collect")
        routed = RoutedStep(
            self.replay, batch, self.layout, sequence_parallel=self.sequence_parallel, length=self.seq_length,
            observe_training=self.config.bypass_mode,
        )
        targets, metrics = self._targets(batch, model, optimizer, routed)
        if not self.config.bypass_mode:
            metrics |= self._all_reduce_agreement(routed, iteration)
        if self.experts is not None:
            metrics |= self._all_gather_experts(batch, targets, iteration)
        times.mark("score")
        if self.log is not None:
            self.log.all_reduce_write(
                iteration, batch, self.collector.trajectories, targets, with_train=not self.config.bypass_mode
            )
            times.mark("save")
        loss, numbers = self._loss(batch, per_token), {}
        iterators = [RerunDataIterator(microbatches(batch, self.micro_batch_size, targets)) for _ in model]

        def train() -> tuple:
            forward_step = make_forward_step(
                loss, self.logprobs, with_entropy=loss.with_entropy, replay=routed.replay
            )
            with routed.training():
                return train_step(forward_step, iterators if len(model) > 1 else iterators[0])

        if self.config.bypass_mode:

            def may_update() -> bool:
                # Only the loss knows what is kept, so the step's one gather of metrics comes before the update.
                agreement = self._all_reduce_agreement(routed, iteration)
                numbers.update(self._all_gather_numbers(metrics | agreement, loss))
                return self._broadcast_any_kept(numbers.get("rollout_corr/kept_fraction"))

            with compat.asked_before_update(optimizer, may_update):
                result = train()
        else:
            kept = None if targets is None else targets.correction.kept_tokens
            result = train() if self._broadcast_any_kept(kept) else compat.skipped_step()
            numbers = self._all_gather_numbers(metrics, loss)
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
        if self.config.bypass_mode:
            if not self.layout.is_last_stage:
                return None, {}
            targets = make_bypass_targets(batch, self.config, self.groups, group_size=self.group_size)
            return targets, batch_metrics(batch, targets, None, self.groups)
        with compat.gathered_parameters(model, optimizer), routed.scoring():
            scored = score(model, batch, self.logprobs, micro_batch_size=self.micro_batch_size,
                           seq_length=self.seq_length, replay=routed.replay)
        by_routing = any(rule.divergence == "routing" for rule in self.config.rollout_rs)
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

    def _loss(self, batch: RolloutBatch, per_token: bool) -> CorrectedLoss:
        return CorrectedLoss(
            self.config, self.logprobs, num_microbatches=len(batch.tokens) // self.micro_batch_size,
            dp_size=self.layout.dp_size, per_token=per_token,
            global_positions=self.global_batch_size * self.seq_length, groups=self.groups,
        )

    def _broadcast_any_kept(self, kept: Tensor | float | None) -> bool:
        """Whether the loss keeps a token of the global batch: the last stage knows (others give None), all learn it.

        A host read. A step without a token must be skipped by all, or Adam's momentum and weight decay, or MoE's
        auxiliary losses, would still move the weights.
        """
        told = torch.zeros((), dtype=torch.float64, device=self.collector.device)
        if kept is not None:
            told += kept
        if self.layout.pp_size > 1:
            last = dist.get_process_group_ranks(self.layout.pp_group)[-1]
            dist.broadcast(told, last, group=self.layout.pp_group)
        # NaN is a share of nothing: no token was valid.
        any_kept = told.item() > 0
        if not any_kept and dist.get_rank() == dist.get_world_size() - 1:
            print(
                "[rollout] no token of the batch is left: no update in this step. See rollout_corr/rejected_fraction/* "
                "for the rule that took them, and widen its --rollout-rs-threshold; or the step's train-infer KL was "
                "above --rollout-batch-filter-kl (rollout_corr/batch_filtered)",
                file=sys.stderr, flush=True,
            )
        return any_kept

    def _all_gather_numbers(self, metrics: dict[str, Metric], loss: CorrectedLoss) -> dict[str, float]:
        """The step's metrics over the global batch, by their logged names; none but on the last stage."""
        if not self.layout.is_last_stage:
            return {}
        metrics = metrics | {f"loss/{name}": metric for name, metric in merge(loss.metrics.values()).items()}
        metrics |= {f"rollout_corr/{name}": metric for name, metric in merge(loss.corrections.values()).items()}
        metrics |= self.collector.metrics
        return all_gather_metrics(metrics, self.layout.dp_cp_group)

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

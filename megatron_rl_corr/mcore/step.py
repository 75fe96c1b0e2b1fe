"""One corrected optimizer step: collect, compute old log-probs, correct, train, push, report."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import inputs_of
from megatron_rl_corr.config.run import UPDATES_PER_BATCH
from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch import BatchShape, RolloutBatch
from megatron_rl_corr.mcore.collect import Collector
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.forward import LogprobSettings, compute_log_probs, make_forward_step
from megatron_rl_corr.mcore.loss import (
    CorrectedLoss,
    LossInputs,
    LossScale,
    batch_metrics,
    make_bypass_loss_inputs,
    make_loss_inputs,
)
from megatron_rl_corr.mcore.microbatches import Microbatch, microbatches
from megatron_rl_corr.mcore.packed_batch import PackedBatch
from megatron_rl_corr.mcore.packs import Packs
from megatron_rl_corr.mcore.reference import Reference, ReferencePass, less_reference_kl
from megatron_rl_corr.mcore.sample_log import SampleLog
from megatron_rl_corr.mcore.step_metrics import StepTimes
from megatron_rl_corr.moe.padding import set_packed_share
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.moe.statistics import token_values
from megatron_rl_corr.parallel.collectives import all_reduce_metrics, merge
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.parallel.layout import Layout

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


def scoring_reasons(
    config: RolloutCorrectionConfig, *, saves: bool = False, routes: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Flags that need the whole batch's old log-probs before the loss; without any, the pass for them is left out.

    With one update a batch pi_old is the policy that is trained, so the loss has its log-probs anyway, and corrects
    them microbatch by microbatch. Bypass mode never has the pass.

    Args:
        config: the correction.
        saves: --rollout-save-trajectories is given.
        routes: `Routes.needs_scoring`.
    """
    if config.bypass_mode:
        return ()
    reasons = {
        "--rollout-rs " + ",".join(rule.name for rule in config.rollout_rs): config.rollout_rs,
        "--rollout-m2-threshold": config.rollout_m2_threshold is not None,
        "--rollout-batch-filter-kl": config.rollout_batch_filter_kl is not None,
        "--rollout-is-batch-normalize": config.rollout_is_batch_normalize,
        "--rollout-loss-denominator kept": config.loss_denominator == "kept",
        "--rollout-save-trajectories": saves,
        "--rollout-kl-reward-coef": config.kl_reward_coef > 0,
        **dict.fromkeys(routes, True),
        f"{UPDATES_PER_BATCH} updates a batch": UPDATES_PER_BATCH > 1,
    }
    return tuple(reason for reason, needed in reasons.items() if needed)


def describe_scoring(config: RolloutCorrectionConfig, reasons: tuple[str, ...]) -> str:
    """One line for the user: whether each step has a pass for old log-probs before it trains, and why."""
    if reasons:
        return f"scoring pass: kept for {', '.join(reasons)}"
    if config.bypass_mode:
        return "scoring pass: left out (bypass mode: pi_rollout stands in for pi_old)"
    return "scoring pass: left out (with one update a batch pi_old is the policy that is trained, known in the loss)"


@dataclass(frozen=True)
class CorrectedStep:
    """Takes the place of Megatron's train step: makes the batch from rollouts, lets the original train on it."""

    config: RolloutCorrectionConfig
    layout: Layout
    shape: BatchShape
    collector: Collector
    logprobs: LogprobSettings
    push: Callable[[int], None]
    """push(version): send the current weights; every rank calls it."""
    report: Callable[[dict[str, float]], None]
    """Takes a step's numbers, on the job's last rank."""
    routes: Routes = field(default_factory=Routes)
    """--router-replay and --expert-statistics."""
    log: SampleLog | None = None
    """--rollout-save-trajectories."""
    reference: Reference = field(default_factory=Reference)
    """The policy of the KL penalties."""
    first_step: FirstStep | None = None
    """The bound of the KL in the first step after the start; None: no bound."""

    @property
    def scoring_reasons(self) -> tuple[str, ...]:
        """What needs the pass for old log-probs; without any, log-probs and metrics are those of the training pass."""
        return scoring_reasons(self.config, saves=self.log is not None, routes=self.routes.needs_scoring)

    def run(
        self, train_step: TrainStep, iteration: int, model: list, optimizer: Any, per_token: bool
    ) -> tuple:
        """The step after `iteration` others; train_step(forward_step, data_iterator) is Megatron's own."""
        times, scored = StepTimes(), bool(self.scoring_reasons)
        batch = self.collector.collect(iteration)
        self.routes.begin_step(
            batch.seq_ids, batch.flat_positions, samples=batch.num_sequences, compare_in_training=not scored
        )
        times.mark("collect")
        packs = self._packs(batch)
        reference = self.reference.log_probs(ReferencePass(
            model, optimizer, batch, self.logprobs, self.shape.micro_batch_size, self.shape.seq_length, packs
        ))  # fmt: skip
        times.mark("reference")
        inputs, metrics = self._all_reduce_loss_inputs(batch, packs, model, optimizer, reference)
        if scored:
            metrics |= self._all_reduce_agreement(batch, iteration)
            metrics |= self._all_gather_expert_statistics(inputs, iteration)
        if packs is not None and self.layout.is_last_stage:
            metrics |= packs.metrics()
        times.mark("score")
        if self.log is not None:
            self.log.all_reduce_write(iteration, batch, self.collector.trajectories, inputs, with_train=scored)
            times.mark("save")
        loss, numbers = self._loss(batch, packs, per_token, iteration), {}
        iterators = [RerunDataIterator(self._microbatches(batch, packs, inputs)) for _ in model]
        forward_step = make_forward_step(loss, self.logprobs, with_entropy=loss.with_entropy, routes=self.routes)
        if packs is not None:
            known = batch.num_sequences // self.shape.micro_batch_size
            set_packed_share(model, packs.all_reduce_share(self.layout, known=known))
        routers = compat.RouterState(model)

        def may_update() -> bool:
            # Only the training pass knows it all, so the step's one exchange of metrics comes before the update.
            agreement = {} if scored else self._all_reduce_agreement(batch, iteration)
            numbers.update(self._all_gather_numbers(metrics | agreement, loss))
            decision = {name: numbers.pop(f"decision/{name}", 0.0) for name in DECISION}
            if inputs is not None and scored:  # the whole batch may have been filtered out
                decision["kept"] = min(decision["kept"], float(inputs.correction.kept_tokens))
            updates = self._broadcast_decision(decision, iteration)
            if not updates:
                routers.zero_attention_logits()
            return updates

        with compat.asked_before_update(optimizer, may_update), self.routes.training():
            count = () if packs is None else (packs.count,)
            result = train_step(forward_step, iterators if len(model) > 1 else iterators[0], *count)
        if compat.was_skipped(result):
            routers.restore()
        if compat.is_leaving(result):
            return result  # to write a checkpoint: there was no update, and nobody is left to sample for
        times.mark("train")
        with compat.gathered_parameters(model, optimizer):
            self.push(iteration + 1)
            self.reference.end_batch(iteration + 1)
        times.mark("push")
        self._report(iteration, numbers, result, times)
        return result

    def _packs(self, batch: RolloutBatch | PackedBatch) -> Packs | None:
        """The microbatches of packed sequences; None for rows."""
        return None if self.shape.packing is None else Packs.all_reduce(batch, self.shape.packing, self.layout)

    def _microbatches(
        self, batch: RolloutBatch | PackedBatch, packs: Packs | None, inputs: LossInputs | None
    ) -> Iterator[Microbatch]:
        if packs is not None:
            return packs.microbatches(inputs)
        return microbatches(batch, self.shape.micro_batch_size, inputs)

    def _all_reduce_loss_inputs(
        self, batch: RolloutBatch | PackedBatch, packs: Packs | None, model: list, optimizer: Any,
        reference: Tensor | None,
    ) -> tuple[LossInputs | None, dict[str, Metric]]:
        """What the loss needs, and the batch's metrics, on the last stage; (None, {}) on others, which call it too."""
        group_size, groups = self.shape.group_size, self.layout.groups
        if not self.scoring_reasons:
            if not self.layout.is_last_stage:
                return None, {}
            rollout = batch.flat(batch.rollout_logprobs)  # bypass mode's pi_old
            lowered, kl = less_reference_kl(batch, rollout, reference, self.config, groups)
            inputs = make_bypass_loss_inputs(lowered, self.config, groups, group_size=group_size)
            return replace(inputs, ref_logprobs=reference), batch_metrics(batch, inputs.correction, None, groups) | kl
        with compat.gathered_parameters(model, optimizer), self.routes.scoring():
            scored = compute_log_probs(
                model, batch, self.logprobs, micro_batch_size=self.shape.micro_batch_size,
                seq_length=self.shape.seq_length, routes=self.routes, packs=packs,
            )
        self.routes.all_reduce_recorded()
        by_routing = "routing" in inputs_of(self.config.rollout_rs)
        routing = self.routes.all_reduce_disagreement() if by_routing else None
        if scored is None:
            return None, {}
        old_logprobs, entropy = scored
        lowered, kl = less_reference_kl(batch, old_logprobs, reference, self.config, groups)
        inputs = make_loss_inputs(
            lowered, old_logprobs, self.config, groups, group_size=group_size, routing=routing
        )
        return replace(inputs, ref_logprobs=reference), batch_metrics(batch, inputs.correction, entropy, groups) | kl

    def _all_reduce_agreement(self, batch: RolloutBatch | PackedBatch, iteration: int) -> dict[str, Metric]:
        return self.routes.all_reduce_agreement(
            iteration + 1, lambda sample: batch.name_of(sample, self.shape.group_size)
        )

    def _all_gather_expert_statistics(self, inputs: LossInputs | None, iteration: int) -> dict[str, Metric]:
        values = None
        if inputs is not None:
            correction, log_ratio = inputs.correction, inputs.old_logprobs - inputs.rollout_logprobs
            values = token_values(correction.valid, log_ratio, correction.weights, correction.mask)
        return self.routes.all_gather_statistics(iteration + 1, values)

    def _loss(
        self, batch: RolloutBatch | PackedBatch, packs: Packs | None, per_token: bool, iteration: int
    ) -> CorrectedLoss:
        count, counted = batch.num_sequences // self.shape.micro_batch_size, self.shape.positions
        if packs is not None:
            count, counted = packs.count, packs.count * self.layout.dp_cp_group.size()
        scale = LossScale(
            num_microbatches=count, dp_size=self.layout.dp_size, global_positions=counted, per_token=per_token
        )
        return CorrectedLoss(
            self.config, self.logprobs, scale, scored=bool(self.scoring_reasons), groups=self.layout.groups,
            first_step=self._is_first(iteration),
        )

    def _is_first(self, iteration: int) -> bool:
        return self.first_step is not None and self.first_step.iteration == iteration

    def _broadcast_decision(self, decision: dict[str, float], iteration: int) -> bool:
        """Whether the step updates the weights: the last stage knows (others give zeros), all learn it. A host read.

        A step without a token, or without a gradient, must be skipped by all, or Adam's momentum and weight decay, or
        MoE's auxiliary losses, would still move the weights.

        Raises:
            StartupError: in the first step, on one rank, where what is trained is not what was sampled.
            PeerFailure: then, on the other ranks.
        """
        values = torch.tensor(list(decision.values()), dtype=torch.float64, device=self.collector.device)
        if self.layout.pp_size > 1:
            dist.broadcast(values, self.layout.last_stage_rank, group=self.layout.pp_group)
        kept, pulling, first_step_kl = values.tolist()
        if self._is_first(iteration):
            all_reduce_failure(self.first_step.judge(first_step_kl))
        if kept > 0 and pulling > 0:
            return True
        if self.layout.is_job_reporter:
            print(f"[rollout] {NO_GRADIENT if kept > 0 else NO_TOKEN}", file=sys.stderr, flush=True)
        return False

    def _all_gather_numbers(self, metrics: dict[str, Metric], loss: CorrectedLoss) -> dict[str, float]:
        """The step's metrics over the global batch, by their logged names, on the last stage; {} on others."""
        if not self.layout.is_last_stage:
            return {}
        made = merge(loss.metrics.values())
        return all_reduce_metrics(metrics | made | self.collector.metrics, self.layout.dp_cp_group)

    def _report(self, iteration: int, numbers: dict[str, float], result: tuple, times: StepTimes) -> None:
        if not self.layout.is_job_reporter:
            return
        # A probability band or a kind of turn without a token has no mean: it is left out, not reported as NaN.
        numbers = {name: value for name, value in numbers.items() if "/by_" not in name or not math.isnan(value)}
        step_s = sum(times.seconds.values())
        grad_norm = compat.grad_norm_of(result)
        samples_tokens = numbers["response_length/mean"] * self.shape.global_batch_size
        self.report({
            "step": iteration + 1, **numbers, **times.seconds, "time/step_s": step_s,
            "tokens_per_s": samples_tokens / step_s, "weight_version": iteration + 1,
            "skipped": int(compat.was_skipped(result)),
            **({} if grad_norm is None else {"grad_norm": grad_norm}),
        })

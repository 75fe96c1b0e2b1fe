"""Corrected optimizer steps: collect a batch, compute old log-probs, correct; train on it, push, report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.rerun_state_machine import RerunDataIterator
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import inputs_of
from megatron_rl_corr.core.auto_weights import AutoWeights
from megatron_rl_corr.core.token_baseline import variance_proxies
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.microbatch import LossInputs
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch
from megatron_rl_corr.mcore.colocation import Colocation
from megatron_rl_corr.mcore.decision import Decision
from megatron_rl_corr.mcore.feature import CorrectedBatch, Feature
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.forward import BatchForward, LogprobSettings, compute_log_probs, make_forward_step
from megatron_rl_corr.mcore.loss import (
    CorrectedLoss,
    LossScale,
    make_loss_inputs,
    make_unscored_loss_inputs,
)
from megatron_rl_corr.mcore.reference.policy import Reference, less_reference_kl
from megatron_rl_corr.mcore.reference.teacher import Teacher
from megatron_rl_corr.mcore.scoring import OldPass, scoring_reasons
from megatron_rl_corr.mcore.step_metrics import StepTimes, batch_metrics
from megatron_rl_corr.mcore.updates import BatchInTraining, UpdatePart, Updates, inputs_of_update
from megatron_rl_corr.moe.padding import set_packed_share
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.moe.statistics import token_values
from megatron_rl_corr.reduce.collectives import all_reduce_metrics, collective, merge
from megatron_rl_corr.reduce.failure import all_reduce_failure
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric


@dataclass
class CorrectedStep:
    """Takes the place of Megatron's train step: makes batches from rollouts, lets the original train on them.

    With several updates a batch, each call makes one: the first collects the batch, the last
    pushes the weights.
    """

    config: RolloutCorrectionConfig
    layout: Layout
    shape: BatchShape
    collector: BatchCollector
    logprob_settings: LogprobSettings
    push: Callable[[int], dict[str, float]]
    """push(version): send the current weights; every rank calls it. Returns numbers of the step: the
    features' and the memory's.
    """
    report: Callable[[dict[str, float]], None]
    """Takes a step's numbers, on the job's last rank."""
    updates: Updates = field(default_factory=Updates)
    routes: Routes = field(default_factory=Routes)
    """--router-replay and --expert-statistics."""
    reference: Reference = field(default_factory=Reference)
    """The policy of the KL penalties."""
    teacher: Teacher = field(default_factory=Teacher)
    """The policy of distillation."""
    features: Sequence[Feature] = ()
    colocation: Colocation | None = None
    """--rollout-colocate: the GPUs are the servers' while a batch is collected, and the
    trainer's until the push.
    """
    auto: AutoWeights | None = None
    """--rollout-correction auto: the weights of the present batch, which `config` has."""
    first_step: FirstStep | None = None
    """The bound of the KL in the first step after the start; None: no bound."""
    training: BatchInTraining | None = None
    """The batch whose updates are being made."""
    times: StepTimes = field(default_factory=StepTimes)
    leaves_after_batch: bool = False
    """Megatron's rerun state machine asked to save and leave within the batch: the rest of it is left out."""

    @property
    def scoring_reasons(self) -> tuple[str, ...]:
        """What needs the pass for old log-probs; without any, log-probs and metrics are those of
        the training pass.
        """
        return scoring_reasons(
            self.config,
            updates=self.updates.count,
            features=tuple(flag for one in self.features for flag in one.needs_scoring),
            routes=self.routes.needs_scoring,
        )

    @collective
    def run(
        self, train_step: Callable, iteration: int, model: list, optimizer: Any, per_token: bool
    ) -> tuple:
        """The step after `iteration` others; train_step(forward_step, data_iterator) is Megatron's own."""
        times = self.times = StepTimes()
        number, update = self.updates.batches(iteration), iteration % self.updates.count
        if update == 0:
            self.training = self._collect_and_correct(number, iteration, model, optimizer, times)
        whole, numbers = self.training, {}
        if whole.left_out is None:
            part = self._samples_of_update(whole, update)
            result = self._train(train_step, whole, part, iteration, model, optimizer, per_token, numbers)
            if compat.is_leaving(result) and update > 0 and compat.asks_for_checkpoint(result):
                # A checkpoint cannot resume in the middle of a batch.
                result = whole.left_out = compat.stays(result)
                self.leaves_after_batch = True
            if compat.is_leaving(result):
                return result  # to write a checkpoint: there was no update, and nobody is left to sample for
            times.mark("train")
        else:
            result = whole.left_out
        if update == self.updates.count - 1:
            for one in self.features:
                if one.settle():
                    times.mark(one.waits_as)
            with compat.gathered_parameters(model, optimizer):
                numbers |= self.push(number + 1)
                self.reference.end_batch(number + 1)
            times.mark("push")
            self._take_weights(whole.chosen)
            self.training = None
        self._report(iteration, whole, numbers, result, times)
        return result

    @collective
    def _collect_and_correct(
        self, number: int, iteration: int, model: list, optimizer: Any, times: StepTimes
    ) -> BatchInTraining:
        """Collect a batch, score it if need be, correct it: what its updates share."""
        scored = bool(self.scoring_reasons)
        batch = self.collector.collect(number)
        self.routes.begin_batch(
            batch.seq_ids, batch.positions, samples=batch.num_sequences, compare_in_training=not scored
        )
        times.mark("collect")
        if self.colocation is not None:
            self.colocation.begin_training_turn()
            times.mark("release")
        packs = self._packs(batch)
        forward = BatchForward(model, optimizer, packs, self.logprob_settings, self.collector.trajectories)
        reference, teacher = self.reference.log_probs(forward), self.teacher.scores(forward)
        times.mark("reference")
        old = self._score(packs, model, optimizer)
        inputs, metrics = self._correct(batch, old, reference, teacher)
        found = CorrectedBatch(
            number, iteration, batch, inputs, forward, self.routes, has_old_logprobs=scored
        )
        for one in self.features:
            metrics |= one.after_scoring(found)
        if scored:
            metrics |= self._routing_agreement(batch, iteration)
            metrics |= self._write_expert_statistics(inputs, iteration)
        times.mark("score")
        for one in self.features:
            if one.save_batch(found):
                times.mark(one.waits_as)
        return BatchInTraining(
            number, batch, packs, inputs, metrics | self.collector.metrics | self.reference.metrics
        )

    @collective
    def _samples_of_update(self, whole: BatchInTraining, update: int) -> UpdatePart:
        """The samples of one update, with denominators and packs of their own."""
        batch, inputs = whole.batch, whole.inputs
        episodes = self.updates.samples(whole.number, update, batch.num_episodes, self.layout.dp_rank)
        self.routes.begin_update()
        if episodes is None:
            return UpdatePart(batch, whole.packs, inputs)
        samples = batch.samples_of(episodes)
        part, places = batch.part(samples), whole.places_of(samples)
        if inputs is not None:
            inputs = inputs_of_update(inputs, part, samples, places[:-1], self.config, self.layout.groups)
        return UpdatePart(part, self._packs(part), inputs, places)

    @collective
    def _train(
        self,
        train_step: Callable,
        whole: BatchInTraining,
        part: UpdatePart,
        iteration: int,
        model: list,
        optimizer: Any,
        per_token: bool,
        numbers: dict[str, float],
    ) -> tuple:
        """One update: Megatron's train step on `part`. Fills `numbers`, on the last stage."""
        self.reference.check_live("trained")
        scored, inputs, packs = bool(self.scoring_reasons), part.inputs, part.packs
        loss = self._loss(part, per_token, iteration)
        metrics = ({} if iteration % self.updates.count else whole.metrics) | part.metrics(self.layout)
        iterators = [RerunDataIterator(part.microbatches()) for _ in model]
        forward_step = make_forward_step(
            loss, self.logprob_settings, with_entropy=loss.with_entropy, routes=self.routes
        )
        if not packs.are_rows:
            known = part.batch.num_episodes // self.shape.micro_batch_size
            set_packed_share(model, packs.real_token_share(self.layout, known=known))
        routers = compat.RouterState(model)

        def decide_update() -> float:
            # Called within optimizer.step: behind the backward pass, when all metrics are known.
            agreement = {} if scored else self._routing_agreement(whole.batch, iteration)
            numbers.update(self._global_numbers(metrics | agreement, loss))
            stops = [one.stops_update(numbers) for one in self.features if numbers]
            found = replace(Decision.pop_from(numbers), stops=float(any(stops)))
            if inputs is not None and scored:  # the whole batch may have been filtered out
                found = replace(found, kept=min(found.kept, float(inputs.correction.kept_tokens)))
            factor = self._agree_on_update(found, iteration, whole, numbers)
            if not factor:
                routers.zero_attention_logits()
            elif self.updates.ess_step_scale:
                numbers["step_scale"] = factor
            return factor

        with compat.asked_before_update(optimizer, decide_update), self.routes.training():
            result = train_step(forward_step, iterators if len(model) > 1 else iterators[0], packs.count)
        if compat.was_skipped(result):
            routers.restore()
        if whole.ends_early:
            whole.left_out = compat.without_losses(result)
        return result

    @collective
    def _packs(self, batch: RolloutBatch) -> Packs:
        return Packs.balanced(batch, self.shape, self.layout)

    @collective
    def _score(self, packs: Packs, model: list, optimizer: Any) -> OldPass | None:
        """The pass for old log-probs, if anything needs it; None without one, and on stages but the last."""
        if not self.scoring_reasons:
            return None
        with compat.gathered_parameters(model, optimizer), self.routes.scoring():
            columns = compute_log_probs(
                model,
                packs,
                self.logprob_settings,
                routes=self.routes,
                with_collision=self.config.advantage_by_token,
            )
        self.routes.share_recorded()
        by_routing = "routing" in inputs_of(self.config.rollout_rs)
        routing = self.routes.measure_disagreement() if by_routing else None
        return None if columns is None else OldPass(*columns, routing=routing)

    @collective
    def _correct(
        self,
        batch: RolloutBatch,
        old: OldPass | None,
        reference: Tensor | None,
        teacher: Mapping[str, Tensor],
    ) -> tuple[LossInputs | None, dict[str, Metric]]:
        """What the loss needs, and the batch's metrics, on the last stage; (None, {}) on others,
        which call it too.
        """
        if not self.layout.is_last_stage:
            return None, {}
        config, groups, size = self.config, self.layout.groups, self.shape.group_size
        logprobs = batch.rollout_logprobs if old is None else old.logprobs
        lowered, kl = less_reference_kl(batch, logprobs, reference, config, groups)
        if old is None:
            inputs = make_unscored_loss_inputs(lowered, config, groups, group_size=size)
        else:
            inputs = make_loss_inputs(
                lowered, old, config, groups, group_size=size, seq_length=self.shape.seq_length
            )
        metrics = batch_metrics(batch, inputs.correction, None if old is None else old.entropy, groups)
        return replace(inputs, ref_logprobs=reference, **teacher), metrics | kl

    @collective
    def _routing_agreement(self, batch: RolloutBatch, iteration: int) -> dict[str, Metric]:
        return self.routes.measure_agreement(iteration + 1, batch.name_of)

    @collective
    def _write_expert_statistics(self, inputs: LossInputs | None, iteration: int) -> dict[str, Metric]:
        values = None
        if inputs is not None:
            correction, log_ratio = inputs.correction, inputs.old_logprobs - inputs.rollout_logprobs
            values = token_values(correction.valid, log_ratio, correction.weights, correction.mask)
        return self.routes.write_statistics(iteration + 1, values)

    def _loss(self, part: UpdatePart, per_token: bool, iteration: int) -> CorrectedLoss:
        scale = LossScale(
            num_microbatches=part.packs.count,
            dp_size=self.layout.dp_size,
            global_positions=part.packs.counted(self.layout),
            per_token=per_token,
        )
        return CorrectedLoss(
            self.config,
            self.logprob_settings,
            scale,
            scored=bool(self.scoring_reasons),
            groups=self.layout.groups,
            first_step=self.first_step if self._is_first(iteration) else None,
            updates=self.updates.count,
            bounds_kl=self.updates.bounds_kl(iteration),
            watchers=() if self.scoring_reasons else [one.in_training_pass for one in self.features],
        )

    def _is_first(self, iteration: int) -> bool:
        return self.first_step is not None and self.first_step.iteration == iteration

    @collective
    def _agree_on_update(
        self, found: Decision, iteration: int, whole: BatchInTraining, numbers: dict[str, float]
    ) -> float:
        """The factor of the update, 0 for none; where the KL to pi_old is too large, the batch ends here.
        Fills `numbers`.

        Raises:
            StartupError: in the first step, on one rank, where what is trained is not what was sampled.
            Exception: on one rank, of a feature that ends the run.
            PeerFailure: then, on the other ranks.
        """
        bounded, scales = self.updates.bounds_kl(iteration), self.updates.ess_step_scale
        decision = Decision.agreed_decision(
            found, self.layout, self.collector.device, take_largest=bounded or scales or self.auto is not None
        )
        if decision.stops:
            for one in self.features:
                all_reduce_failure(one.why_stopped(numbers))
        chooses = self.auto is not None and iteration % self.updates.count == 0
        if chooses:
            numbers.update(self.auto.numbers)
            whole.chosen = self.auto.after(decision.mismatch)
        if self._is_first(iteration):
            if self.first_step.is_left_to_next(decision.first_step_kl):
                self.first_step = replace(self.first_step, iteration=iteration + self.updates.count)
            else:
                all_reduce_failure(self.first_step.judge(decision.first_step_kl))
        left_out = self.updates.too_far(iteration, decision.kl_to_old) if bounded else None
        if decision.makes_update and left_out is None:
            return decision.step_scale if scales else 1.0
        decision.print_why_not(self.layout, left_out)
        whole.ends_early = left_out is not None
        return 0.0

    def _take_weights(self, chosen: AutoWeights | None) -> None:
        """Go on with these weights, if the last batch has chosen any."""
        if chosen is None or chosen == self.auto:
            return
        if self.layout.is_job_reporter:
            print(f"[rollout] --rollout-correction auto: from the next batch on {chosen}", flush=True)
        self.auto, self.config = chosen, chosen.corrected(self.config)

    @collective
    def _global_numbers(self, metrics: dict[str, Metric], loss: CorrectedLoss) -> dict[str, float]:
        """The step's metrics over the global batch, by their logged names, on the last
        stage; {} on others.
        """
        if not self.layout.is_last_stage:
            return {}
        made = merge(loss.metrics.values())
        return all_reduce_metrics(metrics | made, self.layout.dp_cp_group)

    def _report(
        self,
        iteration: int,
        whole: BatchInTraining,
        numbers: dict[str, float],
        result: tuple,
        times: StepTimes,
    ) -> None:
        if not self.layout.is_job_reporter:
            return
        update = iteration % self.updates.count
        if update == 0:
            whole.response_length, whole.weight_lag = numbers["response_length/mean"], numbers["weight_lag"]
        # A probability band or a kind of turn without a token has no mean: it is left out, not
        # reported as NaN.
        numbers = {
            name: value for name, value in numbers.items() if "/by_" not in name or not math.isnan(value)
        }
        whole.seconds += (step_s := sum(times.seconds.values()))
        if update == self.updates.count - 1:
            numbers["tokens_per_s"] = whole.response_length * self.shape.collected / whole.seconds
        if self.updates.count > 1:
            numbers |= {
                "update": update + 1,
                "weight_lag_updates": whole.weight_lag * self.updates.count + update,
            }
        numbers |= {} if self.updates.max_kl is None else {"left_out": int(whole.left_out is not None)}
        grad_norm = compat.grad_norm_of(result)
        self.report(
            {
                "step": iteration + 1,
                **numbers,
                **times.seconds,
                "time/step_s": step_s,
                "weight_version": self.updates.batches(iteration + 1),
                "skipped": int(compat.was_skipped(result)),
                **({} if grad_norm is None else {"grad_norm": grad_norm}),
                **variance_proxies(numbers, grad_norm),
            }
        )

"""The corrected policy loss as Megatron's schedules want it, and the inputs that it takes beside the logits.

S sequences of this replica, T tokens of this context-parallel rank; a microbatch has some of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import is_own
from megatron_rl_corr.config.rules import RULE_INPUTS
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.distillation import Distilled, TeacherScores, distill, prefix_weights
from megatron_rl_corr.core.losses.own import gradient_of
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.losses.score_centering import TopPolicies
from megatron_rl_corr.core.quadrants import quadrant_metrics
from megatron_rl_corr.core.token_baseline import gradient_energies
from megatron_rl_corr.mcore.batch.microbatch import LossInputs, Microbatch
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch, trained_tokens
from megatron_rl_corr.mcore.batch_advantages import advantages_of_batch, token_advantages_of_batch
from megatron_rl_corr.mcore.decision import mean_k3
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.forward import LogprobSettings, label_logprobs
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.mcore.step_scale import sequences_ess
from megatron_rl_corr.mcore.user_functions import loss_of
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective
from megatron_rl_corr.reduce.metrics import Metric, Sum


@collective
def make_loss_inputs(
    batch: RolloutBatch,
    old: OldPass,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
    *,
    group_size: int,
    seq_length: int | None = None,
) -> LossInputs:
    """Correct pi_old against pi_rollout, then take advantages over the sequences that were not rejected.

    A rule, or a weight, that needs advantages gets those over all sequences.

    Args:
        batch: this rank's tokens.
        old: log pi_old, and what else its pass found.
        config: the correction.
        groups: the ranks of the batch.
        group_size: samples of a prompt.
        seq_length: the longest that a sequence may be; for an advantage of each token.
    """
    inputs = {}
    for name in config.needed_inputs:
        if name == "advantages":
            inputs[name] = batch.spread(advantages_of_batch(batch, config, groups, group_size=group_size))
        else:
            inputs[name] = old.routing if name == "routing" else RULE_INPUTS[name].of_batch(batch)
    correction = compute_correction(
        old.logprobs,
        batch.rollout_logprobs,
        trained_tokens(batch),
        batch.seq_ids,
        num_sequences=batch.num_sequences,
        config=config,
        groups=groups,
        episode_ids=batch.mean_ids,
        **_parts(batch),
        **inputs,
    )
    if not config.advantage_by_token:
        by_row = advantages_of_batch(batch, config, groups, group_size=group_size, correction=correction)
        return _loss_inputs(batch, correction, batch.spread(by_row), config, old_logprobs=old.logprobs)
    assert batch.episodes is None, "check_branches refuses it"
    energies = gradient_energies(old.logprobs, old.collisions)
    advantages = token_advantages_of_batch(
        batch, correction, energies, groups, group_size=group_size, seq_length=seq_length
    )
    made = _loss_inputs(batch, correction, advantages, config, old_logprobs=old.logprobs)
    return replace(made, energies=energies)


@collective
def make_unscored_loss_inputs(
    batch: RolloutBatch,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
    *,
    group_size: int,
) -> LossInputs:
    """Without a pass for old log-probs: the loss corrects the current policy against pi_rollout.

    Nothing is rejected before the loss, so every sequence that has tokens is in its group's baseline.
    """
    rollout = batch.rollout_logprobs
    whole = compute_correction(
        rollout,
        rollout,
        trained_tokens(batch),
        batch.seq_ids,
        num_sequences=batch.num_sequences,
        config=RolloutCorrectionConfig(),
        groups=groups,
        episode_ids=batch.mean_ids,
    )
    advantages = advantages_of_batch(batch, config, groups, group_size=group_size, correction=whole)
    return _loss_inputs(batch, replace(whole, metrics={}), batch.spread(advantages), config)


def _loss_inputs(
    batch: RolloutBatch,
    correction: Correction,
    advantages: Tensor,
    config: RolloutCorrectionConfig,
    *,
    old_logprobs: Tensor | None = None,
) -> LossInputs:
    """advantages [T]."""
    mask = trained_tokens(batch)
    return LossInputs(
        batch.rollout_logprobs,
        mask,
        batch.loss_mask & batch.spread(batch.version_lags == 0),
        advantages,
        correction,
        token_coefficients(correction, batch.seq_ids, config),
        old_logprobs,
        **_parts(batch),
        top_ids=batch.top_ids,
        top_logprobs=batch.top_logprobs,
    )


def _parts(batch: RolloutBatch) -> dict[str, Any]:
    """What metrics, and rules by turn, part the tokens by."""
    engines = batch.engine_ids
    return {
        "turn_ids": batch.turn_ids,
        "num_turns": batch.num_turns,
        "engines": batch.engines,
        "engine_ids": None if engines is None else batch.spread(engines),
        "token_lags": batch.token_lags,
    }


@dataclass(frozen=True)
class LossScale:
    """Undoes what Megatron divides a loss by, in both modes of --calculate-per-token-loss.

    Off: the schedule multiplies a microbatch's loss by cp and divides it by the number of microbatches,
    DDP divides the gradient by dp * cp; num_microbatches * dp_size is left to put back. On: the gradient
    is divided by the sum of the returned counts. All positions are counted and the loss is scaled to
    match, so that MoE's auxiliary losses, which that division also meets, do not grow where tokens are
    masked or rejected.
    """

    num_microbatches: int
    dp_size: int
    global_positions: int
    """The sum of `Microbatch.counted` over the global batch: of rows, all positions, padding included."""
    per_token: bool
    """Megatron's calculate_per_token_loss."""

    def schedule_result(self, share: Tensor, positions: int) -> tuple:
        """What a loss function returns for its share of the global loss, over a microbatch of
        so many positions.
        """
        if self.per_token:
            # A fill, not torch.tensor: copying a number from the host would wait for the device.
            count = torch.full((), positions, dtype=torch.int, device=share.device)
            return share * self.global_positions, count, {}
        return share * (self.num_microbatches * self.dp_size), {}


@dataclass
class CorrectedLoss:
    """The schedule's loss of each microbatch of one step; keeps the metrics of all."""

    config: RolloutCorrectionConfig
    logprob_settings: LogprobSettings
    scale: LossScale
    scored: bool
    """A pass for old log-probs has made the batch's correction; else each microbatch's is made here."""
    groups: ParallelGroups | None = None
    """For a loss or a correction of whole sequences."""
    updates: int = 1
    """Optimizer steps that the batch makes. With one, pi_old is the current policy, taken here: it has the
    dropout, the kernels and the rounding of this very pass, so r = 1 exactly.
    """
    bounds_kl: bool = False
    """Measure the KL to pi_old for the decision whether the batch goes on."""
    first_step: FirstStep | None = None
    """Measure the KL that it bounds, on tokens that the weights that are trained sampled."""
    watchers: Sequence[Callable[[Microbatch, Tensor], dict[str, Metric]]] = ()
    """watcher(microbatch, its log-probs [T]): further metrics, by logged name."""
    metrics: dict[int, dict[str, Metric]] = field(default_factory=dict)
    """Microbatch -> its metrics by logged name, and decision/*; one that Megatron replays counts once."""

    @property
    def with_entropy(self) -> bool:
        """True if it needs the entropy of each token's distribution."""
        return not self.scored or self.config.entropy_coef > 0

    def __call__(self, micro: Microbatch, output: Tensor) -> tuple:
        """The microbatch's share of the sum over the global batch of coefficient x token loss, as
        LossScale has it.
        """
        config, inputs = self.config, micro.loss_inputs
        logprobs, entropy, *of_top = label_logprobs(
            output, micro, self.logprob_settings, with_entropy=self.with_entropy
        )
        current, correction = logprobs.detach(), inputs.correction
        rewarded, distilled = inputs.advantages, self._distilled(micro, current, of_top)
        if distilled is not None:
            inputs = replace(inputs, advantages=rewarded + distilled.advantages)
        corrected: dict[str, Metric] = {}
        metrics: dict[str, Metric] = {}
        if not self.scored:
            correction = self._correct(micro, current)
            corrected = correction.metrics
            metrics["entropy"] = mean_entropy(entropy, correction.valid)
        old = self._old_logprobs(inputs, current)
        losses = policy_loss(
            loss_of(config.loss),
            logprobs,
            old,
            rewarded,
            correction,
            config,
            entropy=entropy,
            metrics=metrics,
            seq_ids=micro.seq_ids,
            num_sequences=micro.num_sequences,
            groups=self.groups,
            ref_logprobs=inputs.ref_logprobs,
            rollout_logprobs=inputs.rollout_logprobs,
            top=None if inputs.top_logprobs is None else TopPolicies(of_top[0], inputs.top_logprobs),
            distilled=distilled,
        )
        pulls = inputs.coefficients * correction.weights * inputs.advantages
        corrected = corrected | quadrant_metrics(
            current, inputs.rollout_logprobs, inputs.advantages, pulls, correction.mask
        )
        gradient = gradient_of(losses, logprobs) if is_own(config.loss) else None
        decision = self._decision(inputs, correction, current, old, gradient, distilled)
        parts = {"loss": metrics, "rollout_corr": corrected, "decision": decision}
        self.metrics[micro.index] = {
            f"{prefix}/{name}": metric for prefix, part in parts.items() for name, metric in part.items()
        }
        for watch in self.watchers:
            self.metrics[micro.index] |= watch(micro, current)
        return self.scale.schedule_result((losses * inputs.coefficients).sum(), micro.counted)

    def _distilled(self, micro: Microbatch, current: Tensor, of_top: list[Tensor]) -> Distilled | None:
        """What the teacher adds, under the policy of this pass; of_top: its log-probs of the further ids."""
        inputs = micro.loss_inputs
        if inputs.teacher_logprobs is None:
            return None
        teacher = TeacherScores(inputs.teacher_logprobs, inputs.teacher_ids, inputs.teacher_top_logprobs)
        top = None if inputs.teacher_ids is None else of_top[0]
        labels = micro.labels.reshape(-1)
        return distill(current, teacher, self.config.distill_coef, labels=labels, top_logprobs=top)

    def _old_logprobs(self, inputs: LossInputs, current: Tensor) -> Tensor:
        """Log pi_old of each label [T]."""
        if self.config.bypass_mode:
            return inputs.rollout_logprobs
        return current if self.updates == 1 else inputs.old_logprobs

    @collective
    def _correct(self, micro: Microbatch, current: Tensor) -> Correction:
        """The current policy against pi_rollout, over one microbatch."""
        inputs = micro.loss_inputs
        return compute_correction(
            current,
            inputs.rollout_logprobs,
            inputs.loss_mask,
            micro.seq_ids,
            num_sequences=micro.num_sequences,
            config=self.config,
            # The batch's totals are known, and the other replicas may be at another microbatch.
            groups=None if self.groups is None else replace(self.groups, dp_cp=None),
            advantages=inputs.advantages,
            turn_ids=inputs.turn_ids,
            num_turns=inputs.num_turns,
            engine_ids=inputs.engine_ids,
            engines=inputs.engines,
            token_lags=inputs.token_lags,
        )

    @torch.no_grad()
    def _decision(
        self,
        inputs: LossInputs,
        correction: Correction,
        current: Tensor,
        old: Tensor,
        gradient: Tensor | None,
        distilled: Distilled | None,
    ) -> dict[str, Metric]:
        """What decides whether the step updates the weights.

        kept: tokens in the loss. pulling: those of them that have a gradient, as weight x advantage is not 0
        (with an entropy bonus each has, with a KL penalty or dro's those that are not where it pulls them,
        weighed ones where the pull is weighed, with a teacher's likeliest ids those that they are known of;
        `gradient` [T] tells it of a loss of the user's own, which may need no advantage). first_step_kl: as
        `FirstStep.judge` takes it. kl_to_old: mean k3 between pi_old and the policy over the tokens in the
        loss. ess: of the sequences that rules leave, where they are applied here.
        """
        pulling, config = correction.mask, self.config
        if gradient is not None:
            pulling = pulling & (gradient != 0) if not config.entropy_coef else pulling
        elif not config.entropy_coef:
            weighed = correction.weights != 0
            # Score centering acts on tokens of weight 0 too.
            moved = (weighed if inputs.top_ids is None else pulling) & (inputs.advantages != 0)
            weighs_kl = config.kl_loss_type == "unbiased" and not config.bypass_mode
            penalties = (
                (config.kl_loss_coef, inputs.ref_logprobs, weighs_kl),
                (config.sampler_kl_coef, inputs.rollout_logprobs, False),
                (config.kind.pulls_to_old, old, True),
            )
            for coefficient, other, is_weighed in penalties:
                if coefficient:
                    pulled = (current != other) & other.isfinite()
                    moved = moved | (pulled & weighed if is_weighed else pulled)
            if distilled is not None and distilled.top is not None:
                weights = prefix_weights(correction, config)
                moved = moved | (distilled.known if weights is None else distilled.known & (weights != 0))
            pulling = pulling & moved
        decision: dict[str, Metric] = {
            "kept": Sum(correction.mask.sum(dtype=torch.float64)[None]),
            "pulling": Sum(pulling.sum(dtype=torch.float64)[None]),
        }
        # without rules none is rejected, and the batch's own ESS is this one
        if not self.scored and config.rollout_rs:
            decision["ess"] = sequences_ess(correction, self.groups or ParallelGroups())
        if self.first_step is not None:
            own, most = inputs.from_current_weights, self.first_step.most
            decision["first_step_kl"] = mean_k3(current, inputs.rollout_logprobs, own, most)
        if self.bounds_kl:
            decision["kl_to_old"] = mean_k3(current, old, correction.mask)
        return decision

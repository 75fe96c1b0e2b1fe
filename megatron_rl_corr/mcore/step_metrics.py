"""A step's own metrics and what they mean: rewards, lengths, staleness, gradient and time, with its clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.metric_spec import Column, MetricSpec, UsualRange, in_group
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.metrics import Max, Mean, Metric, Min, Std

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch


@dataclass
class StepTimes:
    """Wall seconds of a step's parts on this rank, in order."""

    last: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """(name, begin, end) of each part."""

    def mark(self, name: str) -> None:
        """Count the time since the last mark to `name`."""
        now = time.perf_counter()
        key = f"time/{name}_s"
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self.last
        self.phases.append((name, self.last, now))
        self.last = now


def batch_metrics(
    batch: RolloutBatch, correction: Correction, entropy: Tensor | None, groups: ParallelGroups
) -> dict[str, Metric]:
    """Rewards, lengths, staleness, entropy (if there was a pass for it) and the correction's
    own, by logged name.
    """
    rewards, lags = (batch.episode_means(values.double()) for values in (batch.rewards, batch.version_lags))
    sums = torch.stack([rewards, rewards.square(), lags, torch.ones_like(rewards)]).sum(dim=1)
    if groups.cp_rank > 0:
        # One of the ranks that share a sequence counts what it has once; its tokens are counted by each.
        sums = torch.zeros_like(sums)
    total, squares, lag, count = sums.unbind()
    length = batch.loss_mask.sum(dtype=torch.float64)
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(torch.stack([total, count])),
        "reward/std": Std(torch.stack([total, squares, count])),
        "reward/max": Max(rewards.amax()[None]),
        "reward/min": Min(rewards.amin()[None]),
        "response_length/mean": Mean(torch.stack([length, count])),
        "weight_lag": Max(batch.version_lags.double().amax()[None]),
        "weight_lag_mean": Mean(torch.stack([lag, count])),
    }
    if entropy is not None:
        metrics["loss/entropy"] = mean_entropy(entropy, correction.valid)
    return metrics | {f"rollout_corr/{name}": metric for name, metric in correction.metrics.items()}


RUN = in_group("Run", MetricSpec("step", "training step", column=Column(6)))

REWARDS = in_group(
    "Rewards and responses",
    MetricSpec(
        "reward/mean",
        "reward of the batch's samples; should rise",
        "mean(r)",
        "reward",
        column=Column(8, "{:.4f}".format),
    ),
    MetricSpec(
        "reward/std", "standard deviation of the rewards; with 0 there is nothing to learn from", "std(r)"
    ),
    MetricSpec("reward/max", "best reward of the batch", "max(r)"),
    MetricSpec("reward/min", "worst reward of the batch", "min(r)"),
    MetricSpec(
        "reward/reference_kl",
        "what the KL to the reference takes from a reward; reward/mean is before that",
        "kl_reward_coef * mean over samples of the sum of their tokens' estimates",
        only_with="--rollout-kl-reward-coef",
        usual=UsualRange(
            "the KL takes more from a reward than many rewards are",
            "Lower --rollout-kl-reward-coef: the KL is summed over a response, so that long ones pay more.",
            low=-1,
            high=1,
        ),
    ),
    MetricSpec("response_length/mean", "tokens per response", label="response length"),
)

UPDATE = in_group(
    "Loss and gradient",
    MetricSpec(
        "grad_norm",
        "gradient norm before clipping; spikes often follow the KL",
        label="grad norm",
        column=Column(9),
    ),
    MetricSpec(
        "skipped",
        "1 when the optimizer step was left out",
        label="skip",
        usual=UsualRange(
            "nothing to learn from, a gradient not finite, or an early end",
            "Widen the rejection bounds if the kept fraction is 0; look for prompts whose samples all have "
            "one reward if reward/std is small; a batch that ended early (left_out) asks for fewer updates "
            "or a smaller learning rate; otherwise find the first NaN in the losses.",
            low=0,
            high=0,
        ),
    ),
    MetricSpec(
        "step_scale",
        "factor of this update's learning rate; smaller where few sequences carry the batch",
        "sqrt(ESS / n) over the update's sequences (see ess_sequences)",
        only_with="--rollout-ess-step-scale",
    ),
    MetricSpec(
        "update",
        "the step's place in its batch, from 1; the first has rewards and correction",
        only_with="--rollout-updates-per-batch",
    ),
    MetricSpec(
        "left_out",
        "1 when the step was left out, as the policy was too far from pi_old",
        "KL to pi_old (k3) > --rollout-max-kl-to-old, in this update or an earlier one of the batch",
        only_with="--rollout-max-kl-to-old",
    ),
)

SPEED = in_group(
    "Speed",
    MetricSpec(
        "tokens_per_s",
        "response tokens per second of the whole batch, from its collection to its push",
        label="tokens/s",
        column=Column(9, "{:,.0f}".format),
    ),
    MetricSpec(
        "packing/real_fraction",
        "share of the positions that went through the model that were tokens of samples",
        "tokens / (tokens + padding)",
        only_with="packed sequences",
        usual=UsualRange(
            "much of a microbatch is padding",
            "Packs are padded to the tensor-parallel size times twice the context-parallel size: take larger "
            "microbatches with --rollout-max-tokens-per-microbatch.",
            low=0.8,
        ),
    ),
    MetricSpec(
        "packing/microbatches", "microbatches of a step on each replica", only_with="packed sequences"
    ),
    MetricSpec("packing/tokens_max", "tokens of the largest microbatch", only_with="packed sequences"),
    MetricSpec("time/collect_s", "seconds waiting for samples and rewards"),
    MetricSpec(
        "time/release_s",
        "seconds until servers have released their memory, and the trainer has its own back",
        only_with="--rollout-colocate",
    ),
    MetricSpec(
        "time/score_s", "seconds from samples to training: advantages, and the log-prob pass if there is one"
    ),
    MetricSpec("time/reference_s", "seconds getting log-probs of a reference policy and of a teacher"),
    MetricSpec("time/train_s", "seconds in forward, backward and optimizer"),
    MetricSpec("time/push_s", "seconds sending weights to the servers"),
    MetricSpec(
        "time/resume_s",
        "seconds of time/push_s in which servers got their memory back, in two parts",
        only_with="--rollout-colocate",
    ),
    MetricSpec("time/step_s", "seconds of the whole step"),
)

STALENESS = in_group(
    "Staleness",
    MetricSpec(
        "rollout/push_changed",
        "share of the model's values that the push sent; 1 where it sent everything",
        only_with="--rollout-push delta",
    ),
    MetricSpec(
        "weight_version", "weight version the servers hold after the step", label="version", column=Column(7)
    ),
    MetricSpec(
        "weight_lag",
        "weight versions that the oldest sample is behind the trained weights; 0 is on-policy",
        "max(version trained - version sampled)",
        "lag",
        column=Column(4, lambda lag: f"{lag:.1f}".removesuffix(".0")),
    ),
    MetricSpec(
        "weight_lag_updates",
        "updates that the oldest sample is behind the trained weights",
        "weight_lag x updates a batch + updates of this batch before the step",
        only_with="--rollout-updates-per-batch",
    ),
    MetricSpec(
        "weight_lag_mean", "weight_lag averaged over samples", "mean(version trained - version sampled)"
    ),
)

METRICS = RUN + REWARDS + UPDATE + SPEED + STALENESS

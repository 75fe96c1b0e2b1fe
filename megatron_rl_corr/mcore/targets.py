"""From scored samples to what the loss needs: correction and advantages, and the metrics of the batch.

N samples of L tokens (this context-parallel rank's of a row); all flat tensors have N * L entries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RULE_INPUTS, inputs_of
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses.penalties import mean_entropy
from megatron_rl_corr.core.metrics import Max, Mean, Metric, Min, Std
from megatron_rl_corr.mcore.batch import RolloutBatch, TrainingTargets
from megatron_rl_corr.parallel.groups import ParallelGroups


def make_targets(
    batch: RolloutBatch, old_logprobs: Tensor, config: RolloutCorrectionConfig, groups: ParallelGroups,
    *, group_size: int, routing: Tensor | None = None,
) -> TrainingTargets:
    """Correct pi_old against pi_rollout, then take advantages over the rows that were not rejected.

    The off-policy sequence mask looks at advantages before that: over all rows.
    """
    rows, length = batch.tokens.shape
    group = {"num_groups": rows // group_size, "kind": config.advantage_kind}
    made_here = {
        "advantages": lambda: group_advantages(batch.rewards, batch.group_ids, **group).repeat_interleave(length),
        "routing": lambda: routing.reshape(-1),
    }
    inputs = {
        name: made_here[name]() if name in made_here else RULE_INPUTS[name].of_batch(batch)
        for name in inputs_of(config.rollout_rs)
    }
    correction = compute_correction(
        old_logprobs, batch.rollout_logprobs.reshape(-1), batch.loss_mask.reshape(-1), batch.seq_ids,
        num_sequences=rows, config=config, groups=groups, turn_ids=batch.flat_turn_ids, num_turns=batch.num_turns,
        **inputs,
    )
    advantages = group_advantages(
        batch.rewards, batch.group_ids, **group, in_baseline=correction.kept_sequences
    ).repeat_interleave(length)
    return _targets(batch, correction, advantages, config, old_logprobs=old_logprobs)


def make_unscored_targets(
    batch: RolloutBatch, config: RolloutCorrectionConfig, groups: ParallelGroups, *, group_size: int
) -> TrainingTargets:
    """Without a scoring pass: the loss corrects the current policy against pi_rollout.

    Nothing is rejected before the loss, so every row that has tokens is in its group's baseline.
    """
    rows, length = batch.tokens.shape
    rollout = batch.rollout_logprobs.reshape(-1)
    whole = compute_correction(
        rollout, rollout, batch.loss_mask.reshape(-1), batch.seq_ids, num_sequences=rows,
        config=RolloutCorrectionConfig(), groups=groups,
    )
    advantages = group_advantages(
        batch.rewards, batch.group_ids, num_groups=rows // group_size, kind=config.advantage_kind,
        in_baseline=whole.kept_sequences,
    ).repeat_interleave(length)
    return _targets(batch, replace(whole, metrics={}), advantages, config)


def _targets(
    batch: RolloutBatch, correction: Correction, advantages: Tensor, config: RolloutCorrectionConfig,
    *, old_logprobs: Tensor | None = None,
) -> TrainingTargets:
    own = batch.loss_mask & (batch.version_lags == 0)[:, None]
    return TrainingTargets(
        batch.rollout_logprobs.reshape(-1), batch.loss_mask.reshape(-1), own.reshape(-1), advantages, correction,
        token_coefficients(correction, batch.seq_ids, config), old_logprobs, batch.flat_turn_ids, batch.num_turns,
    )


def batch_metrics(
    batch: RolloutBatch, targets: TrainingTargets, entropy: Tensor | None, groups: ParallelGroups
) -> dict[str, Metric]:
    """Rewards, lengths, staleness, entropy (if scored) and the correction's own, under their logged names."""
    rewards, lags = batch.rewards.double(), batch.version_lags.double()
    by_row = torch.stack([rewards, rewards.square(), lags, torch.ones_like(rewards)]).sum(dim=1)
    if groups.cp_rank > 0:
        # What a row has once is counted by one of the ranks that share it; its tokens, by each.
        by_row = torch.zeros_like(by_row)
    total, squares, lag, count = by_row.unbind()
    length = batch.loss_mask.sum(dtype=torch.float64)
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(torch.stack([total, count])),
        "reward/std": Std(torch.stack([total, squares, count])),
        "reward/max": Max(rewards.amax()[None]),
        "reward/min": Min(rewards.amin()[None]),
        "response_length/mean": Mean(torch.stack([length, count])),
        "weight_lag": Max(lags.amax()[None]),
        "weight_lag_mean": Mean(torch.stack([lag, count])),
    }
    if entropy is not None:
        metrics["loss/entropy"] = mean_entropy(entropy, targets.correction.valid)
    return metrics | {f"rollout_corr/{name}": metric for name, metric in targets.correction.metrics.items()}

"""Which rules of a correction rejected which tokens of a saved batch: computed again from its log-probs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.commands.correct.compare import KeptBatch
from megatron_rl_corr.commands.correct.correction_text import rule_as_text
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule, inputs_of
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.files import CONFIG_NAME
from megatron_rl_corr.rollout.sample_file import Sample

Rejections = dict[str, torch.Tensor]
"""What rejects, in words -> bool [R], the response's tokens that it rejects."""


def read_correction(run_dir: Path) -> RolloutCorrectionConfig | None:
    """The correction that a run's run.json says it trained with; None without the file.

    Raises:
        ValueError: the file is not one that a run of this package writes.
    """
    path = run_dir / CONFIG_NAME
    if not path.is_file():
        return None
    try:
        return correction_of(json.loads(path.read_text(encoding="utf-8"))["rollout_correction"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no correction that this version knows: {error!r}") from error


def correction_of(fields: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """The configuration of a run.json's fields."""
    rules = tuple(RejectionRule(**rule) for rule in fields["rollout_rs"])
    return RolloutCorrectionConfig(**{**fields, "rollout_rs": rules})


def find_rejections(samples: Sequence[Sample], config: RolloutCorrectionConfig) -> list[Rejections]:
    """For each sample of a whole batch, what rejects how much of it: the parts of the
    correction, one at a time.

    Args:
        samples: all of a batch, with the trainer's log-probs: a mean over the batch decides M2PO's cut.
        config: what the run trained with. Rules about expert routing or advantages are left out: files
            have no routing, and advantages of after rejection, where the rules saw those of before.
    """
    batch, found = KeptBatch.of(samples), [{} for _ in samples]
    if config.diagnostics_only:
        return found
    lengths = [sample.trajectory.output_ids.numel() for sample in samples]
    for words, alone in _one_at_a_time(config).items():
        turns = None if batch.turn_ids is None else int(batch.turn_ids.max()) + 1
        correction = compute_correction(
            batch.train_logprobs,
            batch.rollout_logprobs,
            batch.sampled,
            batch.seq_ids,
            config=alone,
            num_sequences=batch.num_sequences,
            turn_ids=batch.turn_ids,
            num_turns=turns,
        )
        lost = correction.valid & ~correction.mask
        if alone.rollout_is is not None:
            lost = correction.valid & (correction.weights == 0)
        if alone.rollout_batch_filter_kl is not None and correction.kept_tokens == 0:
            lost = correction.valid
        for rejections, own in zip(found, lost.split(lengths), strict=True):
            if own.any():
                rejections[words] = own
    unusable = (batch.sampled & ~(batch.train_logprobs - batch.rollout_logprobs).isfinite()).split(lengths)
    for rejections, own in zip(found, unusable, strict=True):
        if own.any():
            rejections["no finite log-prob"] = own
    return found


def _one_at_a_time(config: RolloutCorrectionConfig) -> dict[str, RolloutCorrectionConfig]:
    """Each part of the correction that can reject, alone, by what it says of itself."""
    none = RolloutCorrectionConfig()
    alone = {
        rule_as_text(rule): replace(none, rollout_rs=(rule,))
        for rule in config.rollout_rs
        if not inputs_of((rule,))
    }
    if config.rollout_m2_threshold is not None:
        words = f"m2 <= {config.rollout_m2_threshold:g}"
        alone[words] = replace(none, rollout_m2_threshold=config.rollout_m2_threshold)
    if config.rollout_batch_filter_kl is not None:
        words = f"batch KL (k3) <= {config.rollout_batch_filter_kl:g}"
        alone[words] = replace(none, rollout_batch_filter_kl=config.rollout_batch_filter_kl)
    if config.rollout_is_mode == "mask":
        names = ("rollout_is", "rollout_is_mode", "rollout_is_lower", "rollout_is_upper")
        weights = {name: getattr(config, name) for name in names}
        low, high = config.rollout_is_lower, config.rollout_is_upper
        interval = f"<= {high:g}" if low is None else f"in [{low:g}, {high:g}]"
        alone[f"{config.rollout_is} weight {interval}"] = replace(none, **weights)
    return alone

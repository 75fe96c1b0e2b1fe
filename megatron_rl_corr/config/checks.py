"""Which settings of a correction go together: what is wrong, missing or without effect is refused.

Each error names the flag, the rule, the value and the remedy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_rl_corr.config.losses import ADVANTAGES, AGGREGATIONS, DUAL_CLIP, KL_TYPES, LOSSES
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.config.words import (
    NO_WEIGHTS,
    check_bool,
    check_bounds,
    check_positive,
    is_number,
    one_of,
    plain,
)

if TYPE_CHECKING:
    from megatron_rl_corr.config.correction import RolloutCorrectionConfig

LEVELS = ("token", "sequence", "geometric", "turn")
MODES = ("truncate", "clip", "mask")
DENOMINATORS = ("valid", "kept")


def check(config: RolloutCorrectionConfig) -> None:
    """ValueError for the first setting that cannot stand."""
    if config.rollout_is is not None:
        one_of("--rollout-is", config.rollout_is, LEVELS, also="none")
    one_of("--rollout-is-mode", config.rollout_is_mode, MODES)
    one_of("--rollout-loss", config.loss, LOSSES)
    one_of("--rollout-loss-denominator", config.loss_denominator, DENOMINATORS)
    if config.advantage is not None:
        one_of("--rollout-advantage", config.advantage, ADVANTAGES)
    _weights(config)
    _rules(config)
    _clip(config)
    _aggregation(config)
    _terms(config)
    if config.bypass_mode:
        _bypass(config)


def _weights(config: RolloutCorrectionConfig) -> None:
    lower, upper = config.rollout_is_lower, config.rollout_is_upper
    check_bool("--rollout-is-batch-normalize", config.rollout_is_batch_normalize)
    if config.rollout_is is None:
        settings = (lower, upper, config.rollout_is_batch_normalize, config.rollout_is_mode)
        if settings != (None, None, False, "truncate"):
            raise ValueError(
                "--rollout-is-threshold, --rollout-is-mode and --rollout-is-batch-normalize have no "
                "effect without weights; add --rollout-is token, sequence or geometric, or drop them"
            )
        return
    if upper is None:
        raise ValueError(f"--rollout-is {config.rollout_is} needs --rollout-is-threshold; 2.0 is usual")
    check_bounds("--rollout-is-threshold", lower, upper, NO_WEIGHTS)
    if config.rollout_is_mode == "truncate" and lower is not None:
        raise ValueError(
            f"--rollout-is-threshold lower bound {plain(lower)} has no effect with --rollout-is-mode "
            "truncate; use --rollout-is-mode clip or mask, or give the upper bound alone"
        )
    if config.rollout_is_mode == "clip" and lower is None:
        raise ValueError(
            f"--rollout-is-mode clip needs both bounds, got only upper {plain(upper)}; "
            "give --rollout-is-threshold as LOWER_UPPER, for example 0.5_5.0"
        )


def _rules(config: RolloutCorrectionConfig) -> None:
    for rule in config.rollout_rs:
        if not isinstance(rule, RejectionRule):
            raise ValueError(f"rollout_rs takes RejectionRule objects, got {rule!r}; from_dict takes their names")
    names = [rule.name for rule in config.rollout_rs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--rollout-rs names {name} twice; give each rule once, with one pair of bounds")
    for flag, value, usual in (
        ("--rollout-m2-threshold", config.rollout_m2_threshold, "0.04 is usual"),
        ("--rollout-batch-filter-kl", config.rollout_batch_filter_kl, "use 1e-2, for example"),
    ):
        if value is not None:
            check_positive(flag, value, usual)
    check_bool("--rollout-bypass-mode", config.bypass_mode)
    check_bool("--rollout-diagnostics-only", config.diagnostics_only)


def _clip(config: RolloutCorrectionConfig) -> None:
    kind = config.kind
    for side, value, limit, bound in (
        ("low", config.clip_ratio_low, "in (0, 1]", 1.0), ("high", config.clip_ratio_high, "positive", math.inf),
    ):
        if value is None:
            continue
        if kind.clip is None:
            raise ValueError(
                f"--rollout-clip-ratio-{side} has no effect with --rollout-loss {config.loss}, which does not clip; "
                "drop it, or use --rollout-loss ppo_clip"
            )
        if not is_number(value) or not 0 < value <= bound or value == math.inf:
            usual = plain(kind.clip[side == "high"])
            raise ValueError(
                f"--rollout-clip-ratio-{side} must be {limit}, got {plain(value)}; {usual} is usual for {config.loss}"
            )
    dual = config.clip_ratio_c
    if dual is not None and not (is_number(dual) and 1 < dual < math.inf):
        raise ValueError(f"--rollout-clip-ratio-c must be above 1, got {plain(dual)}; 3 is usual, none turns it off")
    if dual != DUAL_CLIP and not kind.dual_clip:
        raise ValueError(f"--rollout-clip-ratio-c has no effect with --rollout-loss {config.loss}; drop it")


def _aggregation(config: RolloutCorrectionConfig) -> None:
    if config.loss_aggregation is not None:
        one_of("--rollout-loss-aggregation", config.loss_aggregation, AGGREGATIONS)
    if config.aggregation == "seq-mean-token-sum-norm":
        if config.loss_scale_length is None:
            raise ValueError(
                "--rollout-loss-aggregation seq-mean-token-sum-norm needs --rollout-loss-scale-length; "
                "use the longest response, the value of --rollout-max-new-tokens"
            )
        check_positive("--rollout-loss-scale-length", config.loss_scale_length, "use the longest response")
    elif config.loss_scale_length is not None:
        raise ValueError(
            f"--rollout-loss-scale-length has no effect with --rollout-loss-aggregation {config.aggregation}; "
            "use seq-mean-token-sum-norm, or drop it"
        )


def _terms(config: RolloutCorrectionConfig) -> None:
    one_of("--rollout-kl-loss-type", config.kl_loss_type, KL_TYPES)
    coefficients = {"--rollout-kl-loss-coef": config.kl_loss_coef, "--rollout-entropy-coef": config.entropy_coef}
    for flag, value in coefficients.items():
        if not is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"{flag} must be a finite number, not negative, got {plain(value)}; 0 turns it off")
    if config.kl_loss_coef == 0 and config.kl_loss_type != "k3":
        raise ValueError("--rollout-kl-loss-type has no effect without --rollout-kl-loss-coef; give it, or drop both")


def _bypass(config: RolloutCorrectionConfig) -> None:
    if config.rollout_is is not None and config.kind.has_ratio:
        raise ValueError(
            f"--rollout-is {config.rollout_is} in bypass mode would weigh twice: the ratio of --rollout-loss "
            f"{config.loss} is pi_theta / pi_rollout already; use --rollout-is none, or --rollout-loss reinforce"
        )
    whole_batch = {
        "--rollout-is-batch-normalize": config.rollout_is_batch_normalize,
        "--rollout-loss-denominator kept": config.loss_denominator == "kept",
        "--rollout-m2-threshold": config.rollout_m2_threshold is not None,
        "--rollout-batch-filter-kl": config.rollout_batch_filter_kl is not None,
    }
    for flag, given in whole_batch.items():
        if given:
            raise ValueError(
                f"{flag} needs the whole batch, but bypass mode corrects one microbatch at a time, in the loss; "
                "drop it, or --rollout-bypass-mode"
            )

"""A correction in a few words: its weight, what each of its rules keeps, its loss."""

from __future__ import annotations

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.presets import NO_BOUND
from megatron_rl_corr.config.rules import RejectionRule


def weights_as_text(config: RolloutCorrectionConfig) -> str:
    """The importance weight and its bounds, in a few words."""
    if config.rollout_is is None:
        return "1"
    if config.rollout_is_mode == "gamma":
        return f"{config.rollout_is}, w^k e^(l (1 - w))" + (
            ", mean 1" if config.rollout_is_batch_normalize else ""
        )
    low, high = config.rollout_is_lower, config.rollout_is_upper
    interval = f"above {high:g}" if low is None else f"outside [{low:g}, {high:g}]"
    bounded = {"truncate": f"at most {high:g}", "clip": f"into [{low}, {high:g}]", "mask": f"0 {interval}"}
    text = "no bound" if high == NO_BOUND else bounded[config.rollout_is_mode]
    return f"{config.rollout_is}, {text}" + (", mean 1" if config.rollout_is_batch_normalize else "")


def rules_as_text(config: RolloutCorrectionConfig) -> list[str]:
    """What the rejection rules keep, one a line."""
    rules = [rule_as_text(rule) for rule in config.rollout_rs]
    if config.rollout_m2_threshold is not None:
        rules.append(f"m2 <= {config.rollout_m2_threshold:g}")
    return rules or ["all"]


def rule_as_text(rule: RejectionRule) -> str:
    """A rejection rule as the interval it keeps."""
    if rule.lower is None:
        return f"{rule.name} <= {rule.upper:.5g}"
    if rule.upper is None:
        return f"{rule.name} >= {rule.lower:.5g}"
    return f"{rule.name} in [{rule.lower:.5g}, {rule.upper:.5g}]"


def loss_as_text(config: RolloutCorrectionConfig) -> str:
    """The loss, and whether pi_rollout is its pi_old."""
    return f"{config.loss}, bypass" if config.bypass_mode else config.loss

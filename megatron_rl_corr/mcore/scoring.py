"""The scoring pass: whether a batch has a pass for old log-probs before it trains, why, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import idle_clips
from megatron_rl_corr.config.flags import name_flags


@dataclass(frozen=True)
class OldPass:
    """A batch under the weights that its updates begin with, pi_old, on the last stage: [T] float32 each."""

    logprobs: Tensor
    entropy: Tensor | None = None
    collisions: Tensor | None = None
    """sum p^2 of each distribution; for an advantage of each token."""
    routing: Tensor | None = None
    """Share of a token's experts that only the server chose; for a rule by routing."""


def scoring_reasons(
    config: RolloutCorrectionConfig,
    *,
    updates: int = 1,
    features: tuple[str, ...] = (),
    routes: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Flags that need the whole batch's old log-probs before the loss; without any, the pass for
    them is left out.

    With one update a batch pi_old is the policy that is trained, so the loss has its log-probs anyway, and
    corrects them microbatch by microbatch. Bypass mode never has the pass.

    Args:
        config: the correction.
        updates: that a batch makes.
        features: flags of features that need it.
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
        **dict.fromkeys(features, True),
        "--rollout-kl-reward-coef": config.kl_reward_coef > 0,
        f"--rollout-advantage {config.advantage_kind}": config.advantage_by_token,
        **dict.fromkeys(routes, True),
        f"{updates} updates a batch": updates > 1,
    }
    return tuple(reason for reason, needed in reasons.items() if needed)


def describe_scoring(config: RolloutCorrectionConfig, reasons: tuple[str, ...]) -> str:
    """One line for the user: whether each batch has a pass for old log-probs before it trains, and why."""
    if reasons:
        return f"scoring pass: kept for {', '.join(reasons)}"
    if config.bypass_mode:
        return "scoring pass: left out (bypass mode: pi_rollout stands in for pi_old)"
    return (
        "scoring pass: left out (with one update a batch pi_old is the policy that is trained, known in "
        "the loss)"
    )


def describe_start(config: RolloutCorrectionConfig, reasons: tuple[str, ...], updates: int) -> list[str]:
    """Lines for the user: whether batches have a scoring pass and for what (reasons), and
    settings that can't act.

    updates: that a batch makes.
    """
    lines = describe_scoring(config, reasons), idle_clips(config, updates)
    return [name_flags(line) for line in lines if line is not None]

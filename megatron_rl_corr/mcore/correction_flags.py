"""The flags of the correction and of the loss, and the configuration that they make.

Only the standard library and config.py, as in arguments.py.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl_corr.config.checks import DENOMINATORS, LEVELS, MODES
from megatron_rl_corr.config.correction import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import ADVANTAGES, AGGREGATIONS, LOSSES
from megatron_rl_corr.config.rules import rules_help
from megatron_rl_corr.config.sources import with_overrides


def add_correction(group: Any) -> None:
    """Add them to a parser's group."""
    add = group.add_argument
    add("--rollout-correction-preset", metavar="NAME", default=None,
        help=f"start from a preset: {', '.join(PRESETS)}")
    add("--rollout-correction-config", metavar="YAML", default=None,
        help="start from a YAML file of settings (our field names, or a peer's); flags override it")
    add("--rollout-is", metavar="LEVEL", default=None,
        help=f"level of the importance weight pi_train / pi_rollout: {', '.join(LEVELS)} or none")
    add("--rollout-is-mode", metavar="MODE", default=None,
        help=f"what happens to weights out of bounds: {', '.join(MODES)} "
        "(default: truncate with one bound, mask with two)")
    add("--rollout-is-threshold", metavar="UPPER|LOWER_UPPER", default=None,
        help="closed bounds on the weight; 2.0 is usual, 0.5_5.0 for IcePop")
    add("--rollout-is-batch-normalize", action=argparse.BooleanOptionalAction, default=None,
        help="divide the weights by their mean over the global batch")
    add("--rollout-rs", metavar="RULE[,RULE]", default=None,
        help=f"rejection rules, all must keep a token; verl's *_k1 bound 1/rho; or none. {rules_help()}")
    add("--rollout-rs-threshold", metavar="BOUNDS[,BOUNDS]", default=None,
        help="bounds of the rules, one for all or one a rule: LOWER_UPPER where a rule takes both "
        "bounds, else one number")
    add("--rollout-token-veto-threshold", metavar="X", default=None,
        help="drop a sequence if one of its tokens has rho outside [X, 1/X]: seq_max_ratio by another name")
    add("--rollout-opsm-delta", metavar="X", default=None,
        help="drop a sequence of negative advantage whose mean of log pi_rollout - log pi_train is above X "
        "(off-policy sequence mask)")
    add("--rollout-min-prob", metavar="P", default=None,
        help="drop the tokens that the server sampled with a probability below P")
    add("--rollout-seq-logprob-error-threshold", metavar="X", default=None,
        help="drop a sequence whose mean of e^|log-ratio| is above X: seq_mean_exp_abs by another name")
    add("--rollout-m2-threshold", metavar="X", type=_number_or_none, default=None,
        help="M2PO: drop the tokens of largest log-ratio until their mean square is at most X; 0.04 is usual, "
        "or none")
    add("--rollout-batch-filter-kl", metavar="X", type=_number_or_none, default=None,
        help="skip the update of a step whose train-infer KL (k3) is above X; or none")
    add("--rollout-bypass-mode", action=argparse.BooleanOptionalAction, default=None,
        help="two policies: pi_rollout stands in for pi_old, and the correction is made in the loss")
    add("--rollout-diagnostics-only", action=argparse.BooleanOptionalAction, default=None,
        help="measure and log the correction, change nothing")
    _add_loss(add)


def _add_loss(add: Any) -> None:
    default = RolloutCorrectionConfig()
    add("--rollout-loss", metavar="NAME", default=None,
        help=f"policy loss: {', '.join(LOSSES)} (default {default.loss})")
    add("--rollout-clip-ratio-low", metavar="X", type=float, default=None,
        help="clip pi_theta / pi_old below at 1 - X (default: the loss's own, 0.2 for ppo_clip)")
    add("--rollout-clip-ratio-high", metavar="X", type=float, default=None,
        help="clip pi_theta / pi_old above at 1 + X (default: the loss's own, 0.2 for ppo_clip)")
    add("--rollout-clip-ratio-c", metavar="X", type=_number_or_none, default=None,
        help=f"dual clip: where the advantage is negative, at most X times it (default {default.clip_ratio_c}), "
        "or none")
    add("--rollout-loss-aggregation", metavar="KIND", default=None,
        help=f"how token losses are averaged: {', '.join(AGGREGATIONS)} (default: the loss's own, token-mean for "
        "ppo_clip)")
    add("--rollout-loss-scale-length", metavar="N", type=float, default=None,
        help="constant length of seq-mean-token-sum-norm, usually --rollout-max-new-tokens")
    add("--rollout-loss-denominator", metavar="KIND", default=None,
        help=f"tokens (and sequences) that the loss is divided by: {' or '.join(DENOMINATORS)} "
        f"(default {default.loss_denominator})")
    add("--rollout-entropy-coef", metavar="X", type=float, default=None,
        help="coefficient of the entropy bonus (default 0: none)")
    add("--rollout-advantage", metavar="KIND", default=None,
        help=f"advantage: {', '.join(ADVANTAGES)} (default: the one that belongs to the loss, grpo for ppo_clip)")


def _number_or_none(text: str) -> float | str:
    return text if text == "none" else float(text)


def correction_config(values: argparse.Namespace) -> RolloutCorrectionConfig:
    """Preset or YAML, then flags over it."""
    if values.rollout_correction_preset and values.rollout_correction_config:
        raise ValueError(
            "--rollout-correction-preset and --rollout-correction-config both start a configuration; "
            "give one (a YAML file may name a preset under the key `preset`)"
        )
    base = RolloutCorrectionConfig()
    if values.rollout_correction_preset:
        base = RolloutCorrectionConfig.from_preset(values.rollout_correction_preset)
    elif values.rollout_correction_config:
        # A level given as a flag makes the file's threshold count, where its own level says null.
        level = {} if values.rollout_is in (None, "none") else {"rollout_is": values.rollout_is}
        base = RolloutCorrectionConfig.from_yaml(values.rollout_correction_config, **level)
    overrides = {
        name.removeprefix("rollout_") if name in _STRIPPED else name: getattr(values, name)
        for name in _CORRECTION_FLAGS
        if getattr(values, name) is not None
    }
    config = with_overrides(base, overrides)
    if config.rollout_is is None and values.rollout_is_threshold is not None:
        raise ValueError(
            f"--rollout-is-threshold {values.rollout_is_threshold} has no effect without weights; "
            f"add --rollout-is {LEVELS[0]}, or drop it"
        )
    return config


_STRIPPED = tuple(
    f"rollout_{name}"
    for name in ("bypass_mode", "diagnostics_only", "loss", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
                 "loss_aggregation", "loss_scale_length", "loss_denominator", "entropy_coef", "advantage")
)
_CORRECTION_FLAGS = (
    "rollout_is", "rollout_is_mode", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs",
    "rollout_rs_threshold", "rollout_token_veto_threshold", "rollout_opsm_delta", "rollout_min_prob",
    "rollout_seq_logprob_error_threshold",
    "rollout_m2_threshold", "rollout_batch_filter_kl", *_STRIPPED,
)

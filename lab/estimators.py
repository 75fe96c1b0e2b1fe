"""The package's estimators of a policy gradient, one arm each: its presets, weights, rules and losses.

No formula stands here. An arm is a setting of the package, and what it makes of a batch is asked of
`compute_correction`, `policy_loss` and `token_coefficients`. B policies, S responses, T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import LOSS_KINDS, LOSSES
from megatron_rl_corr.config.presets import NO_BOUND
from megatron_rl_corr.config.rules import RULE_LEVELS, RULE_NAMES, RejectionRule
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss

LOWER, UPPER = 0.5, 2.0
"""Bounds of the weights of arms that are no preset: verl's usual cap, and its inverse."""
RULE_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "token_ratio": (0.5, 2.0),
    "seq_sum_ratio": (0.5, 2.0),
    "seq_mean_ratio": (0.9, 1.1),
    "seq_max_ratio": (0.5, 2.0),
    "turn_mean_ratio": (0.9, 1.1),
    "token_k2": (None, 0.24),
    "seq_sum_k2": (None, 0.24),
    "seq_mean_k2": (None, 0.01),
    "seq_max_k2": (None, 0.24),
    "turn_mean_k2": (None, 0.01),
    "token_k3": (None, 0.3),
    "seq_sum_k3": (None, 0.3),
    "seq_mean_k3": (None, 0.01),
    "seq_max_k3": (None, 0.3),
    "turn_mean_k3": (None, 0.01),
    "token_abs_diff": (None, 0.15),
    "seq_sum_abs_diff": (None, 0.3),
    "seq_mean_abs_diff": (None, 0.05),
    "seq_max_abs_diff": (None, 0.15),
    "turn_mean_abs_diff": (None, 0.05),
    "seq_mean_exp_abs": (None, 1.5),
    "token_rollout_prob": (0.02, None),
    "seq_mean_opsm": (None, 0.003),
    "token_binary_kl": (None, 0.05),
    "seq_mean_binary_kl": (None, 0.01),
    "seq_max_binary_kl": (None, 0.05),
    "seq_mean_vaco": (None, 0.04),
    "token_routing": (None, 0.5),
    "seq_mean_routing": (None, 0.25),
}
"""Bounds of each rule, where it is an arm by itself: those that docs and peers name where there are any, else
about what rho in [0.5, 2] is in the rule's measure; the veto too, as 1e-4 would reject nothing here.
"""
BATCH_FILTER_KL = 0.01
DRO_BETA = 0.05

LEFT_OUT: dict[str, str] = {
    "kl_loss_coef": "another objective: the KL to a reference is not an estimate of this gradient",
    "kl_loss_type": "the same",
    "kl_reward_coef": "the same",
    "kl_reward_type": "the same",
    "distill_coef": "another objective: the KL to a teacher",
    "distill_top_k": "the same",
    "sampler_kl_type": "the preset prime_rl has sampler_kl_coef with its default",
    "entropy_coef": "another objective",
    "advantage": "a fixed baseline, E_p[r]: one of the batch's own couples its samples; but otb is an arm",
    "loss_aggregation": "the mean of sums: responses are of one length, so all kinds are that times a number",
    "loss_scale_length": "the same",
    "loss_denominator": "kept tokens: their number couples the samples, and scales the gradient alone",
    "clip_ratio_c": "3 in all presets",
    "sapo_temperature_pos": "1 in all presets",
    "sapo_temperature_neg": "1.05 in all presets",
    "clip_sat_tail": "bounds what updates after a batch's first one add; here each batch has one",
    "diagnostics_only": "the same gradient as none",
}
"""Settings that no arm varies, and why. Every other field of RolloutCorrectionConfig is varied by an arm."""


@dataclass(frozen=True)
class Arm:
    """One estimator: a setting of the package, by all names that it has here.

    Example: Arm(("token_truncate", "preset:decoupled_token_is"), config)
    """

    names: tuple[str, ...]
    config: RolloutCorrectionConfig

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def couples_samples(self) -> bool:
        """True if what a response counts depends on the others of its batch, so that no sum over single
        responses is its expectation.
        """
        config = self.config
        return (
            config.rollout_is_batch_normalize
            or config.rollout_m2_threshold is not None
            or config.rollout_batch_filter_kl is not None
            or config.advantage_by_token
        )


def choices(field: str) -> tuple[Any, ...]:
    """The values that a setting's annotation lists, without None."""
    hint = get_type_hints(RolloutCorrectionConfig)[field]
    listed = [value for part in (hint, *get_args(hint)) for value in get_args(part)]
    return tuple(dict.fromkeys(value for value in listed if isinstance(value, str)))


def _settings() -> Iterator[tuple[str, RolloutCorrectionConfig]]:
    """Every estimator of the package by a name of the lab."""
    yield "none", RolloutCorrectionConfig()
    for level in choices("rollout_is"):
        whole = {"rollout_is": level, "rollout_is_upper": UPPER}
        yield f"{level}_unbounded", RolloutCorrectionConfig(rollout_is=level, rollout_is_upper=NO_BOUND)
        for mode in choices("rollout_is_mode"):
            if mode == "gamma":
                bounds: dict[str, Any] = {"rollout_is": level}
            else:
                bounds = whole | ({} if mode == "truncate" else {"rollout_is_lower": LOWER})
            if mode != "gamma" or level == "sequence":
                yield f"{level}_{mode}", RolloutCorrectionConfig(rollout_is_mode=mode, **bounds)
    for name in RULE_NAMES:
        yield f"rule:{name}", RolloutCorrectionConfig(rollout_rs=(rule_of(name),))
    for loss in LOSSES:
        beta = {"dro_beta": DRO_BETA} if loss == "dro" else {}
        yield f"bypass:{loss}", RolloutCorrectionConfig(bypass_mode=True, **_fixed(loss), **beta)
    yield "batch_filter", RolloutCorrectionConfig(rollout_batch_filter_kl=BATCH_FILTER_KL)
    for name, config in PRESETS.items():
        yield f"preset:{name}", config


def _fixed(loss: str) -> dict[str, Any]:
    """The loss, and what a loss's own defaults would ask a further setting for."""
    return {"loss": loss, "loss_aggregation": "seq-mean-token-sum"}


def rule_of(name: str) -> RejectionRule:
    """The rule of this name with its bounds here."""
    level = next(level for level in RULE_LEVELS if name.startswith(level + "_"))
    return RejectionRule(level, name.removeprefix(level + "_"), *RULE_BOUNDS[name])


@cache
def all_arms() -> dict[str, Arm]:
    """The arms by their first names; settings that do the same are one arm.

    Each has the mean of sums for aggregation. With three policies and one update a batch pi_old is pi_theta,
    so all their losses are `reinforce`; with two, `reinforce` has no pi_old, and so is that of three.
    """
    found: dict[RolloutCorrectionConfig, list[str]] = {}
    for name, config in _settings():
        alike = dataclasses.replace(
            config,
            loss_aggregation="seq-mean-token-sum",
            loss_scale_length=None,
            advantage=config.advantage_kind if config.advantage_by_token else "raw",
            **_loss_of_one_update(config),
        )
        found.setdefault(alike, []).append(name)
    return {names[0]: Arm(tuple(names), config) for config, names in found.items()}


def _loss_of_one_update(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """The plainest loss, and mode, of this gradient."""
    formula = config.kind.formula
    if formula == "reinforce" or not config.bypass_mode:
        return {"loss": "reinforce", "bypass_mode": False, "clip_ratio_low": None, "clip_ratio_high": None}
    alike = LOSS_KINDS[formula].clip == config.kind.clip
    return {"loss": formula} if alike else {}


@dataclass(frozen=True)
class Samples:
    """Responses as a trainer has them: [S, T] each, but for the advantages [S]."""

    train_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    """Of each response [S], or of each token [S, T]."""
    later_turn: Tensor
    """bool [T]: which places are of the second turn."""
    routing: Tensor
    """Share of the token's experts that the sampler alone chose, 0 or 1."""


def corrected(samples: Samples, config: RolloutCorrectionConfig) -> Correction:
    """The package's correction of these responses, as one batch."""
    count, length = samples.train_logprobs.shape
    inputs = {
        "advantages": samples.advantages[:, None].expand(count, length).reshape(-1)
        if samples.advantages.dim() == 1
        else samples.advantages.reshape(-1),
        "routing": samples.routing.reshape(-1),
    }
    return compute_correction(
        samples.train_logprobs.reshape(-1),
        samples.rollout_logprobs.reshape(-1),
        torch.ones(count * length),
        torch.arange(count).repeat_interleave(length),
        num_sequences=count,
        config=config,
        turn_ids=samples.later_turn.long().repeat(count),
        num_turns=2,
        **{name: inputs[name] for name in config.needed_inputs},
    )


def pull_of_tokens(
    samples: Samples, config: RolloutCorrectionConfig, correction: Correction | None = None
) -> Tensor:
    """c such that the step's direction is the mean over the responses of sum_t c_t psi_t: float64 [S, T].

    It is -S times the derivative of the package's loss in log pi_theta: its weight times the advantage for
    most. One update a batch: pi_old is pi_theta, and in bypass mode pi_rollout.

    Args:
        samples: one batch.
        config: its aggregation is the mean over responses of their sums.
        correction: the package's of this batch; None: it is made here.
    """
    if correction is None:
        correction = corrected(samples, config)
    if correction.kept_tokens == 0:  # the package skips such a step: all is rejected, or the batch filtered
        return torch.zeros_like(samples.train_logprobs)
    count, length = samples.train_logprobs.shape
    seq_ids = torch.arange(count).repeat_interleave(length)
    advantages = samples.advantages if samples.advantages.dim() == 2 else samples.advantages[:, None]
    logprobs = samples.train_logprobs.detach().reshape(-1).clone().requires_grad_()
    rollout = samples.rollout_logprobs.reshape(-1)
    losses = policy_loss(
        config.loss,
        logprobs,
        rollout if config.bypass_mode else logprobs.detach(),
        advantages.expand(count, length).reshape(-1),
        correction,
        config,
        seq_ids=seq_ids,
        num_sequences=count,
        rollout_logprobs=rollout,
    )
    total = (losses * token_coefficients(correction, seq_ids, config)).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return gradient.double().view(count, length) * -count

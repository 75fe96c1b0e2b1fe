"""What the correction does: frozen, validated at construction, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval on rho.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.config.checks import check
from megatron_rl_corr.config.losses import DUAL_CLIP, LOSS_KINDS, LossKind
from megatron_rl_corr.config.presets import PRESET_FIELDS
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.config.words import nearest


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """One correction: importance weights, rejection rules, policy loss and how it is averaged.

    None in a setting of the loss means the loss's own value (config_losses.py); read it through `clip`,
    `aggregation` and `advantage_kind`.
    """

    rollout_is: str | None = None
    """Level of the importance weight: token (rho_t), sequence (their product), geometric (their mean in log
    space) or turn (their product over the token's turn); None turns the weights off."""

    rollout_is_mode: str = "truncate"
    """truncate: min(w, upper). clip: to [lower, upper]. mask: 0 outside [lower, upper] (IcePop)."""

    rollout_is_lower: float | None = None
    """Lower bound of the weight; for clip and mask."""

    rollout_is_upper: float | None = None
    """Upper bound of the weight; verl's usual value is 2.0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the global batch's valid tokens."""

    rollout_rs: tuple[RejectionRule, ...] = ()
    """Rejection rules; a token is kept only if all of them keep it."""

    rollout_m2_threshold: float | None = None
    """M2PO: drop the tokens of largest D^2 until the mean of D^2 over the rest is at most this; 0.04 in its
    paper (arXiv:2510.01161)."""

    rollout_batch_filter_kl: float | None = None
    """Skip the update of a step whose train-infer KL (k3) is above this."""

    bypass_mode: bool = False
    """Two policies: pi_rollout stands in for pi_old, which is not computed; the correction is made in the loss,
    of the current policy against pi_rollout, one microbatch at a time."""

    diagnostics_only: bool = False
    """Measure and log everything, change nothing: every weight is 1 and no valid token is masked."""

    loss: str = "ppo_clip"
    """Policy loss, by its name in core/losses."""

    clip_ratio_low: float | None = None
    """The loss clips pi_theta / pi_old at 1 - clip_ratio_low from below (dppo_tv: it bounds their difference)."""

    clip_ratio_high: float | None = None
    """The loss clips pi_theta / pi_old at 1 + clip_ratio_high from above (dppo_tv: it bounds their difference)."""

    clip_ratio_c: float | None = DUAL_CLIP
    """Dual clip: where the advantage is negative, the loss of a token is at most c |A|; None turns it off."""

    loss_aggregation: str | None = None
    """How token losses become one number: token-mean, seq-mean-token-mean, seq-mean-token-sum, or
    seq-mean-token-sum-norm, which divides each sequence's sum by loss_scale_length (Dr.GRPO)."""

    loss_scale_length: float | None = None
    """Constant length of seq-mean-token-sum-norm; usually the longest response allowed."""

    loss_denominator: str = "valid"
    """Tokens (and sequences) that the loss is divided by: valid (before rejection) or kept (after it)."""

    kl_loss_coef: float = 0.0
    """Coefficient of the KL penalty against the reference policy; 0 turns it off."""

    kl_loss_type: str = "k3"
    """Its estimator: k1, k2 or k3 (low variance, clamped to +-10)."""

    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, which is subtracted from the loss; 0 turns it off."""

    advantage: str | None = None
    """grpo: (r - mean) / (std + 1e-6), group_mean: r - mean, rloo: r - mean of the others, over the group's rows
    that were not rejected; raw: r."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
        check(self)

    @property
    def kind(self) -> LossKind:
        """What the loss brings of its own."""
        return LOSS_KINDS[self.loss]

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) of the loss's clip, given or the loss's own."""
        low, high = self.kind.clip or (math.nan, math.nan)
        return (
            low if self.clip_ratio_low is None else self.clip_ratio_low,
            high if self.clip_ratio_high is None else self.clip_ratio_high,
        )

    @property
    def aggregation(self) -> str:
        """loss_aggregation, or the loss's own."""
        return self.loss_aggregation or self.kind.aggregation

    @property
    def advantage_kind(self) -> str:
        """advantage, or the one that belongs to the loss."""
        return self.advantage or self.kind.advantage

    @property
    def changes_gradient(self) -> bool:
        """Whether any weight or rejection acts; without them the correction only measures."""
        acts = self.rollout_is, self.rollout_m2_threshold, self.rollout_batch_filter_kl, self.rollout_rs or None
        return not self.diagnostics_only and any(part is not None for part in acts)

    @classmethod
    def from_preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset of this name; ValueError names the nearest one if there is none."""
        if name not in PRESETS:
            raise ValueError(f"--rollout-correction-preset: unknown preset {name!r}{nearest(name, PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """From our field names, or verl's keys with verl's values (its k1 bounds on 1/rho are translated)."""
        from megatron_rl_corr.config.sources import from_mapping

        return from_mapping(mapping)

    @classmethod
    def from_yaml(cls, path: str, **instead: Any) -> RolloutCorrectionConfig:
        """From a YAML mapping, at the top level or under the key `rollout_correction`.

        Settings given as `instead` stand in for the file's, before it is checked as a whole.
        """
        from megatron_rl_corr.config.sources import from_mapping, read_yaml

        content = read_yaml(path)
        try:
            return from_mapping({**content, **instead})
        except ValueError as error:
            raise ValueError(f"--rollout-correction-config {path}: {error}") from error


PRESETS: dict[str, RolloutCorrectionConfig] = {
    name: RolloutCorrectionConfig(**fields) for name, fields in PRESET_FIELDS.items()
}

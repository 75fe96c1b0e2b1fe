"""What the correction does: frozen, checked when it is made, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval on rho.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_rl_corr.config import notation
from megatron_rl_corr.config.checks import NO_WEIGHTS, check_bounds, nearest, plain
from megatron_rl_corr.config.fields import Between, Positive, option
from megatron_rl_corr.config.kl import KLPenalties
from megatron_rl_corr.config.losses import AGGREGATIONS, DUAL_CLIP, LOSS_KINDS, LossKind, check_names, kind_of
from megatron_rl_corr.config.presets import PRESET_FIELDS
from megatron_rl_corr.config.rules import RejectionRule, rules_help


@dataclass(frozen=True)
class RolloutCorrectionConfig(KLPenalties):
    """Correction: importance weights, rejection rules, policy loss and how it is averaged.

    None in a setting of the loss means the loss's own value (config/losses.py); read it through `clip`, `aggregation`
    and `advantage_kind`. Example: RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0)
    """

    rollout_is: Literal["token", "sequence", "geometric", "turn"] | None = option(None, none="none")
    """Level of the importance weight pi_train / pi_rollout: token (rho_t), sequence (their product), geometric (their
    geometric mean) or turn (their product over the token's turn); none turns the weights off."""

    rollout_is_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Weights out of bounds: truncate makes them min(w, upper), clip moves them into [lower, upper], mask makes them 0
    (IcePop). Where only `rollout_is_threshold` is given, one bound truncates and two mask."""

    rollout_is_lower: float | None = option(None, flag=None)
    """Lower bound of the weight; for clip and mask."""

    rollout_is_upper: float | None = option(None, flag=None)
    """Upper bound of the weight; verl's usual value is 2.0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the global batch: over tokens, sequences or turns, as the level says."""

    rollout_rs: tuple[RejectionRule, ...] = option((), metavar="RULE[,RULE]", more=f"The rules: {rules_help()}.")
    """Rejection rules; a token is kept only if all of them keep it. verl's *_k1 bound 1/rho; none disables
    rejection."""

    rollout_m2_threshold: Annotated[float | None, Positive("0.04 is usual", finite=True)] = option(
        None, metavar="X", none="none"
    )
    """M2PO: drop the tokens of largest D^2 until the mean of D^2 over the rest is at most this; 0.04 in its paper
    (arXiv:2510.01161)."""

    rollout_batch_filter_kl: Annotated[float | None, Positive("use 1e-2, for example", finite=True)] = option(
        None, metavar="X", none="none"
    )
    """Skip the update of a step whose train-infer KL (k3) is above this."""

    bypass_mode: bool = False
    """Two policies: pi_rollout stands in for pi_old, which is not computed; the correction is made in the loss, of the
    current policy against pi_rollout, one microbatch at a time."""

    diagnostics_only: bool = False
    """Measure and log the correction, change nothing: every weight is 1 and no valid token is masked."""

    loss: str = option(
        "ppo_clip", metavar="NAME|FILE.py:NAME",
        more="; ".join(f"{name}: {kind.doc}" for name, kind in LOSS_KINDS.items()) + ".",
    )
    """Policy loss: a name, or FILE.py:NAME or package.module:NAME of your own function of the inputs and these
    settings."""

    clip_ratio_low: float | None = option(None, metavar="X")
    """Clip pi_theta / pi_old from below at 1 - X (dppo_tv: bound their difference); default: the loss's own, 0.2 for
    ppo_clip."""

    clip_ratio_high: float | None = option(None, metavar="X")
    """Clip pi_theta / pi_old from above at 1 + X (dppo_tv: bound their difference); default: the loss's own, 0.2 for
    ppo_clip."""

    clip_ratio_c: float | None = option(DUAL_CLIP, metavar="X", none="none")
    """Dual clip: where the advantage is negative, the loss of a token is at most X times |A|; none turns it off."""

    loss_aggregation: str | None = option(None, choices=AGGREGATIONS)
    """How token losses become one number (default: the loss's own, token-mean for ppo_clip);
    seq-mean-token-sum-norm divides each sequence's sum by `loss_scale_length` (Dr.GRPO)."""

    loss_scale_length: Annotated[float | None, Positive("use the longest response", finite=True)] = option(
        None, metavar="N", none="none"
    )
    """Constant length of seq-mean-token-sum-norm, usually `max_new_tokens`."""

    loss_denominator: Literal["valid", "kept"] = "valid"
    """Tokens (and sequences) that the loss is divided by: valid (before rejection) or kept (after it)."""

    entropy_coef: Annotated[float, Between(0, remedy="0 turns it off", finite=True)] = option(0.0, metavar="X")
    """Coefficient of the entropy bonus, which is subtracted from the loss; 0 turns it off."""

    advantage: str | None = option(None, metavar="NAME|FILE.py:NAME")
    """grpo: (r - mean) / (std + 1e-6), group_mean: r - mean, rloo: r - mean of the others, over the group's samples
    that were not rejected; raw: r; reinforce_plus_plus: (r - mean) / std over the tokens of the global batch,
    reinforce_plus_plus_baseline: the same of r - the group's mean; or FILE.py:NAME or package.module:NAME of your own
    function. Default: the loss's own, grpo for ppo_clip."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
        super().__post_init__()

    def check(self) -> None:
        check_names(self.loss, self.advantage)
        self._check_weights()
        self._check_rules()
        self._check_clip()
        self._check_loss()
        if self.bypass_mode:
            self._check_bypass()

    def _check_weights(self) -> None:
        lower, upper, mode = self.rollout_is_lower, self.rollout_is_upper, self.rollout_is_mode
        if self.rollout_is is None:
            if (lower, upper, self.rollout_is_batch_normalize, mode) != (None, None, False, "truncate"):
                raise ValueError(
                    "`rollout_is_threshold`, `rollout_is_mode` and `rollout_is_batch_normalize` have no effect without "
                    "weights; add `rollout_is` token, sequence or geometric, or drop them"
                )
            return
        if upper is None:
            raise ValueError(f"`rollout_is` {self.rollout_is} needs `rollout_is_threshold`; 2.0 is usual")
        check_bounds("`rollout_is_threshold`", lower, upper, NO_WEIGHTS)
        if mode == "truncate" and lower is not None:
            raise ValueError(
                f"`rollout_is_threshold` lower bound {plain(lower)} has no effect with `rollout_is_mode` truncate; use "
                "`rollout_is_mode` clip or mask, or give the upper bound alone"
            )
        if mode == "clip" and lower is None:
            raise ValueError(
                f"`rollout_is_mode` clip needs both bounds, got only upper {plain(upper)}; give `rollout_is_threshold` "
                "as LOWER_UPPER, for example 0.5_5.0"
            )

    def _check_rules(self) -> None:
        for rule in self.rollout_rs:
            if not isinstance(rule, RejectionRule):
                raise ValueError(
                    f"`rollout_rs` takes RejectionRule objects, got {rule!r}; from_dict takes their names"
                )
        names = [rule.name for rule in self.rollout_rs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"`rollout_rs` names {name} twice; give each rule once, with one pair of bounds")

    def _check_clip(self) -> None:
        kind = self.kind
        for side, limit, bound in (("low", "in (0, 1]", 1.0), ("high", "positive and finite", math.inf)):
            value = getattr(self, f"clip_ratio_{side}")
            if value is not None and kind.clip is None:
                raise ValueError(
                    f"`clip_ratio_{side}` has no effect with `loss` {self.loss}, which does not clip; drop it, or use "
                    "`loss` ppo_clip"
                )
            if value is not None and (not 0 < value <= bound or value == math.inf):
                usual = plain(kind.clip[side == "high"])
                raise ValueError(
                    f"`clip_ratio_{side}` must be {limit}, got {plain(value)}; {usual} is usual for {self.loss}"
                )
        dual = self.clip_ratio_c
        if dual is not None and not 1 < dual < math.inf:
            raise ValueError(f"`clip_ratio_c` must be above 1, got {plain(dual)}; 3 is usual, none turns it off")
        if dual != DUAL_CLIP and not kind.dual_clip:
            raise ValueError(f"`clip_ratio_c` has no effect with `loss` {self.loss}; drop it")

    def _check_loss(self) -> None:
        normed = self.aggregation == "seq-mean-token-sum-norm"
        if normed and self.loss_scale_length is None:
            raise ValueError(
                "`loss_aggregation` seq-mean-token-sum-norm needs `loss_scale_length`; use the longest response, the "
                "value of `max_new_tokens`"
            )
        if not normed and self.loss_scale_length is not None:
            raise ValueError(
                f"`loss_scale_length` has no effect with `loss_aggregation` {self.aggregation}; use "
                "seq-mean-token-sum-norm, or drop it"
            )

    def _check_bypass(self) -> None:
        if self.rollout_is is not None and self.kind.has_ratio:
            raise ValueError(
                f"`rollout_is` {self.rollout_is} in bypass mode would weigh twice: the ratio of `loss` {self.loss} is "
                "pi_theta / pi_rollout already; use `rollout_is` none, or `loss` reinforce"
            )
        whole_batch = {
            "`rollout_is_batch_normalize`": self.rollout_is_batch_normalize,
            "`loss_denominator` kept": self.loss_denominator == "kept",
            "`rollout_m2_threshold`": self.rollout_m2_threshold is not None,
            "`rollout_batch_filter_kl`": self.rollout_batch_filter_kl is not None,
        }
        for setting, given in whole_batch.items():
            if given:
                raise ValueError(
                    f"{setting} needs the whole batch, but bypass mode corrects one microbatch at a time, in the loss; "
                    "drop it, or `bypass_mode`"
                )

    @property
    def kind(self) -> LossKind:
        """What the loss brings of its own."""
        return kind_of(self.loss)

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
        """The preset of this name; ValueError, naming the nearest one, for a name that no preset has."""
        if name not in PRESETS:
            raise ValueError(f"`rollout_correction_preset`: unknown preset {name!r}{nearest(name, PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """From our field names, or a peer's keys with the peer's values (verl's k1 bounds on 1/rho are translated).

        Args:
            mapping: settings; the key `preset` names one to start from.

        Raises:
            ValueError: an unknown key, or what the dataclass refuses.
        """
        ours = [field.name for field in dataclasses.fields(cls)]
        known = [*ours, *notation.KEYS]
        for key in mapping:
            if key not in known:
                raise ValueError(f"unknown key {key!r}{nearest(key, known)}")
        settings = dict(mapping)
        base = cls.from_preset(settings.pop("preset")) if "preset" in settings else cls()
        return base.with_settings(settings)

    @classmethod
    def from_yaml(cls, path: str, **instead: Any) -> RolloutCorrectionConfig:
        """From a YAML mapping, at the top level or under the key `rollout_correction`.

        Args:
            path: the file.
            instead: settings that stand in for the file's, before it is checked as a whole.

        Raises:
            ValueError: as `from_dict`, with the file's name, or the file is no YAML mapping.
            OSError: it can't be read.
        """
        from megatron_rl_corr.config.yaml_file import read_yaml

        content = read_yaml(path)
        try:
            return cls.from_dict({**content, **instead})
        except ValueError as error:
            raise ValueError(f"`rollout_correction_config` {path}: {error}") from error

    def with_settings(self, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """This configuration with these settings (ours or a peer's) replaced; to turn a part off clears its bounds."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return type(self)(**notation.resolve(mapping, fields))


PRESETS: dict[str, RolloutCorrectionConfig] = {
    name: RolloutCorrectionConfig(**fields) for name, fields in PRESET_FIELDS.items()
}

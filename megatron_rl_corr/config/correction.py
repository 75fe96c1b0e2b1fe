"""What the correction does: frozen, checked when it is made, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval on rho.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_rl_corr.config import notation
from megatron_rl_corr.config.checks import NO_WEIGHTS, check_bounds, nearest, plain
from megatron_rl_corr.config.fields import Positive, option
from megatron_rl_corr.config.loss_settings import LossSettings
from megatron_rl_corr.config.presets import PRESET_FIELDS
from megatron_rl_corr.config.rules import RejectionRule, inputs_of, rules_help


@dataclass(frozen=True)
class RolloutCorrectionConfig(LossSettings):
    """Correction: importance weights, rejection rules, policy loss and how it is averaged.

    The settings of the loss are those of LossSettings. Example: RolloutCorrectionConfig(rollout_is="token",
    rollout_is_upper=2.0)
    """

    rollout_is: Literal["token", "sequence", "geometric", "turn"] | None = option(None, none="none")
    """Level of the importance weight pi_train / pi_rollout: token (rho_t), sequence (their product), geometric (their
    geometric mean) or turn (their product over the token's turn); none turns the weights off."""

    rollout_is_mode: Literal["truncate", "clip", "mask", "gamma"] = "truncate"
    """Weights out of bounds: truncate makes them min(w, upper), clip moves them into [lower, upper], mask makes them 0
    (IcePop). Where only `rollout_is_threshold` is given, one bound truncates and two mask. gamma has no bounds: with
    `rollout_is` sequence it makes w^k e^(l (1 - w)) of them, k = 2 and l = 3 where the advantage is not negative, else
    3 and 2 (VESPO, arXiv:2602.10693)."""

    rollout_is_lower: float | None = option(None, flag=None)
    """Lower bound of the weight; for clip and mask."""

    rollout_is_upper: float | None = option(None, flag=None)
    """Upper bound of the weight; verl's usual value is 2.0."""

    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the global batch: over tokens, sequences or turns, as the level says. A
    product's log is clamped to +-340 then, not to +-20, so that a batch of products below e^-20 is not left
    uncorrected."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
        super().__post_init__()

    def check(self) -> None:
        self._check_weights()
        self._check_rules()
        if self.advantage_by_token:
            self._check_token_advantage()
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
        if mode == "gamma":
            self._check_gamma()
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

    def _check_gamma(self) -> None:
        if self.rollout_is != "sequence":
            raise ValueError(
                f"`rollout_is_mode` gamma weighs whole sequences by the product of their ratios, got `rollout_is` "
                f"{self.rollout_is}; use `rollout_is` sequence, or another mode"
            )
        for name in ("rollout_is_lower", "rollout_is_upper"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` {plain(getattr(self, name))} has no effect with `rollout_is_mode` gamma, whose weights "
                    "are at most 1.25 without a bound; drop it, and `rollout_is_threshold`, or use another mode"
                )
        if self.rollout_is_batch_normalize:
            raise ValueError(
                "`rollout_is_batch_normalize` with `rollout_is_mode` gamma: divided by their mean, weights of at most "
                "1.25 would grow without a bound, those of positive and of negative advantages unlike; drop it"
            )
        if self.kl_loss_type == "unbiased" and not self.bypass_mode:
            raise ValueError(
                "`kl_loss_type` unbiased with `rollout_is_mode` gamma: its ratio is corrected by the weights, and "
                "gamma's depend on the advantage's sign; use `kl_loss_type` k3+, or another mode"
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

    def _check_token_advantage(self) -> None:
        kind = self.advantage_kind
        if self.bypass_mode:
            raise ValueError(
                f"`advantage` {kind} needs the distributions of pi_old, of a pass that `bypass_mode` leaves out; drop "
                "that, or use `advantage` group_mean"
            )
        if asker := self.needed_inputs.get("advantages"):
            raise ValueError(
                f"{asker} needs the advantage of a whole response before the correction, and `advantage` {kind} gives "
                "one a token, from the corrected weights; drop one of them"
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
    def needed_inputs(self) -> dict[str, str]:
        """Each input of RULE_INPUTS that the correction needs, and the setting that needs it."""
        found = inputs_of(self.rollout_rs)
        if self.rollout_is_mode == "gamma":
            found.setdefault("advantages", "rollout_is_mode gamma")
        return found

    @property
    def changes_gradient(self) -> bool:
        """Whether any weight or rejection acts; without them the correction only measures."""
        acts = self.rollout_is, self.rollout_m2_threshold, self.rollout_batch_filter_kl, self.rollout_rs or None
        return not self.diagnostics_only and any(part is not None for part in acts)

    @classmethod
    def from_preset(cls, name: str, instead: Mapping[str, Any] | None = None) -> RolloutCorrectionConfig:
        """The preset of this name, with these settings (ours or a peer's) replaced.

        Raises:
            ValueError: a name that no preset has, with the nearest one; or settings that do not go with the preset's,
                with those of it that the error is about.
        """
        if name not in PRESETS:
            raise ValueError(f"`rollout_correction_preset`: unknown preset {name!r}{nearest(name, PRESETS)}")
        try:
            return PRESETS[name].with_settings(instead or {})
        except ValueError as error:
            named = [field for field in PRESET_FIELDS[name] if f"`{field}`" in str(error) and field not in instead]
            if not named:
                raise
            fields = ", ".join(f"`{field}` {plain(PRESET_FIELDS[name][field])}" for field in named)
            raise ValueError(
                f"{error}. {fields} is of `rollout_correction_preset` {name}: leave out what does not go with it, or "
                "the preset"
            ) from error

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
        if "preset" in settings:
            return cls.from_preset(settings.pop("preset"), settings)
        return cls().with_settings(settings)

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

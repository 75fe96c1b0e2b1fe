"""What the correction does: frozen, validated at construction, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval on rho.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
RULE_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("ratio", "k2", "k3")
LOSSES = ("ppo_clip",)
ADVANTAGES = ("grpo", "group_mean")
DENOMINATORS = ("valid", "kept")

NO_RULES = "--rollout-rs none to disable rejection"
NO_WEIGHTS = "--rollout-is none to disable the weights"


@dataclass(frozen=True)
class RejectionRule:
    """Keep a token (level token) or a whole sequence (seq_*) while its divergence lies in [lower, upper].

    divergence `ratio` is bounded on rho: the token's, the product (seq_sum) or the geometric mean (seq_mean)
    of its sequence. `k2` = D^2 / 2 and `k3` = e^D - 1 - D, with D = log rho, take an upper bound only.
    """

    level: str
    divergence: str
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        _one_of("--rollout-rs level", self.level, RULE_LEVELS)
        _one_of("--rollout-rs divergence", self.divergence, DIVERGENCES)
        if self.level == "seq_max" and self.divergence == "ratio":
            raise ValueError(
                "--rollout-rs seq_max_ratio does not exist: a largest ratio sees one direction only; "
                "use seq_max_k2 or seq_max_k3, which see both"
            )
        if self.divergence != "ratio" and self.lower is not None:
            raise ValueError(
                f"--rollout-rs-threshold for {self.name} takes one upper bound, got a lower bound of "
                f"{plain(self.lower)}: k2 and k3 are 0 where the policies agree; leave the lower bound out"
            )
        if self.lower is None and self.upper is None:
            raise ValueError(f"--rollout-rs {self.name} needs a bound; give --rollout-rs-threshold")
        check_bounds(f"--rollout-rs-threshold for {self.name}", self.lower, self.upper, NO_RULES)

    @property
    def name(self) -> str:
        return f"{self.level}_{self.divergence}"


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """One correction: importance weights, rejection rules, policy loss and its denominator."""

    rollout_is: str | None = None
    """Level of the importance weight: token (rho_t), sequence (their product) or geometric (their mean in log
    space); None turns the weights off."""

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

    loss: str = "ppo_clip"
    """Policy loss, by its name in core/losses."""

    clip_ratio_low: float = 0.2
    """The loss clips pi_theta / pi_old at 1 - clip_ratio_low from below."""

    clip_ratio_high: float = 0.2
    """The loss clips pi_theta / pi_old at 1 + clip_ratio_high from above."""

    loss_denominator: str = "valid"
    """Tokens that the loss is divided by: valid (before rejection) or kept (after it)."""

    advantage: str = "grpo"
    """grpo: (r - mean) / (std + 1e-6), group_mean: r - mean, over the group's rows that were not rejected."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
        for rule in self.rollout_rs:
            if not isinstance(rule, RejectionRule):
                raise ValueError(
                    f"rollout_rs takes RejectionRule objects, got {rule!r}; from_dict takes their names"
                )
        if self.rollout_is is not None:
            _one_of("--rollout-is", self.rollout_is, LEVELS, also="none")
        _one_of("--rollout-is-mode", self.rollout_is_mode, MODES)
        _one_of("--rollout-loss", self.loss, LOSSES)
        _one_of("--rollout-loss-denominator", self.loss_denominator, DENOMINATORS)
        _one_of("--rollout-advantage", self.advantage, ADVANTAGES)
        self._check_weights()
        names = [rule.name for rule in self.rollout_rs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"--rollout-rs names {name} twice; give each rule once, with one pair of bounds"
                )
        for flag, value, limit, bound in (
            ("low", self.clip_ratio_low, "in (0, 1)", 1.0),
            ("high", self.clip_ratio_high, "positive", math.inf),
        ):
            if not _is_number(value) or not 0 < value < bound:
                raise ValueError(
                    f"--rollout-clip-ratio-{flag} must be {limit}, got {plain(value)}; 0.2 is usual"
                )

    def _check_weights(self) -> None:
        lower, upper = self.rollout_is_lower, self.rollout_is_upper
        if not isinstance(self.rollout_is_batch_normalize, bool):
            raise ValueError(
                "--rollout-is-batch-normalize must be true or false, "
                f"got {plain(self.rollout_is_batch_normalize)}"
            )
        if self.rollout_is is None:
            settings = (lower, upper, self.rollout_is_batch_normalize, self.rollout_is_mode)
            if settings != (None, None, False, "truncate"):
                raise ValueError(
                    "--rollout-is-threshold, --rollout-is-mode and --rollout-is-batch-normalize have no "
                    "effect without weights; add --rollout-is token, sequence or geometric, or drop them"
                )
            return
        if upper is None:
            raise ValueError(f"--rollout-is {self.rollout_is} needs --rollout-is-threshold; 2.0 is usual")
        check_bounds("--rollout-is-threshold", lower, upper, NO_WEIGHTS)
        if self.rollout_is_mode == "truncate" and lower is not None:
            raise ValueError(
                f"--rollout-is-threshold lower bound {plain(lower)} has no effect with --rollout-is-mode "
                "truncate; use --rollout-is-mode clip or mask, or give the upper bound alone"
            )
        if self.rollout_is_mode != "truncate" and lower is None:
            raise ValueError(
                f"--rollout-is-mode {self.rollout_is_mode} needs both bounds, got only upper {plain(upper)}; "
                "give --rollout-is-threshold as LOWER_UPPER, for example 0.5_5.0"
            )

    @property
    def changes_gradient(self) -> bool:
        """Whether any weight or rejection acts; without them the correction only measures."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    @classmethod
    def from_preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset of this name; ValueError names the nearest one if there is none."""
        if name not in PRESETS:
            raise ValueError(f"--rollout-correction-preset: unknown preset {name!r}{nearest(name, PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """From our field names, or verl's keys with verl's values (its k1 bounds on 1/rho are translated)."""
        from megatron_rl_corr.config_sources import from_mapping

        return from_mapping(mapping)

    @classmethod
    def from_yaml(cls, path: str, **instead: Any) -> RolloutCorrectionConfig:
        """From a YAML mapping, at the top level or under the key `rollout_correction`.

        Settings given as `instead` stand in for the file's, before it is checked as a whole.
        """
        from megatron_rl_corr.config_sources import from_mapping, read_yaml

        content = read_yaml(path)
        try:
            return from_mapping({**content, **instead})
        except ValueError as error:
            raise ValueError(f"--rollout-correction-config {path}: {error}") from error


def check_bounds(flag: str, lower: float | None, upper: float | None, remedy: str) -> None:
    """ValueError unless the given bounds are positive, finite and in order; `remedy` follows "use"."""
    small = "a small one, such as 1e-9, to keep everything below"
    for side, value, use in (("lower", lower, small), ("upper", upper, remedy)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{flag} {side} bound must be a number, got {value!r}; use {use}")
        if not value > 0:
            raise ValueError(f"{flag} {side} bound must be positive, got {plain(value)}; use {use}")
        if value == math.inf:
            raise ValueError(f"{flag} {side} bound must be finite, got inf; use {use}")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(
            f"{flag} lower bound {plain(lower)} is above the upper bound {plain(upper)}; swap them"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def plain(value: Any) -> str:
    """A value as an error shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _one_of(flag: str, value: Any, choices: tuple[str, ...], also: str | None = None) -> None:
    if value not in choices:
        listed = ", ".join(choices + ((also,) if also else ()))
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{flag} must be one of {listed}; got {value!r}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


_GEO_RS = (RejectionRule("seq_mean", "ratio", 1 / 1.001, 1 / 0.999),)
_K3_RS = (RejectionRule("seq_mean", "k3", upper=0.01),)

# verl's names and behaviour; its bounds on 1/rho ("0.999_1.001", "0.5_2.0") stand in rho's own direction.
PRESETS: dict[str, RolloutCorrectionConfig] = {
    "disabled": RolloutCorrectionConfig(),
    "decoupled_token_is": RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0),
    "decoupled_seq_is": RolloutCorrectionConfig(rollout_is="sequence", rollout_is_upper=2.0),
    "decoupled_token_icepop": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_mode="mask", rollout_is_lower=0.5, rollout_is_upper=5.0
    ),
    "decoupled_seq_is_rs": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=(RejectionRule("seq_sum", "ratio", 0.5, 2.0),)
    ),
    "decoupled_geo_rs": RolloutCorrectionConfig(rollout_rs=_GEO_RS),
    "decoupled_geo_rs_seq_tis": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=_GEO_RS
    ),
    "decoupled_geo_rs_token_tis": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=_GEO_RS
    ),
    "decoupled_k3_rs": RolloutCorrectionConfig(rollout_rs=_K3_RS),
    "decoupled_k3_rs_seq_tis": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=_K3_RS
    ),
    "decoupled_k3_rs_token_tis": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=_K3_RS
    ),
}

"""What the correction does: frozen, validated at construction, the same from Python, YAML and flags.

rho = pi_train / pi_rollout everywhere; every bound is one end of a closed interval on rho.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Mapping

import yaml

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
RULE_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
DIVERGENCES = ("ratio", "k2", "k3")
LOSSES = ("ppo_clip",)
ADVANTAGES = ("grpo", "group_mean")
DENOMINATORS = ("valid", "kept")

_NO_RULES = "--rollout-rs none to disable rejection"
_VERL_KEYS = ("rollout_is_threshold", "rollout_rs_threshold", "bypass_mode", "loss_type")


@dataclass(frozen=True)
class RejectionRule:
    """Keep a token (level token) or a whole sequence (seq_*) while its divergence lies in [lower, upper].

    divergence `ratio` is bounded on rho: the token's, the product (seq_sum) or the geometric mean (seq_mean) of
    its sequence. `k2` = D^2 / 2 and `k3` = e^D - 1 - D, with D = log rho, take an upper bound only.
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
                f"--rollout-rs-threshold for {self.name} takes one upper bound, got a lower bound of {self.lower}: "
                "k2 and k3 are 0 where the policies agree; leave the lower bound out"
            )
        if self.lower is None and self.upper is None:
            raise ValueError(f"--rollout-rs {self.name} needs a bound; give --rollout-rs-threshold")
        _check_bounds(f"--rollout-rs-threshold for {self.name}", self.lower, self.upper, _NO_RULES)

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
    """grpo: (r - group mean) / (group std + 1e-6); group_mean: r - group mean. Rejected rows leave the baseline."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_rs", tuple(self.rollout_rs))
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
                raise ValueError(f"--rollout-rs names {name} twice; give each rule once, with one pair of bounds")
        for flag, value in (("low", self.clip_ratio_low), ("high", self.clip_ratio_high)):
            if not (math.isfinite(value) and value > 0) or (flag == "low" and value >= 1):
                limit = "in (0, 1)" if flag == "low" else "positive"
                raise ValueError(f"--rollout-clip-ratio-{flag} must be {limit}, got {value}; 0.2 is usual")

    def _check_weights(self) -> None:
        lower, upper, remedy = self.rollout_is_lower, self.rollout_is_upper, "--rollout-is none to disable the weights"
        if self.rollout_is is None:
            if lower is not None or upper is not None or self.rollout_is_batch_normalize or (
                self.rollout_is_mode != "truncate"
            ):
                raise ValueError(
                    "--rollout-is-threshold, --rollout-is-mode and --rollout-is-batch-normalize have no effect "
                    "without weights; add --rollout-is token, sequence or geometric, or drop them"
                )
            return
        if upper is None:
            raise ValueError(f"--rollout-is {self.rollout_is} needs --rollout-is-threshold; 2.0 is usual")
        if self.rollout_is_mode == "truncate" and lower is not None:
            raise ValueError(
                f"--rollout-is-threshold lower bound {lower} has no effect with --rollout-is-mode truncate; "
                "use --rollout-is-mode clip or mask, or give the upper bound alone"
            )
        if self.rollout_is_mode != "truncate" and lower is None:
            raise ValueError(
                f"--rollout-is-mode {self.rollout_is_mode} needs both bounds, got only upper {upper}; "
                "give --rollout-is-threshold as LOWER_UPPER, for example 0.5_5.0"
            )
        _check_bounds("--rollout-is-threshold", lower, upper, remedy)

    @property
    def changes_gradient(self) -> bool:
        """Whether any weight or rejection acts; without them the correction only measures."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    @classmethod
    def from_preset(cls, name: str) -> RolloutCorrectionConfig:
        """The preset of this name; ValueError names the nearest one if there is none."""
        if name not in PRESETS:
            raise ValueError(f"--rollout-correction-preset: unknown preset {name!r}{_nearest(name, PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """From our field names, or verl's keys with verl's values (its k1 bounds on 1/rho are translated)."""
        fields = {field.name for field in dataclasses.fields(cls)}
        for key in mapping:
            if key not in fields and key not in _VERL_KEYS and key != "preset":
                raise ValueError(f"unknown key {key!r}{_nearest(key, (*fields, *_VERL_KEYS, 'preset'))}")
        return with_overrides(cls(), mapping)

    @classmethod
    def from_yaml(cls, path: str) -> RolloutCorrectionConfig:
        """From a YAML mapping, either at the top level or under the key `rollout_correction`."""
        with open(path, encoding="utf-8") as file:
            try:
                content = yaml.safe_load(file)
            except yaml.YAMLError as error:
                raise ValueError(f"--rollout-correction-config {path} is not YAML: {error}") from error
        if isinstance(content, Mapping) and set(content) == {"rollout_correction"}:
            content = content["rollout_correction"]
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            raise ValueError(
                f"--rollout-correction-config {path} must hold a mapping of settings, got {type(content).__name__}"
            )
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"--rollout-correction-config {path}: {error}") from error


def with_overrides(base: RolloutCorrectionConfig, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """`base` with these fields (ours or verl's) replaced; turning a part off also clears that part's bounds."""
    mapping = dict(mapping)
    if "preset" in mapping:
        base = RolloutCorrectionConfig.from_preset(mapping.pop("preset"))
    changes: dict[str, Any] = {}
    if mapping.pop("bypass_mode", False):
        raise ValueError(
            "bypass_mode: true (two policies, pi_rollout as pi_old) is not supported; "
            "use bypass_mode: false, which recomputes pi_old in Megatron"
        )
    if "loss_type" in mapping:
        changes["loss"] = mapping.pop("loss_type")
    _override_weights(base, mapping, changes)
    _override_rules(mapping, changes)
    changes.update(mapping)
    return dataclasses.replace(base, **changes)


def _override_weights(base: RolloutCorrectionConfig, mapping: dict, changes: dict) -> None:
    level = mapping.pop("rollout_is", base.rollout_is)
    changes["rollout_is"] = level = None if level in (None, "none") else level
    threshold = mapping.pop("rollout_is_threshold", None)
    if level is None:
        if base.rollout_is is not None:
            changes.update(
                rollout_is_mode="truncate", rollout_is_lower=None, rollout_is_upper=None,
                rollout_is_batch_normalize=False,
            )
        if threshold is not None and changes["rollout_is"] is None and base.rollout_is is not None:
            raise ValueError(
                f"--rollout-is-threshold {threshold} has no effect with --rollout-is none; drop one of the two"
            )
        # verl always carries its default threshold beside rollout_is: null; it says nothing there.
        return
    if threshold is not None:
        lower, upper = parse_bounds("--rollout-is-threshold", threshold)
        changes.update(rollout_is_lower=lower, rollout_is_upper=upper)
        changes["rollout_is_mode"] = mapping.pop("rollout_is_mode", "truncate" if lower is None else "mask")
    elif base.rollout_is_upper is None and "rollout_is_upper" not in mapping:
        changes["rollout_is_upper"] = 2.0


def _override_rules(mapping: dict, changes: dict) -> None:
    thresholds = mapping.pop("rollout_rs_threshold", None)
    if "rollout_rs" not in mapping:
        if thresholds is not None:
            raise ValueError(
                f"--rollout-rs-threshold {thresholds} has no effect without --rollout-rs; name the rules it bounds"
            )
        return
    rules = mapping.pop("rollout_rs")
    if rules in (None, "none", "", [], ()):
        changes["rollout_rs"] = ()
    elif isinstance(rules, str):
        changes["rollout_rs"] = parse_rules(rules, thresholds)
    else:
        changes["rollout_rs"] = tuple(
            rule if isinstance(rule, RejectionRule) else RejectionRule(**rule) for rule in rules
        )


def parse_bounds(flag: str, spec: float | str) -> tuple[float | None, float]:
    """A number is an upper bound; "LOWER_UPPER" is both (verl's notation)."""
    if isinstance(spec, bool):
        raise ValueError(f"{flag} must be a number or LOWER_UPPER, got {spec}")
    parts = str(spec).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"{flag} must be a number or LOWER_UPPER such as 0.5_5.0, got {spec!r}")
    lower, upper = (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    return lower, upper


def parse_rules(names: str, thresholds: float | str | None) -> tuple[RejectionRule, ...]:
    """Comma-separated rules with as many thresholds, or one for all; `*_k1` takes verl's bounds on 1/rho."""
    rules = [name.strip() for name in names.split(",") if name.strip()]
    if thresholds is None:
        raise ValueError(f"--rollout-rs {names} needs --rollout-rs-threshold, one bound a rule or one for all")
    specs = [spec.strip() for spec in str(thresholds).split(",") if spec.strip()]
    if len(specs) == 1:
        specs = specs * len(rules)
    if len(specs) != len(rules):
        raise ValueError(
            f"--rollout-rs-threshold gives {len(specs)} bounds for {len(rules)} rules ({names}); "
            "give one for all or one a rule, separated by commas"
        )
    return tuple(_parse_rule(name, spec) for name, spec in zip(rules, specs))


def _parse_rule(name: str, spec: str) -> RejectionRule:
    known = [f"{level}_{div}" for level in RULE_LEVELS for div in (*DIVERGENCES, "k1")
             if not (level == "seq_max" and div in ("ratio", "k1"))]
    if name not in known:
        raise ValueError(f"--rollout-rs: unknown rule {name!r}{_nearest(name, known)}")
    level, divergence = name.rsplit("_", 1)
    flag = f"--rollout-rs-threshold for {name}"
    lower, upper = parse_bounds(flag, spec)
    if divergence in ("k2", "k3"):
        return RejectionRule(level, divergence, lower, upper)
    _check_bounds(flag, lower, upper, _NO_RULES)
    if lower is None:
        lower = 1.0 / upper
    if lower > upper:
        raise ValueError(f"{flag}: one bound means [1/{spec}, {spec}], so it must be at least 1; got {spec}")
    if divergence == "k1":
        lower, upper = 1.0 / upper, 1.0 / lower
    return RejectionRule(level, "ratio", lower, upper)


def _check_bounds(flag: str, lower: float | None, upper: float | None, remedy: str) -> None:
    for side, value in (("lower", lower), ("upper", upper)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            # A lower bound of 0 keeps everything below: it is no bound.
            raise ValueError(f"{flag} {side} bound must be positive, got {_plain(value)}; use {remedy}")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"{flag} lower bound {lower} is above the upper bound {upper}; swap them")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _one_of(flag: str, value: Any, choices: tuple[str, ...], also: str | None = None) -> None:
    if value not in choices:
        listed = ", ".join(choices + ((also,) if also else ()))
        raise ValueError(f"{flag} must be one of {listed}; got {value!r}{_nearest(str(value), choices)}")


def _nearest(name: str, known) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def _rules(names: str, thresholds: str) -> tuple[RejectionRule, ...]:
    return parse_rules(names, thresholds)


# verl's names and behaviour; its geometric and sequence bounds on 1/rho are written in rho's own direction.
PRESETS: dict[str, RolloutCorrectionConfig] = {
    "disabled": RolloutCorrectionConfig(),
    "decoupled_token_is": RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0),
    "decoupled_seq_is": RolloutCorrectionConfig(rollout_is="sequence", rollout_is_upper=2.0),
    "decoupled_token_icepop": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_mode="mask", rollout_is_lower=0.5, rollout_is_upper=5.0
    ),
    "decoupled_seq_is_rs": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=_rules("seq_sum_k1", "0.5_2.0")
    ),
    "decoupled_geo_rs": RolloutCorrectionConfig(rollout_rs=_rules("seq_mean_k1", "0.999_1.001")),
    "decoupled_geo_rs_seq_tis": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=_rules("seq_mean_k1", "0.999_1.001")
    ),
    "decoupled_geo_rs_token_tis": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=_rules("seq_mean_k1", "0.999_1.001")
    ),
    "decoupled_k3_rs": RolloutCorrectionConfig(rollout_rs=_rules("seq_mean_k3", "0.01")),
    "decoupled_k3_rs_seq_tis": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_upper=2.0, rollout_rs=_rules("seq_mean_k3", "0.01")
    ),
    "decoupled_k3_rs_token_tis": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=_rules("seq_mean_k3", "0.01")
    ),
}

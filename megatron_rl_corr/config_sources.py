"""Where a configuration comes from: mappings and YAML with our names or verl's, and flags over them.

A bound is written U or LOWER_UPPER; a rule LEVEL_DIVERGENCE, where verl's divergence k1 bounds 1/rho.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron_rl_corr.config import (
    DIVERGENCES,
    NO_RULES,
    RULE_LEVELS,
    RejectionRule,
    RolloutCorrectionConfig,
    check_bounds,
    nearest,
)

_VERL_KEYS = ("rollout_is_threshold", "rollout_rs_threshold", "bypass_mode", "loss_type")


def from_mapping(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """Defaults, or the preset named under `preset`, with these settings; ValueError for an unknown key."""
    known = [field.name for field in dataclasses.fields(RolloutCorrectionConfig)] + [*_VERL_KEYS, "preset"]
    for key in mapping:
        if key not in known:
            raise ValueError(f"unknown key {key!r}{nearest(key, known)}")
    return with_overrides(RolloutCorrectionConfig(), mapping)


def read_yaml(path: str) -> Mapping[str, Any]:
    """The settings in a file, at the top level or under the key `rollout_correction`; none if it is empty."""
    flag = f"--rollout-correction-config {path}"
    with open(path, encoding="utf-8") as file:
        try:
            # A subclass of SafeLoader: as safe as yaml.safe_load.
            content = yaml.load(file, Loader=_SettingsLoader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{flag} is not YAML: {error}") from error
    if isinstance(content, Mapping) and set(content) == {"rollout_correction"}:
        content = content["rollout_correction"]
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{flag} must hold a mapping of settings, got {type(content).__name__}")
    return content


class _SettingsLoader(yaml.SafeLoader):
    """Numbers as YAML 1.2 writes them: 1.1, PyYAML's, reads 0.5_5 as 0.55 and 1e-4 as text."""


_NUMBER_TAG = "tag:yaml.org,2002:float"
_SettingsLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (_NUMBER_TAG, "tag:yaml.org,2002:int")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SettingsLoader.add_implicit_resolver(
    _NUMBER_TAG,
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"),
    list("-+.0123456789"),
)


def with_overrides(base: RolloutCorrectionConfig, mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """`base` with these fields (ours or verl's) replaced; turning a part off also clears its bounds."""
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
        if "loss" in mapping:
            raise ValueError("loss and loss_type (verl's name) are the same setting; give one of them")
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
        if base.rollout_is is None:
            # verl always carries its default threshold beside rollout_is: null; it says nothing there.
            return
        if threshold is not None:
            raise ValueError(
                f"--rollout-is-threshold {threshold} has no effect with --rollout-is none; drop one of them"
            )
        changes.update(
            rollout_is_mode="truncate", rollout_is_lower=None, rollout_is_upper=None,
            rollout_is_batch_normalize=False,
        )
    elif threshold is not None:
        for name in ("rollout_is_lower", "rollout_is_upper"):
            if name in mapping:
                raise ValueError(f"rollout_is_threshold and {name} both bound the weight; give one of them")
        lower, upper = parse_bounds("--rollout-is-threshold", threshold)
        two_sided = "mask" if base.rollout_is_mode == "truncate" else base.rollout_is_mode
        mode = "truncate" if lower is None else two_sided
        changes.update(rollout_is_lower=lower, rollout_is_upper=upper, rollout_is_mode=mode)
    elif base.rollout_is_upper is None and "rollout_is_upper" not in mapping:
        changes["rollout_is_upper"] = 2.0


def _override_rules(mapping: dict, changes: dict) -> None:
    given, rules = "rollout_rs" in mapping, mapping.pop("rollout_rs", None)
    thresholds = mapping.pop("rollout_rs_threshold", None)
    if isinstance(rules, (list, tuple)) and rules and all(isinstance(rule, str) for rule in rules):
        rules = ",".join(rules)
    if isinstance(rules, str) and rules not in ("", "none"):
        changes["rollout_rs"] = parse_rules(rules, thresholds)
        return
    if thresholds is not None:
        raise ValueError(
            f"--rollout-rs-threshold {thresholds} has no effect without --rollout-rs; "
            "name the rules that it bounds"
        )
    if rules in (None, "", "none"):
        rules = ()
    if not isinstance(rules, (list, tuple)):
        raise ValueError(f"--rollout-rs must name rules, or be none; got {rules!r}")
    if given:
        changes["rollout_rs"] = tuple(_rule_from(rule) for rule in rules)


def _rule_from(rule: Any) -> RejectionRule:
    """A rule as Python or YAML spells it out: {level: token, divergence: ratio, lower: 0.5, upper: 2.0}."""
    if isinstance(rule, RejectionRule):
        return rule
    if not isinstance(rule, Mapping):
        raise ValueError(f"--rollout-rs: a rule is a name or a mapping of its fields, got {rule!r}")
    fields = [field.name for field in dataclasses.fields(RejectionRule)]
    for key in rule:
        if key not in fields:
            raise ValueError(f"--rollout-rs: unknown key {key!r} of a rule{nearest(key, fields)}")
    for key in ("level", "divergence"):
        if key not in rule:
            raise ValueError(f"--rollout-rs: the rule {dict(rule)} lacks {key!r}")
    return RejectionRule(**rule)


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


def parse_rules(
    names: str, thresholds: float | str | Sequence[float | str] | None
) -> tuple[RejectionRule, ...]:
    """Comma-separated rules with as many thresholds, or one for all; `*_k1` takes verl's bounds on 1/rho."""
    rules = [name.strip() for name in names.split(",") if name.strip()]
    if not rules:
        raise ValueError(f"--rollout-rs {names!r} names no rule; use {NO_RULES}")
    if thresholds is None:
        raise ValueError(
            f"--rollout-rs {names} needs --rollout-rs-threshold, one bound a rule or one for all"
        )
    if isinstance(thresholds, (list, tuple)):
        thresholds = ",".join(str(threshold) for threshold in thresholds)
    specs = [spec.strip() for spec in str(thresholds).split(",") if spec.strip()]
    if len(specs) == 1:
        specs = specs * len(rules)
    if len(specs) != len(rules):
        raise ValueError(
            f"--rollout-rs-threshold gives {len(specs)} bounds for {len(rules)} rules ({names}); "
            "give one for all or one a rule, separated by commas"
        )
    return tuple(_parse_rule(name, spec) for name, spec in zip(rules, specs, strict=True))


def _parse_rule(name: str, spec: str) -> RejectionRule:
    known = [
        f"{level}_{kind}" for level in RULE_LEVELS for kind in (*DIVERGENCES, "k1")
        if not (level == "seq_max" and kind in ("ratio", "k1"))
    ]
    if name not in known:
        raise ValueError(f"--rollout-rs: unknown rule {name!r}{nearest(name, known)}")
    level, divergence = name.rsplit("_", 1)
    flag = f"--rollout-rs-threshold for {name}"
    lower, upper = parse_bounds(flag, spec)
    if divergence in ("k2", "k3"):
        return RejectionRule(level, divergence, lower, upper)
    check_bounds(flag, lower, upper, NO_RULES)
    if lower is None:
        lower = 1.0 / upper
    if lower > upper:
        raise ValueError(f"{flag}: one bound means [1/{spec}, {spec}], so it must be at least 1; got {spec}")
    if divergence == "k1":
        lower, upper = 1.0 / upper, 1.0 / lower
    return RejectionRule(level, "ratio", lower, upper)

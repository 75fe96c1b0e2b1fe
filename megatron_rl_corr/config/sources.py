"""Where a configuration comes from: mappings and YAML with our names or a peer's, and flags over them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.dialects import PEER_KEYS, in_our_names
from megatron_rl_corr.config.notation import SHORTHANDS, parse_bounds, parse_rules, with_shorthand
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.config.words import nearest

_THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold")
# Settings that the word none turns off.
_OPTIONAL = ("clip_ratio_c", "rollout_m2_threshold", "rollout_batch_filter_kl", "loss_scale_length")


def from_mapping(mapping: Mapping[str, Any]) -> RolloutCorrectionConfig:
    """Defaults, or the preset named under `preset`, with these settings; ValueError for an unknown key."""
    fields = [field.name for field in dataclasses.fields(RolloutCorrectionConfig)]
    known = [*fields, *_THRESHOLDS, *PEER_KEYS, *SHORTHANDS, "preset"]
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
    """`base` with these settings (ours or a peer's) replaced; turning a part off also clears its bounds."""
    mapping = in_our_names(dict(mapping))
    if "preset" in mapping:
        base = RolloutCorrectionConfig.from_preset(mapping.pop("preset"))
    changes: dict[str, Any] = {}
    _override_weights(base, mapping, changes)
    _override_rules(mapping, changes)
    for key in SHORTHANDS:
        if key in mapping:
            rules = changes.get("rollout_rs", base.rollout_rs)
            changes["rollout_rs"] = with_shorthand(rules, key, mapping.pop(key))
    for key in _OPTIONAL:
        if mapping.get(key) == "none":
            mapping[key] = None
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

"""How a correction is written in YAML and flags, and which fields of RolloutCorrectionConfig that sets.

A bound is U or LOWER_UPPER, a rule LEVEL_DIVERGENCE. verl's divergence k1 is -D: its bounds are on 1/rho,
and are translated to rho.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.config.checks import NO_RULES, check_bounds, check_positive, nearest, plain
from megatron_rl_corr.config.dialects import PEER_KEYS, in_our_names
from megatron_rl_corr.config.fields import Options, option
from megatron_rl_corr.config.problems import Problems, check_each
from megatron_rl_corr.config.rules import DIVERGENCES, RULE_LEVELS, RULE_NAMES, RejectionRule


@dataclass(frozen=True)
class CorrectionSource(Options):
    """Keys and flags that set fields of RolloutCorrectionConfig under a user's name for them."""

    rollout_correction_preset: str | None = option(None, metavar="NAME")
    """Start from a preset; `megatron-rl-corr presets` lists them."""

    rollout_correction_config: str | None = option(None, metavar="YAML")
    """Start from a YAML file of settings (our field names, or a peer's); flags override it."""

    rollout_is_threshold: str | None = option(None, metavar="UPPER|LOWER_UPPER")
    """Closed bounds on the weight; 2.0 is usual, 0.5_5.0 for IcePop."""

    rollout_rs_threshold: str | None = option(None, metavar="BOUNDS[,BOUNDS]")
    """Bounds of the rules, one for all or one a rule: LOWER_UPPER where a rule takes both bounds,
    else one number.
    """

    rollout_token_veto_threshold: str | None = option(None, metavar="X")
    """Drop a sequence if one of its tokens has rho outside [X, 1/X]: another name of the
    rule seq_max_ratio.
    """

    rollout_opsm_delta: str | None = option(None, metavar="X")
    """Drop a sequence of negative advantage whose mean of log pi_rollout - log pi_train is above X: the rule
    seq_mean_opsm (off-policy sequence mask)."""

    rollout_min_prob: str | None = option(None, metavar="P")
    """Drop the tokens that the server sampled with a probability below P: the rule token_rollout_prob."""

    rollout_seq_logprob_error_threshold: str | None = option(None, metavar="X")
    """Drop a sequence whose mean of e^|log-ratio| is above X: another name of the rule seq_mean_exp_abs."""


# verl has no seq_max_k1, and a largest 1/rho would be one-sided: seq_max_ratio is written on rho.
K1_NAMES = ("token_k1", "seq_sum_k1", "seq_mean_k1", "turn_mean_k1")
_BY_NAME = {
    name: (level, name.removeprefix(f"{level}_"))
    for name in RULE_NAMES
    for level in RULE_LEVELS
    if name.startswith(f"{level}_")
}


def parse_bounds(what: str, spec: float | str) -> tuple[float | None, float]:
    """(lower, upper) of a bound in verl's notation: a number is an upper bound, "LOWER_UPPER" both.

    Args:
        what: the setting, in backticks; begins the error.
        spec: 2.0, "2.0" or "0.5_5.0".

    Raises:
        ValueError: it is neither one number nor two.
    """
    if isinstance(spec, bool):
        raise ValueError(f"{what} must be a number or LOWER_UPPER, got {spec}")
    parts = str(spec).strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f"{what} must be a number or LOWER_UPPER such as 0.5_5.0, got {spec!r}")
    lower, upper = (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    return lower, upper


def parse_rules(
    names: str, thresholds: float | str | Sequence[float | str] | None
) -> tuple[RejectionRule, ...]:
    """The rejection rules that names and thresholds stand for; `*_k1` takes verl's bounds on 1/rho.

    Args:
        names: rules, separated by commas: "seq_mean_ratio,token_k3".
        thresholds: as many bounds, separated by commas or in a list, or one for all rules.

    Raises:
        ValueError: an unknown rule, another number of thresholds, or bounds that a rule can't have.
    """
    rules = [name.strip() for name in names.split(",") if name.strip()]
    if not rules:
        raise ValueError(f"`rollout_rs` {names!r} names no rule; use {NO_RULES}")
    if thresholds is None:
        raise ValueError(
            f"`rollout_rs` {names} needs `rollout_rs_threshold`, one bound a rule or one for all"
        )
    if isinstance(thresholds, (list, tuple)):
        thresholds = ",".join(str(threshold) for threshold in thresholds)
    specs = [spec.strip() for spec in str(thresholds).split(",") if spec.strip()]
    if len(specs) == 1:
        specs = specs * len(rules)
    if len(specs) != len(rules):
        raise ValueError(
            f"`rollout_rs_threshold` gives {len(specs)} bounds for {len(rules)} rules ({names}); "
            "give one for all or one a rule, separated by commas"
        )
    return tuple(check_each(lambda pair: _parse_rule(*pair), zip(rules, specs, strict=True)))


def _parse_rule(name: str, spec: str) -> RejectionRule:
    if name not in RULE_NAMES and name not in K1_NAMES:
        raise ValueError(f"`rollout_rs`: unknown rule {name!r}{nearest(name, (*RULE_NAMES, *K1_NAMES))}")
    what = f"`rollout_rs_threshold` for {name}"
    lower, upper = parse_bounds(what, spec)
    level, divergence = _BY_NAME.get(name) or (name.removesuffix("_k1"), "k1")
    bounds = "both" if divergence == "k1" else DIVERGENCES[divergence].bounds
    if bounds == "lower" and lower is None:
        return RejectionRule(level, divergence, lower=upper)
    if bounds != "both":
        return RejectionRule(level, divergence, lower, upper)
    check_bounds(what, lower, upper, NO_RULES)
    if lower is None:
        lower = 1.0 / upper
    if lower > upper:
        raise ValueError(f"{what}: one bound means [1/{spec}, {spec}], so it must be at least 1; got {spec}")
    if divergence == "k1":
        lower, upper = 1.0 / upper, 1.0 / lower
    return RejectionRule(level, "ratio", lower, upper)


def _veto(value: float) -> RejectionRule:
    if value >= 1:
        raise ValueError(
            f"`rollout_token_veto_threshold` {plain(value)} means rho in [{plain(value)}, 1 / "
            f"{plain(value)}], so it must be below 1; 1e-4 is usual"
        )
    return RejectionRule("seq_max", "ratio", value, 1.0 / value)


# A setting of its own for the rules that users know by such a name.
SHORTHANDS = {
    "rollout_token_veto_threshold": ("seq_max_ratio", _veto),
    "rollout_opsm_delta": ("seq_mean_opsm", lambda value: RejectionRule("seq_mean", "opsm", upper=value)),
    "rollout_min_prob": (
        "token_rollout_prob",
        lambda value: RejectionRule("token", "rollout_prob", lower=value),
    ),
    "rollout_seq_logprob_error_threshold": (
        "seq_mean_exp_abs",
        lambda value: RejectionRule("seq_mean", "exp_abs", upper=value),
    ),
}


def with_shorthand(rules: Sequence[RejectionRule], key: str, value: object) -> tuple[RejectionRule, ...]:
    """The rules with the one that `key` stands for added, or replaced, or removed.

    Args:
        rules: those of the configuration so far.
        key: of SHORTHANDS.
        value: its bound; none removes the rule.

    Raises:
        ValueError: the value is not one positive number, or one that the rule can't have.
    """
    name, make = SHORTHANDS[key]
    others = tuple(rule for rule in rules if rule.name != name)
    if value in (None, "none"):
        return others
    what = f"`{key}`"
    lower, number = parse_bounds(what, value)
    if lower is not None:
        raise ValueError(f"{what} takes one number, got {value!r}; 1e-4 is usual")
    check_positive(what, number, "use none to turn it off")
    return (*others, make(number))


KEYS = ("rollout_is_threshold", "rollout_rs_threshold", *PEER_KEYS, *SHORTHANDS, "preset")
"""What a mapping may hold beside the fields of RolloutCorrectionConfig."""


WEIGHTS = (
    "rollout_is",
    "rollout_is_mode",
    "rollout_is_lower",
    "rollout_is_upper",
    "rollout_is_batch_normalize",
)
"""Fields of the weights, which are resolved together."""
RULES = ("rollout_rs",)


def resolve(
    mapping: Mapping[str, Any], base: Mapping[str, Any], problems: Problems, unknown: Set[str] = frozenset()
) -> tuple[dict[str, Any], set[str]]:
    """(the fields of RolloutCorrectionConfig that settings over a configuration make, those
    that have no value).

    Args:
        mapping: settings, under our names or a peer's.
        base: all fields of the configuration that they are laid over.
        problems: gets settings that set one thing twice, that have no effect, or that can't be read.
        unknown: settings whose values were refused before; what depends on them is left out.

    To turn a part off clears its bounds, and to bound a weight anew sets its mode: one bound
    truncates, two mask.
    """
    settings: dict[str, Any] = {}
    named = problems.accepts(lambda: settings.update(in_our_names(dict(mapping))))
    if not named or not unknown.isdisjoint(PEER_KEYS):
        return dict(base), set(base)
    changes: dict[str, Any] = {}
    refused = {name for name in unknown if name in base}
    known = unknown.isdisjoint(("rollout_is_threshold", *WEIGHTS))
    if not known or not problems.accepts(lambda: _resolve_weights(base, settings, changes)):
        refused.update(WEIGHTS)
    known = unknown.isdisjoint(("rollout_rs_threshold", *RULES, *SHORTHANDS))
    if not known or not problems.accepts(lambda: _resolve_rules(settings, changes)):
        refused.update(RULES)
    for key in SHORTHANDS:
        if key in settings:
            rules = changes.get("rollout_rs", base["rollout_rs"])
            value = settings.pop(key)
            added = problems.check(
                key, lambda key=key, value=value, rules=rules: with_shorthand(rules, key, value)
            )
            if added is None:
                refused.update(RULES)
            else:
                changes["rollout_rs"] = added
    return {**base, **changes, **settings}, refused


def _resolve_weights(base: Mapping[str, Any], settings: dict, changes: dict) -> None:
    level = settings.pop("rollout_is", base["rollout_is"])
    changes["rollout_is"] = level = None if level in (None, "none") else level
    threshold = settings.pop("rollout_is_threshold", None)
    if level is None:
        if base["rollout_is"] is None:
            # verl always carries its default threshold beside rollout_is: null; it has no meaning there.
            return
        if threshold is not None:
            raise ValueError(
                f"`rollout_is_threshold` {threshold} has no effect with `rollout_is` none; drop one of them"
            )
        changes.update(
            rollout_is_mode="truncate",
            rollout_is_lower=None,
            rollout_is_upper=None,
            rollout_is_batch_normalize=False,
        )
        return
    if settings.get("rollout_is_mode", base["rollout_is_mode"]) == "gamma" and threshold is None:
        # It has no bounds; those of what it is laid over go.
        changes.update(rollout_is_lower=None, rollout_is_upper=None)
    elif threshold is not None:
        for name in ("rollout_is_lower", "rollout_is_upper"):
            if name in settings:
                raise ValueError(
                    f"`rollout_is_threshold` and `{name}` both bound the weight; give one of them"
                )
        lower, upper = parse_bounds("`rollout_is_threshold`", threshold)
        two_sided = "clip" if base["rollout_is_mode"] == "clip" else "mask"
        mode = "truncate" if lower is None else two_sided
        changes.update(rollout_is_lower=lower, rollout_is_upper=upper, rollout_is_mode=mode)
    elif base["rollout_is_upper"] is None and "rollout_is_upper" not in settings:
        changes["rollout_is_upper"] = 2.0


def _resolve_rules(settings: dict, changes: dict) -> None:
    given, rules = "rollout_rs" in settings, settings.pop("rollout_rs", None)
    thresholds = settings.pop("rollout_rs_threshold", None)
    if isinstance(rules, (list, tuple)) and rules and all(isinstance(rule, str) for rule in rules):
        rules = ",".join(rules)
    if isinstance(rules, str) and rules not in ("", "none"):
        changes["rollout_rs"] = parse_rules(rules, thresholds)
        return
    if thresholds is not None:
        raise ValueError(
            f"`rollout_rs_threshold` {thresholds} has no effect without `rollout_rs`; name the rules that it "
            "bounds"
        )
    if rules in (None, "", "none"):
        rules = ()
    if not isinstance(rules, (list, tuple)):
        raise ValueError(f"`rollout_rs` must name rules, or be none; got {rules!r}")
    if given:
        changes["rollout_rs"] = tuple(check_each(_rule_from, rules))


def _rule_from(rule: Any) -> RejectionRule:
    """A rule as Python or YAML spells it out: {level: token, divergence: ratio, lower: 0.5, upper: 2.0}."""
    if isinstance(rule, RejectionRule):
        return rule
    if not isinstance(rule, Mapping):
        raise ValueError(f"`rollout_rs`: a rule is a name or a mapping of its fields, got {rule!r}")
    fields = [field.name for field in dataclasses.fields(RejectionRule)]
    for key in rule:
        if key not in fields:
            raise ValueError(f"`rollout_rs`: unknown key {key!r} of a rule{nearest(key, fields)}")
    for key in ("level", "divergence"):
        if key not in rule:
            raise ValueError(f"`rollout_rs`: the rule {dict(rule)} lacks {key!r}")
    return RejectionRule(**rule)

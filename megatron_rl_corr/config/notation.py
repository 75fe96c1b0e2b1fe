"""How bounds and rules are written: a bound is U or LOWER_UPPER, a rule LEVEL_DIVERGENCE.

verl's divergence k1 is -D: its bounds are on 1/rho, and are translated to rho.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl_corr.config.rules import DIVERGENCES, RULE_LEVELS, RULE_NAMES, RejectionRule
from megatron_rl_corr.config.words import NO_RULES, check_bounds, check_positive, nearest, plain

# verl has no seq_max_k1, and a largest 1/rho would be one-sided: seq_max_ratio is written on rho.
K1_NAMES = ("token_k1", "seq_sum_k1", "seq_mean_k1", "turn_mean_k1")
_BY_NAME = {name: (level, name.removeprefix(f"{level}_")) for name in RULE_NAMES
            for level in RULE_LEVELS if name.startswith(f"{level}_")}


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
    if name not in RULE_NAMES and name not in K1_NAMES:
        raise ValueError(f"--rollout-rs: unknown rule {name!r}{nearest(name, (*RULE_NAMES, *K1_NAMES))}")
    flag = f"--rollout-rs-threshold for {name}"
    lower, upper = parse_bounds(flag, spec)
    level, divergence = _BY_NAME.get(name) or (name.removesuffix("_k1"), "k1")
    bounds = "both" if divergence == "k1" else DIVERGENCES[divergence].bounds
    if bounds == "lower" and lower is None:
        return RejectionRule(level, divergence, lower=upper)
    if bounds != "both":
        return RejectionRule(level, divergence, lower, upper)
    check_bounds(flag, lower, upper, NO_RULES)
    if lower is None:
        lower = 1.0 / upper
    if lower > upper:
        raise ValueError(f"{flag}: one bound means [1/{spec}, {spec}], so it must be at least 1; got {spec}")
    if divergence == "k1":
        lower, upper = 1.0 / upper, 1.0 / lower
    return RejectionRule(level, "ratio", lower, upper)


def _veto(value: float) -> RejectionRule:
    if value >= 1:
        raise ValueError(
            f"--rollout-token-veto-threshold {plain(value)} means rho in [{plain(value)}, 1 / {plain(value)}], so it "
            "must be below 1; 1e-4 is usual"
        )
    return RejectionRule("seq_max", "ratio", value, 1.0 / value)


# A setting of its own for the rules that users know by such a name.
SHORTHANDS = {
    "rollout_token_veto_threshold": ("seq_max_ratio", _veto),
    "rollout_opsm_delta": ("seq_mean_opsm", lambda value: RejectionRule("seq_mean", "opsm", upper=value)),
    "rollout_min_prob": ("token_rollout_prob", lambda value: RejectionRule("token", "rollout_prob", lower=value)),
    "rollout_seq_logprob_error_threshold": (
        "seq_mean_exp_abs", lambda value: RejectionRule("seq_mean", "exp_abs", upper=value)
    ),
}


def with_shorthand(rules: Sequence[RejectionRule], key: str, value: object) -> tuple[RejectionRule, ...]:
    """The rules with the one that `key` stands for added, or replaced, or with the value none removed."""
    name, make = SHORTHANDS[key]
    others = tuple(rule for rule in rules if rule.name != name)
    if value in (None, "none"):
        return others
    flag = f"--{key.replace('_', '-')}"
    lower, number = parse_bounds(flag, value)
    if lower is not None:
        raise ValueError(f"{flag} takes one number, got {value!r}; 1e-4 is usual")
    check_positive(flag, number, "use none to turn it off")
    return (*others, make(number))

"""Rejection rules: one row each in DIVERGENCES. Checks, flags, help, docs and core/rejection.py
all read the rows.

T tokens. D = log pi_train - log pi_rollout of a token, rho = e^D.

To add a rule, add a row to DIVERGENCES; if it needs a tensor beside the log-probs, add that to
RULE_INPUTS as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl_corr.config.checks import NO_RULES, check_bounds, one_of, plain

if TYPE_CHECKING:
    from torch import Tensor

RULE_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max", "turn_mean")
"""What is tested: each token's value, its sum or mean over the sequence, every value of the sequence (one
outside rejects all), or its mean over the token's turn.
"""


@dataclass(frozen=True)
class RuleInput:
    """A tensor [T] that a rule needs beside the log-probs; a keyword of compute_correction by its name."""

    doc: str
    """What it holds; errors and docs show it."""

    of_batch: Callable[[Any], Tensor] | None = None
    """Makes it [T] from the batch (mcore/batch/rollout_batch.py); None only for those that mcore/loss.py
    knows: advantages and routing.
    """

    in_bypass: bool = False
    """Whether bypass mode, which corrects inside the loss, has it too."""

    setting: tuple[str, str] | None = None
    """An option of RunConfig and the value that it must have for the trainer to have this input."""


RULE_INPUTS: dict[str, RuleInput] = {
    "advantages": RuleInput("the advantage of each token's sequence", in_bypass=True),
    "routing": RuleInput(
        "the share of each token's experts that the server chose and Megatron would not",
        setting=("router_replay", "R3"),
    ),
}


@dataclass(frozen=True)
class Divergence:
    """What a rejection rule measures, where it may be measured, and how it is bounded.

    Example: Divergence("e^D - 1 - D", lambda ratios: ratios.k3) is k3.
    """

    doc: str
    """Formula and meaning, for help and docs."""

    value: Callable[[Any], Tensor]
    """Its value for each token [T], from core/ratios.TokenRatios; must be 0 where all of that is 0, which
    is what it holds outside the valid tokens.
    """

    levels: tuple[str, ...] = RULE_LEVELS

    bounds: str = "upper"
    """both, upper or lower: which bounds of the closed interval it takes."""

    one_bound: str = ""
    """Why it takes no other bound; ends the error about it."""

    scale: Callable[[float], float] = float
    """Maps a bound as users write it to one on `value`: log where `value` is a logarithm."""

    check: Callable[[RejectionRule], str | None] = lambda rule: None
    """What is wrong with the bounds of a rule, or None; follows "`rollout_rs_threshold` for NAME"."""

    needs: str | None = None
    """The input of RULE_INPUTS that it needs."""

    spares: str | None = None
    """An input: a sequence in which its sum is not negative is kept, whatever the value. Levels
    seq_sum, seq_mean.
    """

    drops: Callable[[Any], Tensor] | None = None
    """Which tokens of a sequence out of bounds are dropped, bool [T]; None: all. The others stay, and so
    does the sequence in its group's baseline. One level, seq_sum, seq_mean or seq_max, and one row at
    most: the kept length of a sequence is summed for one such rule.
    """


def _ratio_bounds(rule: RejectionRule) -> str | None:
    if rule.level == "seq_max" and ((rule.lower or 0) > 1 or (rule.upper or 2) < 1):
        return (
            f"must hold 1 between its bounds, got {plain(rule.lower)} and {plain(rule.upper)}: every token's "
            "ratio must be inside, and those of agreeing policies are 1; use 1e-4_1e4, for example"
        )
    return None


def _probability_bounds(rule: RejectionRule) -> str | None:
    if rule.level != "seq_sum" and rule.upper >= 1:
        return (
            f"must be below 1, got {plain(rule.upper)}: a difference of probabilities is never above it; use "
            "0.2, for example"
        )
    return None


def _at_least_one(rule: RejectionRule) -> str | None:
    if rule.upper < 1:
        return f"must be at least 1, got {plain(rule.upper)}: e^|D| is never below 1; NeMo-RL uses 1.5"
    return None


def _below_one(what: str, usual: str) -> Callable[[RejectionRule], str | None]:
    def check(rule: RejectionRule) -> str | None:
        bound = rule.lower if rule.upper is None else rule.upper
        return f"must be a {what} below 1, got {plain(bound)}; {usual}" if bound >= 1 else None

    return check


_ZERO = "it is 0 where the policies agree"

DIVERGENCES: dict[str, Divergence] = {
    "ratio": Divergence(
        "rho: a token's ratio; the product (seq_sum) or geometric mean (seq_mean, turn_mean) of a "
        "sequence's or turn's; seq_max asks it of every token (the veto)",
        lambda ratios: ratios.log_ratio,
        bounds="both",
        scale=math.log,
        check=_ratio_bounds,
    ),
    "k2": Divergence("D^2 / 2", lambda ratios: ratios.log_ratio.square() / 2, one_bound=_ZERO),
    "k3": Divergence("e^D - 1 - D", lambda ratios: ratios.k3, one_bound=_ZERO),
    "abs_diff": Divergence(
        "|pi_train - pi_rollout|",
        lambda ratios: ratios.prob_diff.abs(),
        one_bound=_ZERO,
        check=_probability_bounds,
    ),
    "exp_abs": Divergence(
        "e^|D|, at least 1 (NeMo-RL's sequence gate)",
        lambda ratios: ratios.exp_abs_less_one,
        levels=("seq_mean",),
        one_bound="it is 1 where the policies agree",
        scale=lambda bound: bound - 1,
        check=_at_least_one,
    ),
    "rollout_prob": Divergence(
        "pi_rollout, the probability that the server sampled the token with",
        lambda ratios: ratios.rollout_logprobs,
        levels=("token",),
        bounds="lower",
        one_bound="it drops the tokens that the server found improbable",
        scale=math.log,
        check=_below_one("probability", "1e-4 is usual"),
    ),
    "opsm": Divergence(
        "-D: rejects a sequence whose mean is above the bound and whose advantage is negative (off-policy "
        "sequence mask, DeepSeek-V3.2, arXiv:2512.02556)",
        lambda ratios: -ratios.log_ratio,
        levels=("seq_mean",),
        needs="advantages",
        spares="advantages",
        one_bound="it rejects sequences that the trained policy finds less probable",
    ),
    "binary_kl": Divergence(
        "mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)) with mu = pi_rollout, p = pi_train: KL(mu || p) "
        "of the choice between this token and any other, at most that over all tokens (DPPO, "
        "arXiv:2602.04879)",
        lambda ratios: ratios.binary_kl,
        levels=("token", "seq_mean", "seq_max"),
        one_bound=_ZERO,
    ),
    "vaco": Divergence(
        "|rho - 1|: in a sequence whose mean is above the bound, drops the tokens that the update moves "
        "further from rho = 1, those of A D > 0; the others stay (VACO, arXiv:2603.01365)",
        lambda ratios: ratios.rho_less_one.abs(),
        levels=("seq_mean",),
        needs="advantages",
        one_bound=_ZERO,
        drops=lambda ratios: ratios.inputs["advantages"] * ratios.log_ratio > 0,
    ),
    "routing": Divergence(
        "share of the token's experts, over all layers, that the server chose and Megatron would not; with "
        "`router_replay` R3",
        lambda ratios: ratios.inputs["routing"],
        levels=("token", "seq_mean"),
        needs="routing",
        one_bound="it is 0 where both sides route alike",
        check=_below_one("share", "use 0.5, for example"),
    ),
}
RULE_NAMES = tuple(f"{level}_{name}" for name, row in DIVERGENCES.items() for level in row.levels)


@dataclass(frozen=True)
class RejectionRule:
    """Keeps what has its divergence in the closed interval [lower, upper]: a token, a turn or
    a whole sequence.

    Example: RejectionRule("seq_mean", "ratio", 0.9, 1.1) rejects a sequence whose geometric mean
    of rho is outside.

    Raises:
        ValueError: an unknown level or divergence, a level that the divergence lacks, or bounds
            that cannot stand.
    """

    level: str
    divergence: str
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        one_of("`rollout_rs` level", self.level, RULE_LEVELS)
        one_of("`rollout_rs` divergence", self.divergence, DIVERGENCES)
        if self.level not in self.row.levels:
            levels = " or ".join(f"{level}_{self.divergence}" for level in self.row.levels)
            raise ValueError(f"`rollout_rs` {self.name} does not exist; use {levels}")
        flag = f"`rollout_rs_threshold` for {self.name}"
        refused = {"upper": ("lower", self.lower), "lower": ("upper", self.upper), "both": ("", None)}
        side, bound = refused[self.row.bounds]
        if bound is not None:
            raise ValueError(
                f"{flag} takes one {self.row.bounds} bound, got {'an' if side == 'upper' else 'a'} {side} "
                f"bound of {plain(bound)}: {self.row.one_bound}; leave the {side} bound out"
            )
        if self.lower is None and self.upper is None:
            raise ValueError(f"`rollout_rs` {self.name} needs a bound; give `rollout_rs_threshold`")
        check_bounds(flag, self.lower, self.upper, NO_RULES)
        wrong = self.row.check(self)
        if wrong is not None:
            raise ValueError(f"{flag} {wrong}")

    @property
    def name(self) -> str:
        """As flags and YAML write it: seq_mean_ratio."""
        return f"{self.level}_{self.divergence}"

    @property
    def row(self) -> Divergence:
        """What it measures."""
        return DIVERGENCES[self.divergence]


def inputs_of(rules: Iterable[RejectionRule]) -> dict[str, str]:
    """Each input of RULE_INPUTS that the rules need, and the name of the first rule that needs it."""
    found: dict[str, str] = {}
    for rule in rules:
        for needed in (rule.row.needs, rule.row.spares):
            if needed is not None:
                found.setdefault(needed, rule.name)
    return found


def check_trainer_inputs(
    rules: Iterable[RejectionRule], setting_of: Callable[[str], Any], *, bypass_mode: bool
) -> None:
    """Refuse rules whose inputs a run of the launcher would lack.

    Args:
        rules: of the correction.
        setting_of: gives the value of an option of RunConfig by its name.
        bypass_mode: of the correction.

    Raises:
        ValueError: a rule's input needs another value of an option, or is not there in bypass mode.
    """
    for name, rule in inputs_of(rules).items():
        given = RULE_INPUTS[name]
        lacks = given.setting is not None and setting_of(given.setting[0]) != given.setting[1]
        if lacks or (bypass_mode and not given.in_bypass):
            needs = "`{}` {}".format(*given.setting) if given.setting else "old log-probs"
            raise ValueError(
                f"`rollout_rs` {rule} looks at {given.doc}, which the pass for old log-probs gives; it needs "
                f"{needs}, and not bypass mode"
            )


def rules_help() -> str:
    """All rules in one line, for `rollout_rs`: levels, name and formula of each row."""
    shown = []
    for name, row in DIVERGENCES.items():
        levels = "{" + ",".join(row.levels) + "}" if len(row.levels) > 1 else row.levels[0]
        shown.append(f"{levels}_{name} ({row.bounds} bound{'s' * (row.bounds == 'both')}): {row.doc}")
    return "; ".join(shown)

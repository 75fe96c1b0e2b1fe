"""Rejection rules: which quantity, over what, inside which closed interval.

D = log pi_train - log pi_rollout of a token, rho = e^D.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.words import NO_RULES, check_bounds, one_of, plain

RULE_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max", "turn_mean")
# Which levels a divergence has, and which of its two bounds.
DIVERGENCE_LEVELS: dict[str, tuple[str, ...]] = {
    "ratio": RULE_LEVELS,
    "k2": RULE_LEVELS,
    "k3": RULE_LEVELS,
    "abs_diff": RULE_LEVELS,
    "exp_abs": ("seq_mean",),
    "rollout_prob": ("token",),
    "opsm": ("seq_mean",),
    "routing": ("token", "seq_mean"),
}
DIVERGENCES = tuple(DIVERGENCE_LEVELS)
ONE_BOUND = {
    "k2": "it is 0 where the policies agree",
    "k3": "it is 0 where the policies agree",
    "abs_diff": "it is 0 where the policies agree",
    "exp_abs": "it is 1 where the policies agree",
    "opsm": "it rejects sequences that the trained policy finds less probable",
    "routing": "it is 0 where both sides route alike",
}
RULE_NAMES = tuple(f"{level}_{kind}" for kind, levels in DIVERGENCE_LEVELS.items() for level in levels)


@dataclass(frozen=True)
class RejectionRule:
    """Keep what has its divergence in [lower, upper]: a token, a turn (turn_mean) or a sequence (seq_*).

    ratio: rho of the token, their product (seq_sum), their geometric mean (seq_mean, turn_mean); seq_max keeps a
        sequence only if every token's rho is inside (the veto).
    k2 = D^2 / 2, k3 = e^D - 1 - D, abs_diff = |pi_train - pi_rollout|: upper bound only.
    exp_abs = e^|D|, its mean over the sequence (NeMo-RL's sequence gate): upper bound only, at least 1.
    rollout_prob = pi_rollout of the token: lower bound only.
    opsm = -D: a sequence goes if its mean is above the upper bound and its advantage is negative
        (DeepSeek-V3.2, arXiv:2512.02556, off-policy sequence masking).
    routing = share of the token's experts, over all layers, that the server chose and Megatron would not: upper bound
        only, with --router-replay R3.
    """

    level: str
    divergence: str
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        one_of("--rollout-rs level", self.level, RULE_LEVELS)
        one_of("--rollout-rs divergence", self.divergence, DIVERGENCES)
        if self.level not in DIVERGENCE_LEVELS[self.divergence]:
            levels = " or ".join(f"{level}_{self.divergence}" for level in DIVERGENCE_LEVELS[self.divergence])
            raise ValueError(f"--rollout-rs {self.name} does not exist; use {levels}")
        flag = f"--rollout-rs-threshold for {self.name}"
        if self.divergence in ONE_BOUND and self.lower is not None:
            raise ValueError(
                f"{flag} takes one upper bound, got a lower bound of {plain(self.lower)}: "
                f"{ONE_BOUND[self.divergence]}; leave the lower bound out"
            )
        if self.divergence == "rollout_prob" and self.upper is not None:
            raise ValueError(
                f"{flag} takes one lower bound, got an upper bound of {plain(self.upper)}: it drops the tokens that "
                "the server found improbable; leave the upper bound out"
            )
        if self.lower is None and self.upper is None:
            raise ValueError(f"--rollout-rs {self.name} needs a bound; give --rollout-rs-threshold")
        check_bounds(flag, self.lower, self.upper, NO_RULES)
        self._check_range(flag)

    def _check_range(self, flag: str) -> None:
        if self.name == "seq_max_ratio" and ((self.lower or 0) > 1 or (self.upper or 2) < 1):
            raise ValueError(
                f"{flag} must hold 1 between its bounds, got {plain(self.lower)} and {plain(self.upper)}: every "
                "token's ratio must be inside, and those of agreeing policies are 1; use 1e-4_1e4, for example"
            )
        if self.divergence == "exp_abs" and self.upper < 1:
            raise ValueError(
                f"{flag} must be at least 1, got {plain(self.upper)}: e^|D| is never below 1; NeMo-RL uses 1.5"
            )
        if self.divergence == "routing" and self.upper >= 1:
            raise ValueError(f"{flag} must be a share below 1, got {plain(self.upper)}; use 0.5, for example")
        if self.divergence == "rollout_prob" and self.lower >= 1:
            raise ValueError(f"{flag} must be a probability below 1, got {plain(self.lower)}; 1e-4 is usual")
        if self.divergence == "abs_diff" and self.level != "seq_sum" and self.upper >= 1:
            raise ValueError(
                f"{flag} must be below 1, got {plain(self.upper)}: a difference of probabilities is never above it; "
                "use 0.2, for example"
            )

    @property
    def name(self) -> str:
        return f"{self.level}_{self.divergence}"

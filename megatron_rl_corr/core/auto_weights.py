"""Which importance weights a batch gets where the run chooses them by what it measured on the batches before.

The rule, for updates of n sequences:

    sequence    min(w, c)     while ESS / n of the products w is at least 0.3
    token       min(rho, c)   below that, while the variance of rho is at most 1
    hold        min(w, 2)     else: hardly a weight is left, so that the step is nearly none
    c           max(2, sqrt(n) / 4)

A level that was left is taken again at ESS / n of 0.5, at a variance of 0.5. docs/explanation/laboratory.md
measures it; caps that grow with sqrt(n) are Ionides's (2008, Truncated importance sampling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.metric_spec import MetricSpec, in_group

Level = Literal["hold", "token", "sequence"]
LEVELS: tuple[Level, ...] = ("hold", "token", "sequence")
"""By their numbers in auto/level."""
FEWEST, ENOUGH = 0.3, 0.5
"""ESS / n: sequence weights are left below the first, and taken again from the second on."""
WIDEST, NARROW = 1.0, 0.5
"""Variance of rho: token weights are left above the first, and taken again up to the second."""
LEAST_CAP = 2.0


@dataclass(frozen=True)
class AutoWeights:
    """The weights of the next batch. Example: AutoWeights(1024).after(ess=0.8, variance=0.01)."""

    sequences: int
    """n, of one update."""
    level: Level = "token"

    @property
    def cap(self) -> float:
        """Upper bound of the weights."""
        return LEAST_CAP if self.level == "hold" else max(LEAST_CAP, math.sqrt(self.sequences) / 4)

    def after(self, ess: float, variance: float) -> AutoWeights:
        """The weights for the batch behind one of which this was measured.

        Args:
            ess: ESS / n of the products of its sequences' ratios, in [0, 1]; NaN counts as 0.
            variance: mean(rho^2) - 1 of its tokens; NaN counts as too large.
        """
        enough = FEWEST if self.level == "sequence" else ENOUGH
        widest = NARROW if self.level == "hold" else WIDEST
        if ess >= enough:
            level: Level = "sequence"
        elif variance <= widest:
            level = "token"
        else:
            level = "hold"
        return replace(self, level=level)

    def corrected(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """The correction with these weights."""
        level = "token" if self.level == "token" else "sequence"
        return replace(config, rollout_is=level, rollout_is_upper=self.cap)

    def numbers(self, ess: float, variance: float) -> dict[str, float]:
        """What is logged of a batch with these weights, of which this was measured."""
        return {
            "auto/level": LEVELS.index(self.level),
            "auto/upper": self.cap,
            "auto/ess": ess,
            "auto/variance": variance,
        }

    def __str__(self) -> str:
        if self.level == "hold":
            return "nearly no step (sequence weights, at most 2): no weights of these samples are worth more"
        return f"{self.level} weights, at most {self.cap:.3g}"


METRICS = in_group(
    "Importance weights",
    MetricSpec(
        "auto/level",
        "weights of the batch: 2 sequence, 1 token, 0 nearly no step",
        only_with="--rollout-correction auto",
    ),
    MetricSpec(
        "auto/upper",
        "upper bound of these weights",
        "max(2, sqrt(n) / 4), n sequences of an update",
        only_with="--rollout-correction auto",
    ),
    MetricSpec(
        "auto/ess",
        "what the next batch's weights follow from: effective share of the sequences",
        "ESS / n of the products of their ratios",
        only_with="--rollout-correction auto",
    ),
    MetricSpec(
        "auto/variance",
        "what the next batch's weights follow from: variance of the tokens' ratios",
        "mean(rho^2) - 1",
        only_with="--rollout-correction auto",
    ),
)

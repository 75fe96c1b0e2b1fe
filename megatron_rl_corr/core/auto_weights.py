"""Which importance weights a batch gets where the run chooses them by what it measured on the batch before.

The rule, for updates of n sequences with products w of their tokens' ratios rho:

    sequence    min(w, c)     where ESS / n of w is at least 0.5, and the mean of w in 1/2 to 2
    token       min(rho, c)   else
    c           max(2, sqrt(n) / 4)

They are taken from ESS / n of 0.8 on, and left below 0.5. docs/explanation/laboratory.md measures the
rule; caps that grow with sqrt(n) are Ionides's (2008, Truncated importance sampling).

Advantages without a baseline get one: raw becomes group_mean, of groups of 1 batch_mean. A baseline b that is
off by much adds E_mu[w psi b] to the gradient, which is 0 for w = rho, but not for weights that a bound cuts,
and it pulls the policy one way for as long as the mismatch lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.metric_spec import MetricSpec, in_group

Level = Literal["token", "sequence"]
LEVELS: tuple[Level, ...] = ("token", "sequence")
"""By their numbers in auto/level."""
FEWEST, ENOUGH = 0.5, 0.8
"""ESS / n: sequence weights are left below the first, and taken again from the second on."""
FURTHEST_MEAN = 2.0
"""E_mu[w] is 1, and the ESS does not see a factor that all w have: where all log-probs are off alike, or
where products are beyond what their clamp tells apart.
"""
LEAST_CAP = 2.0


@dataclass(frozen=True)
class MeasuredMismatch:
    """What the rule needs of a batch, over all its valid tokens, also those that rules reject.

    Example: MeasuredMismatch(ess=0.98, mean_product=1.01)
    """

    ess: float = math.nan
    """ESS / n of the products; NaN where there is no sequence."""
    mean_product: float = 1.0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> MeasuredMismatch:
        """From a batch's metrics by their logged names.

        mean(w)^2 = ESS / n x mean(w^2).

        Raises:
            KeyError: the metrics are of no batch's first update.
        """
        ess = numbers["rollout_corr/ess_sequences"]
        squares = 1 + numbers["rollout_corr/chi2_seq"]
        return cls(ess, math.sqrt(max(0.0, ess * squares)))


@dataclass(frozen=True)
class AutoWeights:
    """The weights of the next batch. Example: AutoWeights(1024).after(MeasuredMismatch(ess=0.8))."""

    sequences: int
    """n, of one update."""
    level: Level = "token"

    @property
    def cap(self) -> float:
        """Upper bound of the weights."""
        return max(LEAST_CAP, math.sqrt(self.sequences) / 4)

    def after(self, found: MeasuredMismatch) -> AutoWeights:
        """The weights for the batch behind one of which this was measured; the same where it has no
        sequence.
        """
        if math.isnan(found.ess):
            return self
        enough = found.ess >= (FEWEST if self.level == "sequence" else ENOUGH)
        near_1 = 1 / FURTHEST_MEAN <= found.mean_product <= FURTHEST_MEAN
        return replace(self, level="sequence" if enough and near_1 else "token")

    def corrected(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """The correction with these weights."""
        return replace(config, rollout_is=self.level, rollout_is_upper=self.cap)

    @property
    def numbers(self) -> dict[str, float]:
        """What is logged of a batch with these weights."""
        return {"auto/level": LEVELS.index(self.level), "auto/upper": self.cap}

    def __str__(self) -> str:
        return f"{self.level} weights, at most {self.cap:.3g}"


METRICS = in_group(
    "Importance weights",
    MetricSpec(
        "auto/level", "weights of the batch: 1 sequence, 0 token", only_with="--rollout-correction auto"
    ),
    MetricSpec(
        "auto/upper",
        "upper bound of these weights",
        "max(2, sqrt(n) / 4), n sequences of an update",
        only_with="--rollout-correction auto",
    ),
)

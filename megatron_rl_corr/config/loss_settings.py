"""The policy loss of a correction: which one, its bounds, and how token losses become one number.

r = pi_theta / pi_old of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.checks import plain
from megatron_rl_corr.config.distillation import Distillation
from megatron_rl_corr.config.fields import Between, Positive, option
from megatron_rl_corr.config.kl import KLPenalties
from megatron_rl_corr.config.losses import (
    ADVANTAGES,
    AGGREGATIONS,
    BY_TOKEN,
    DUAL_CLIP,
    LOSS_KINDS,
    LOSSES,
    KnownOrOwn,
    LossKind,
    kind_of,
)

_TEMPERATURE = Positive("1 is usual", finite=True)


@dataclass(frozen=True)
class LossSettings(KLPenalties, Distillation):
    """Policy loss: its name, its bounds, its penalties and its average.

    None in a setting means the loss's own value (config/losses.py); read it through `clip`, `aggregation` and
    `advantage_kind`. Example: LossSettings(loss="dapo", clip_ratio_high=0.3)
    """

    loss: Annotated[str, KnownOrOwn(LOSSES)] = option(
        "ppo_clip",
        metavar="NAME|FILE.py:NAME",
        more="; ".join(f"{name}: {kind.doc}" for name, kind in LOSS_KINDS.items()) + ".",
    )
    """Policy loss: a name, or FILE.py:NAME or package.module:NAME of your own function of the inputs
    and these settings.
    """

    clip_ratio_low: float | None = option(None, metavar="X")
    """Clip pi_theta / pi_old from below at 1 - X (dppo_tv: bound their difference, dppo_kl: their binary
    KL); default: the loss's own, 0.2 for ppo_clip.
    """

    clip_ratio_high: float | None = option(None, metavar="X")
    """Clip pi_theta / pi_old from above at 1 + X (dppo_tv: bound their difference, dppo_kl: their binary
    KL); default: the loss's own, 0.2 for ppo_clip.
    """

    clip_ratio_c: float | None = option(DUAL_CLIP, metavar="X", none="none")
    """Dual clip: where the advantage is negative, the loss of a token is at most X times |A|;
    none turns it off.
    """

    clip_sat_tail: Annotated[float | None, Positive("3 is a start", finite=True)] = option(
        None, metavar="X", none="none"
    )
    """SAT (arXiv:2607.18722): where |D| is above X times its mean over the global batch, ppo_clip's bound
    is nearer to 1 by the factor X mean / |D|; with several updates a batch.
    """

    sapo_temperature_pos: Annotated[float, _TEMPERATURE] = option(1.0, metavar="X", needs="loss=sapo")
    """Temperature of sapo's gate where the advantage is positive: the higher, the sooner the gradient of a
    token fades as its ratio leaves 1.
    """

    sapo_temperature_neg: Annotated[float, _TEMPERATURE] = option(1.05, metavar="X", needs="loss=sapo")
    """The same where it is not positive; its paper has it above the other, as gradients of bad tokens are
    the less stable ones.
    """

    dro_beta: Annotated[float | None, Positive("use 0.05, for example", finite=True)] = option(
        None, metavar="X", needs="loss=dro"
    )
    """Coefficient of dro's pull to pi_old: X / 2 times the squared difference of log-probs; dro needs it."""

    loss_aggregation: str | None = option(None, choices=AGGREGATIONS)
    """How token losses become one number (default: the loss's own, token-mean for ppo_clip);
    seq-mean-token-sum-norm divides each sequence's sum by `loss_scale_length` (Dr.GRPO)."""

    loss_scale_length: Annotated[float | None, Positive("use the longest response", finite=True)] = option(
        None, metavar="N", none="none"
    )
    """Constant length of seq-mean-token-sum-norm, usually `max_new_tokens`."""

    loss_denominator: Literal["valid", "kept"] = "valid"
    """Tokens (and sequences) that the loss is divided by: valid (before rejection) or kept (after it)."""

    entropy_coef: Annotated[float, Between(0, remedy="0 turns it off", finite=True)] = option(
        0.0, metavar="X"
    )
    """Coefficient of the entropy bonus, which is subtracted from the loss; 0 turns it off."""

    advantage: Annotated[str | None, KnownOrOwn(ADVANTAGES)] = option(None, metavar="NAME|FILE.py:NAME")
    """grpo: (r - mean) / (std + 1e-6), group_mean: r - mean, rloo: r - mean of the others, over the
    group's samples that were not rejected; raw: r; batch_mean: r - the mean of the global batch;
    reinforce_plus_plus: (r - mean) / std over the tokens of the global batch,
    reinforce_plus_plus_baseline: the same of r - the group's mean; otb: r - the optimal baseline of each
    token's position, the group's rewards weighed by gradient so far (arXiv:2602.07078); or FILE.py:NAME or
    package.module:NAME of your own function. Default: the loss's own, grpo for ppo_clip.
    """

    def check_clip_low(self) -> None:
        self._check_clip("low", "in (0, 1]", 1.0)

    def check_clip_high(self) -> None:
        self._check_clip("high", "positive and finite", math.inf)

    def _check_clip(self, side: str, limit: str, bound: float) -> None:
        value = getattr(self, f"clip_ratio_{side}")
        if value is not None and self.kind.clip is None:
            raise ValueError(
                f"`clip_ratio_{side}` has no effect with `loss` {self.loss}, which does not clip; drop it, "
                "or use `loss` ppo_clip"
            )
        if value is not None and (not 0 < value <= bound or value == math.inf):
            usual = plain(self.kind.clip[side == "high"])
            raise ValueError(
                f"`clip_ratio_{side}` must be {limit}, got {plain(value)}; {usual} is usual for {self.loss}"
            )

    def check_dual_clip(self) -> None:
        dual = self.clip_ratio_c
        if dual is not None and not 1 < dual < math.inf:
            raise ValueError(
                f"`clip_ratio_c` must be above 1, got {plain(dual)}; 3 is usual, none turns it off"
            )
        if dual != DUAL_CLIP and not self.kind.dual_clip:
            raise ValueError(f"`clip_ratio_c` has no effect with `loss` {self.loss}; drop it")

    def check_sat(self) -> None:
        if self.clip_sat_tail is not None and self.kind.formula != "ppo_clip":
            raise ValueError(
                f"`clip_sat_tail` {plain(self.clip_sat_tail)} shrinks the interval of PPO's clip, which "
                f"`loss` {self.loss} does not have; use `loss` ppo_clip, grpo, dr_grpo or dapo, or drop it"
            )

    def check_dro(self) -> None:
        if self.loss == "dro" and self.dro_beta is None:
            raise ValueError(
                "`loss` dro needs `dro_beta`, the strength of its pull to pi_old; use 0.05, for example, "
                "and with it several updates a batch (`updates_per_batch`) or `bypass_mode`, since with one "
                "update pi_old is the policy itself"
            )

    def check_scale_length(self) -> None:
        normed = self.aggregation == "seq-mean-token-sum-norm"
        if normed and self.loss_scale_length is None:
            raise ValueError(
                "`loss_aggregation` seq-mean-token-sum-norm needs `loss_scale_length`; use the longest "
                "response, the value of `max_new_tokens`"
            )
        if not normed and self.loss_scale_length is not None:
            raise ValueError(
                f"`loss_scale_length` has no effect with `loss_aggregation` {self.aggregation}; use "
                "seq-mean-token-sum-norm, or drop it"
            )

    @property
    def kind(self) -> LossKind:
        """What the loss brings of its own."""
        return kind_of(self.loss)

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high) of the loss's clip, given or the loss's own."""
        low, high = self.kind.clip or (math.nan, math.nan)
        return (
            low if self.clip_ratio_low is None else self.clip_ratio_low,
            high if self.clip_ratio_high is None else self.clip_ratio_high,
        )

    @property
    def aggregation(self) -> str:
        """loss_aggregation, or the loss's own."""
        return self.loss_aggregation or self.kind.aggregation

    @property
    def advantage_kind(self) -> str:
        """advantage, or the one that belongs to the loss."""
        return self.advantage or self.kind.advantage

    @property
    def advantage_by_token(self) -> bool:
        """True if each token of a response has an advantage of its own."""
        return self.advantage_kind in BY_TOKEN

"""What is going wrong in a run, and since which step: trends of its metrics, each one condition in
a stated formula.

`alerts.py` judges single steps against bounds; a trend compares a run with its own beginning. A
warning begins with the first of HOLDS steps in a row at which its condition holds, and ends before the
first of ENDS in a row at which it does not; of two metrics that rise together, tau is asked for at the
beginning alone. Steps without one of a trend's metrics change nothing, and neither do runs too short
for the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl_corr.observability.catalogue import label_of
from megatron_rl_corr.observability.collapse import FRACTION
from megatron_rl_corr.observability.trends import History
from megatron_rl_corr.tables import readable

HOLDS = 3
ENDS = 10
K3, ESS, GRAD_NORM = "rollout_corr/k3_kl", "rollout_corr/ess_sequences", "grad_norm"
REWARD, ENTROPY, LENGTH = "reward/mean", "loss/entropy", "response_length/mean"
FRESH, STALE = "rollout_corr/by_lag/0/k3_kl", ("rollout_corr/by_lag/1/k3_kl", "rollout_corr/by_lag/2+/k3_kl")

PAIRS = ((K3, LENGTH), (GRAD_NORM, K3))
"""Metrics of which trends ask whether they rise together."""
NOTABLE = 3e-3
"""A k3 below it is no warning, however it grew: a third of the bound of its alert. Rounding alone
may make as much.
"""
GROWTH = 3.0
TOGETHER = 2.0
"""Growth of each of two metrics that rise together."""
TAU = 0.5
SCATTER = 7.0
"""Standard deviations of a mean by which it must lie below the best: rewards around 0 scatter by
many times both.
"""
STAKE = (
    "what a reward has to lose: best(reward); for rewards around a constant, whose gain (best less the "
    "lowest mean before it) is below half of the best but above what they scatter, the gain; where the best "
    "is not above 0, the larger of |best| and the gain"
)
"""A fall is a share of it."""
LEAST_ESS = 0.3
"""An early ESS below it is too noisy to fall."""


@dataclass(frozen=True)
class Trend:
    """One row of the table of warnings."""

    name: str
    """In the events: mismatch_grows."""
    says: str
    """What happens, as a sentence goes on: "the mismatch grows"."""
    metrics: tuple[str, ...]
    """What must be logged; a warning quotes them, early and now."""
    condition: str
    """When it holds: now is the median of the last WINDOW steps, early that of the first EARLY, mean the
    mean of the last WINDOW, best the highest such mean before, tau Kendall's over the last COURSE steps or
    over the run's parts.
    """
    meaning: str
    """One sentence."""
    remedy: str
    """One sentence, with a flag."""
    holds: Callable[[History], bool]
    """For a warning to begin."""
    lasts: Callable[[History], bool] | None = None
    """For a warning to go on; None: as it begins."""


def grown(history: History, name: str, factor: float, at_least: float = 0.0) -> bool:
    """now >= factor * early, and now >= at_least."""
    now, early = history.now(name), history.early(name)
    return now is not None and early is not None and now >= max(factor * early, at_least)


def fallen(history: History, name: str, factor: float) -> bool:
    """now <= factor * early."""
    now, early = history.now(name), history.early(name)
    return now is not None and early is not None and now <= factor * early


def below_best(history: History, name: str, share: float) -> bool:
    """best - mean > (1 - share) * stake, and > SCATTER * noise; see STAKE."""
    mean, best, gain, noise = history.mean(name), history.best(name), history.gain(name), history.noise(name)
    if noise is None or best - mean <= SCATTER * noise:
        return False
    if best <= 0:
        stake = max(-best, gain)
    else:
        stake = gain if SCATTER * noise < gain < best / 2 else best
    return best - mean > (1 - share) * stake


def _without_gain(history: History) -> bool:
    """The reward is not above its beginning by a tenth, whatever its sign, or has fallen from its best."""
    now, early = history.now(REWARD), history.early(REWARD)
    flat = now is not None and early is not None and now <= early + 0.1 * abs(early)
    return flat or below_best(history, REWARD, 0.8)


def _rise_together(history: History, one: str, other: str) -> bool:
    tau = history.tau(one, other)
    return tau is not None and tau >= TAU


def _longer_and_apart(history: History) -> bool:
    return grown(history, K3, TOGETHER, NOTABLE) and grown(history, LENGTH, 1.2)


def _steeper_and_apart(history: History) -> bool:
    return grown(history, K3, TOGETHER, NOTABLE) and grown(history, GRAD_NORM, TOGETHER)


def _stale_tokens_move(history: History) -> bool:
    stale = any(grown(history, name, GROWTH, NOTABLE) for name in STALE)
    return stale and history.early(FRESH) is not None and not grown(history, FRESH, TOGETHER)


TRENDS = (
    Trend(
        "reward_fell",
        "the reward lost half of its best, or of its gain",
        (REWARD,),
        f"best(reward) - mean(reward) > {1 - FRACTION:g} stake(reward), and more than {SCATTER:g} times what "
        "it scatters",
        "If dense rewards above 0 stay so for 20 steps, the run has collapsed.",
        "Go back to a checkpoint from before the first warning, with a stricter correction (`--rollout-rs`) "
        "or a lower `--lr`.",
        lambda history: below_best(history, REWARD, FRACTION),
    ),
    Trend(
        "reward_falls",
        "the reward falls",
        (REWARD,),
        f"best(reward) - mean(reward) > 0.2 stake(reward), and more than {SCATTER:g} times what it scatters; "
        "all of its last rewards are below best(reward)",
        "The run loses what it had learned.",
        "Look for a warning that came before this one; else lower `--lr`, or add a KL penalty, "
        "`--rollout-kl-loss-coef`.",
        lambda history: below_best(history, REWARD, 0.8) and history.highest(REWARD) < history.best(REWARD),
    ),
    Trend(
        "mismatch_grows",
        "the mismatch grows",
        (K3,),
        f"now(k3) >= {GROWTH:g} early(k3), now(k3) >= {NOTABLE:g}",
        "Trainer and servers drift apart as the policy changes, which is what collapses runs.",
        "Mask tokens that are far off (`--rollout-is token --rollout-is-mode mask`), or reject responses "
        "(`--rollout-rs seq_mean_ratio`); for a mixture of experts `--router-replay R3`.",
        lambda history: grown(history, K3, GROWTH, NOTABLE),
    ),
    Trend(
        "mismatch_with_length",
        "the mismatch grows with the responses' length",
        (K3, LENGTH),
        f"now(k3) >= {TOGETHER:g} early(k3), now(k3) >= {NOTABLE:g}, now(length) >= 1.2 early(length), "
        f"tau(k3, length) >= {TAU:g}",
        "Errors add up along a response: later tokens are further apart.",
        "Bound the length (`--rollout-max-new-tokens`), and use a rule that sees the mean per token: "
        "`--rollout-rs seq_mean_ratio`.",
        lambda history: _longer_and_apart(history) and _rise_together(history, K3, LENGTH),
        lasts=_longer_and_apart,
    ),
    Trend(
        "mismatch_of_old_samples",
        "the mismatch of old samples grows, that of fresh ones does not",
        (FRESH, *STALE),
        f"of tokens of 1, or of 2+ pushes ago: now(k3) >= {GROWTH:g} early(k3), now(k3) >= {NOTABLE:g}; of 0 "
        f"pushes ago, of which there must be tokens early and now: now(k3) < {TOGETHER:g} early(k3)",
        "The policy moves more between pushes than it did, so age is the cause, not the engines.",
        "Lower `--rollout-max-lag`, or `--rollout-stale-samples drop`.",
        _stale_tokens_move,
    ),
    Trend(
        "ess_falls",
        "fewer and fewer responses carry the gradient",
        (ESS,),
        f"now(ESS over sequences) <= 0.5 early, early >= {LEAST_ESS:g}",
        "The products of ratios spread; the reward often falls later.",
        "Scale steps with it (`--rollout-ess-step-scale`), or lower `--rollout-max-lag`.",
        lambda history: (history.early(ESS) or 0) >= LEAST_ESS and fallen(history, ESS, 0.5),
    ),
    Trend(
        "gradient_and_mismatch",
        "gradient norm and mismatch rise together",
        (GRAD_NORM, K3),
        f"now >= {TOGETHER:g} early of both, tau(grad norm, k3) >= {TAU:g}, now(k3) >= {NOTABLE:g}",
        "A few tokens with a large error make the gradient.",
        "Mask them: `--rollout-is token --rollout-is-mode mask --rollout-is-threshold 0.5_2.0`.",
        lambda history: _steeper_and_apart(history) and _rise_together(history, GRAD_NORM, K3),
        lasts=_steeper_and_apart,
    ),
    Trend(
        "entropy_collapse",
        "the entropy collapses without a gain in reward",
        (ENTROPY, REWARD),
        "now(entropy) <= 0.2 early(entropy), early(entropy) > 0; and now(reward) <= early(reward) + 0.1 "
        f"|early(reward)|, or best(reward) - mean(reward) > 0.2 stake(reward), and more than {SCATTER:g} "
        "times what it scatters",
        "The policy writes one text, which is not a good one, and groups teach nothing any more.",
        "Add an entropy bonus (`--rollout-entropy-coef`), or raise the upper clip "
        "(`--rollout-clip-ratio-high`).",
        lambda history: (
            (history.early(ENTROPY) or 0) > 0 and fallen(history, ENTROPY, 0.2) and _without_gain(history)
        ),
    ),
)


@dataclass(frozen=True)
class EarlyWarning:
    """A trend that a run shows. Example: `EarlyWarning(trend, 120, "KL(k3) 0.003 early, 0.012 then")`."""

    trend: Trend
    first_step: int
    numbers: str
    """The trend's metrics, early and when it was found."""
    last_step: int | None = None
    """The last step of it; None: it has not ended."""

    @property
    def sentence(self) -> str:
        """The warning in words."""
        until = "" if self.last_step is None else f" until step {self.last_step}"
        return f"Since step {self.first_step}{until} {self.trend.says}: {self.numbers}."


class TrendWatch:
    """Takes a run's steps in order, in bounded memory, and says which warnings begin and end."""

    def __init__(self, rows: Sequence[Mapping[str, int | float]] = ()):
        """rows: the run's earlier steps, as `metrics_file.read_metrics` returns them; nothing
        is said of them.
        """
        self._history = History(sorted({name for trend in TRENDS for name in trend.metrics}), PAIRS)
        self._since: dict[str, int] = {}
        """The first of the steps in a row at which a condition held, or of those at which that of a
        warning did not.
        """
        self._streak: dict[str, int] = {}
        self.active: dict[str, EarlyWarning] = {}
        for row in rows:
            self.add(row)

    @property
    def step(self) -> int:
        """The last one; 0 before the first."""
        return self._history.step

    def add(self, metrics: Mapping[str, int | float]) -> list[EarlyWarning]:
        """The warnings that begin, and with `last_step` those that end.

        Args:
            metrics: a step's, by their logged names, `step` among them; later than those before.
        """
        before, found = self.step, self._history.add(metrics)
        judged = [trend for trend in TRENDS if set(trend.metrics) - set(STALE) <= found]
        return [change for trend in judged for change in self._judge(trend, before)]

    def _judge(self, trend: Trend, before: int) -> Iterator[EarlyWarning]:
        warning = self.active.get(trend.name)
        condition = trend.holds if warning is None else trend.lasts or trend.holds
        # Without a warning, steps at which the condition holds are counted; with one, those at
        # which it does not.
        if condition(self._history) == (warning is not None):
            self._streak[trend.name] = 0
            return
        streak = self._streak[trend.name] = self._streak.get(trend.name, 0) + 1
        if streak == 1:
            self._since[trend.name] = self.step if warning is None else before
        if warning is None and streak == HOLDS:
            self.active[trend.name] = EarlyWarning(trend, self._since[trend.name], self._numbers(trend))
            yield self.active[trend.name]
        elif warning is not None and streak == ENDS:
            del self.active[trend.name]
            yield replace(warning, last_step=self._since[trend.name])
        else:
            return
        self._streak[trend.name] = 0

    def _numbers(self, trend: Trend) -> str:
        history = self._history
        return "; ".join(
            f"{label_of(name)} {readable(history.early(name))} early, {readable(history.now(name))} then"
            for name in trend.metrics
            if history.early(name) is not None
        )


def find_warnings(rows: Sequence[Mapping[str, int | float]]) -> list[EarlyWarning]:
    """A run's warnings, by their first step.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
    """
    watch, ended = TrendWatch(), []
    for row in rows:
        ended += [change for change in watch.add(row) if change.last_step is not None]
    return sorted([*ended, *watch.active.values()], key=lambda warning: warning.first_step)

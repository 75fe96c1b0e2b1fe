"""Draws one panel per question a user asks of a run; each takes axes and the run's series."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from megatron_rl_corr.core.catalogue import QUADRANTS
from megatron_rl_corr.core.mismatch import TURN_NUMBERS
from megatron_rl_corr.observability.catalogue import bins_of, ordered, usual_range
from megatron_rl_corr.tables import visible

# Okabe and Ito's palette stays apart under the common colour deficiencies.
BLUE, ORANGE, GREEN, VERMILLION, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
ALERT_SHADE = "#FBE3D6"
FEW_STEPS = 15
MOST_COLUMNS = 48


class Series:
    """A run's metrics as arrays over its steps, NaN where a step lacks the metric."""

    def __init__(self, rows: Sequence[dict]):
        self._rows = rows
        self.steps = np.array([row["step"] for row in rows], dtype=float)

    def __getitem__(self, name: str) -> np.ndarray:
        values = np.array([row.get(name, np.nan) for row in self._rows], dtype=float)
        return np.where(np.isfinite(values), values, np.nan)

    def with_any(self, names: Sequence[str]) -> "Series":
        """The steps that may have one of the metrics: of several updates a batch, only one
        has the batch's.
        """
        return Series(
            [row for row in self._rows if "update" not in row or any(name in row for name in names)]
        )

    def matching(self, pattern: str) -> dict[str, str]:
        """Metrics that the pattern matches as a whole, by name -> what its first group holds;
        in order of names.
        """
        names = sorted({name for row in self._rows for name in row})
        return {
            name: plain_label(match[1] or "")
            for name in names
            if (match := re.fullmatch(pattern, name)) and self.has(name)
        }

    def bins(self) -> dict[str, float]:
        """The bins of |log-ratio| that any step has, with their upper ends, in their order."""
        return bins_of({name for row in self._rows for name in row})

    def has(self, *names: str) -> bool:
        """True if every one of the metrics has a finite value at some step."""
        return all(bool(np.isfinite(self[name]).any()) for name in names)


def plain_label(text: str) -> str:
    """A name as matplotlib writes it letter by letter: between two dollar signs it would read formulas."""
    return visible(text).replace("$", r"\$")


def draw_line(axes: Axes, series: Series, name: str, *, color: str = BLUE, label: str = ""):
    """One metric over the steps; points are marked while they are few, or a single step would not show."""
    axes.plot(series.steps, series[name], color=color, label=label, linewidth=1.8, **_marker(series))


def _marker(series: Series) -> dict:
    return {"marker": "o", "markersize": 4} if len(series.steps) <= FEW_STEPS else {}


def draw_bound(axes: Axes, value: float, label: str = ""):
    """A dashed line where a metric leaves its usual range."""
    axes.axhline(value, color=VERMILLION, linewidth=1.2, linestyle=(0, (5, 3)), label=label)


def start_at_zero(axes: Axes, values: np.ndarray):
    """Show the values against zero, with headroom so that the topmost marker is whole."""
    axes.set_ylim(0, 1.08 * np.nanmax(values, initial=0) or 1)


def shade_steps(axes: Axes, steps: Sequence[int]):
    """A pale band behind each of the steps, the same in every panel, to compare panels by."""
    axes.broken_barh(
        [(step - 0.5, 1.0) for step in steps],
        (0.0, 1.0),
        transform=axes.get_xaxis_transform(),
        facecolor=ALERT_SHADE,
        linewidth=0,
        zorder=0,
    )


def mark_steps(axes: Axes, steps: Sequence[int]):
    """A line at each of the steps, with its number in their order, the same in every panel."""
    for number, step in enumerate(steps, start=1):
        axes.axvline(step, color=VERMILLION, linewidth=1.0, linestyle=":", zorder=1)
        axes.annotate(
            str(number),
            xy=(step, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, -1),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=VERMILLION,
        )


def draw_reward(axes: Axes, series: Series) -> None:
    center, spread = series["reward/mean"], series["reward/std"]
    if series.has("reward/std"):
        low, high = center - spread, center + spread
        if series.has("reward/min", "reward/max"):
            low, high = np.maximum(low, series["reward/min"]), np.minimum(high, series["reward/max"])
        axes.fill_between(series.steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="± std")
    draw_line(axes, series, "reward/mean", label="mean")


def draw_kl(axes: Axes, series: Series) -> None:
    if (series["rollout_corr/k3_kl"] > 0).any():
        axes.set_yscale("log", nonpositive="mask")
    draw_line(axes, series, "rollout_corr/k3_kl", label="k3")
    by_engine = series.matching(r"rollout_corr/by_engine/(.+)/k3_kl")
    for (name, engine), color in zip(by_engine.items(), (ORANGE, GREEN, SKY), strict=False):
        draw_line(axes, series, name, color=color, label=engine)
    draw_bound(axes, usual_range("rollout_corr/k3_kl").high, "alert level")
    axes.margins(y=0.1)


BY_TURN = "rollout_corr/by_turn"


def draw_by_turn(axes: Axes, series: Series) -> None:
    """First turns against later ones."""
    names = {"first turns": "first", "later turns": "later"}
    known = {label: f"{BY_TURN}/{part}/k3_kl" for label, part in names.items()}
    if any((series[name] > 0).any() for name in known.values()):
        axes.set_yscale("log", nonpositive="mask")
    for (label, name), color in zip(known.items(), (BLUE, ORANGE), strict=True):
        draw_line(axes, series, name, color=color, label=label)
    axes.margins(y=0.1)


def draw_by_turn_number(axes: Axes, series: Series) -> None:
    """A line for each turn, or for several that are late."""
    colors = dict(zip(("first", *TURN_NUMBERS), (BLUE, SKY, GREEN, ORANGE, VERMILLION), strict=True))
    for part, color in colors.items():
        name = f"{BY_TURN}/{part}/log_ratio_abs_mean"
        if series.has(name):
            label = "turn 0" if part == "first" else part.replace("_to_", "-")
            draw_line(axes, series, name, color=color, label=label)
    start_at_zero(axes, np.concatenate([line.get_ydata() for line in axes.get_lines()]))


def draw_probe(axes: Axes, series: Series) -> None:
    if (series["rollout/probe_max_abs_log_ratio"] > 0).any():
        axes.set_yscale("log", nonpositive="mask")
    draw_line(axes, series, "rollout/probe_max_abs_log_ratio", label="max")
    draw_line(axes, series, "rollout/probe_mean_abs_log_ratio", color=ORANGE, label="mean")
    axes.margins(y=0.1)


def draw_weight(axes: Axes, series: Series) -> None:
    if series.has("rollout_corr/weight_min", "rollout_corr/weight_max"):
        axes.fill_between(
            series.steps,
            series["rollout_corr/weight_min"],
            series["rollout_corr/weight_max"],
            color=BLUE,
            alpha=0.15,
            linewidth=0,
            label="min to max",
        )
        if np.nanmax(series["rollout_corr/weight_max"]) > 10:
            axes.set_yscale("symlog", linthresh=2.0)
            axes.set_ylim(bottom=0)
    draw_line(axes, series, "rollout_corr/weight_mean", label="mean")
    usual = usual_range("rollout_corr/weight_mean")
    draw_bound(axes, usual.low, "alert levels of the mean")
    draw_bound(axes, usual.high)


def draw_shares(axes: Axes, series: Series) -> None:
    draw_line(axes, series, "rollout_corr/ess", label="ESS")
    if series.has("rollout_corr/kept_fraction"):
        draw_line(axes, series, "rollout_corr/kept_fraction", color=ORANGE, label="kept tokens")
    draw_bound(axes, usual_range("rollout_corr/ess").low, "ESS alert")
    axes.set_ylim(0, 1.04)


def draw_quadrants(axes: Axes, series: Series) -> None:
    """Shares of the gradient: what amplifies the mismatch in warm colours, what contracts it in cold ones."""
    colors = dict(zip(QUADRANTS, (VERMILLION, ORANGE, BLUE, SKY), strict=True))
    for name, color in colors.items():
        label = name.replace("_", ", ")
        draw_line(axes, series, f"rollout_corr/quadrant/{name}_mass", color=color, label=label)
    axes.set_ylim(0, 1.04)


def draw_grad_norm(axes: Axes, series: Series) -> None:
    draw_line(axes, series, "grad_norm")
    start_at_zero(axes, series["grad_norm"])


def draw_response_length(axes: Axes, series: Series) -> None:
    draw_line(axes, series, "response_length/mean")


def draw_throughput(axes: Axes, series: Series) -> None:
    draw_line(axes, series, "tokens_per_s")
    start_at_zero(axes, series["tokens_per_s"])


EVAL_REWARDS, EVAL_PASSES = r"eval/(?:([\w.-]+)/)?reward", r"eval/((?:[\w.-]+/)?pass@\d+)"
"""Names of an evaluation's mean reward, with the set, and of its pass@k."""


def draw_evaluated(axes: Axes, series: Series, pattern: str) -> None:
    """A line for each metric; only some steps are evaluated, so the line goes from one of
    these to the next.
    """
    for at, (name, label) in enumerate(series.matching(pattern).items()):
        values = series[name]
        there = np.isfinite(values)
        colors = (BLUE, ORANGE, GREEN, VERMILLION, SKY)
        axes.plot(
            series.steps[there],
            values[there],
            color=colors[at % len(colors)],
            marker="o",
            markersize=4,
            linewidth=1.8,
            linestyle=("-", "--", ":")[at // len(colors) % 3],
            label=label.replace("/", " ") or "held out",
        )


QUEUE = {
    "running": "rollout/groups_running",
    "ready": "rollout/groups_ready",
    "dropped": "rollout/groups_dropped",
}
TIMES = {
    "collect": ("time/collect_s", SKY),
    "release": ("time/release_s", VERMILLION),
    "score": ("time/score_s", ORANGE),
    "train": ("time/train_s", BLUE),
    "push": ("time/push_s", GREEN),
}


def draw_times(axes: Axes, series: Series) -> None:
    """Bars for few steps, where an area would be a sliver; areas for many."""
    known = {
        label: (np.nan_to_num(series[name]), color)
        for label, (name, color) in TIMES.items()
        if series.has(name)
    }
    if len(series.steps) > FEW_STEPS:
        axes.stackplot(
            series.steps,
            *(seconds for seconds, _ in known.values()),
            labels=list(known),
            colors=[color for _, color in known.values()],
            linewidth=0,
        )
    else:
        base = np.zeros_like(series.steps)
        for label, (seconds, color) in known.items():
            axes.bar(series.steps, seconds, bottom=base, color=color, label=label, width=0.7)
            base = base + seconds
    total = sum(seconds for seconds, _ in known.values())
    if series.has("time/step_s"):
        axes.plot(series.steps, series["time/step_s"], color="#333333", linewidth=1, label="whole step")
        total = np.fmax(total, series["time/step_s"])
    start_at_zero(axes, total)


def draw_lag(axes: Axes, series: Series) -> None:
    lag = series["weight_lag"]
    axes.step(
        series.steps, lag, where="mid", color=BLUE, linewidth=1.8, label="oldest sample", **_marker(series)
    )
    if series.has("weight_lag_token_mean"):
        draw_line(axes, series, "weight_lag_token_mean", color=ORANGE, label="mean over tokens")
    # Below zero, or the line of an on-policy run would lie under the axis.
    top = max(1.0, np.nanmax(lag))
    axes.set_ylim(-0.04 * top, 1.08 * top)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def draw_queue(axes: Axes, series: Series) -> None:
    for (label, name), color in zip(QUEUE.items(), (BLUE, ORANGE, VERMILLION), strict=True):
        if series.has(name):
            draw_line(axes, series, name, color=color, label=label)
    start_at_zero(axes, np.concatenate([series[name] for name in QUEUE.values() if series.has(name)]))


def draw_bins(axes: Axes, series: Series) -> None:
    """A strip a bin, darker where more tokens are; neighbouring steps share a column where they are many."""
    bins = series.bins()
    shares = np.array([series[name] for name in bins])
    groups = np.array_split(np.arange(len(series.steps)), min(MOST_COLUMNS, len(series.steps)))
    columns = np.stack([shares[:, group].mean(axis=1) for group in groups], axis=1)
    edges = [series.steps[group[0]] - 0.5 for group in groups] + [series.steps[-1] + 0.5]
    # Zero is left white: on a log scale it has no colour, and in the SVG no cell.
    seen = np.ma.masked_where(~(columns > 0), columns)
    axes.pcolormesh(edges, np.arange(len(bins) + 1), seen, cmap="Blues", norm=LogNorm(1e-6, 1), linewidth=0)
    ends = list(bins.values())
    decades = [at for at, end in enumerate(ends) if np.isfinite(end) and abs(np.log10(end) % 1) < 1e-9]
    axes.set_yticks([at + 1 for at in decades], [f"{ends[at]:g}" for at in decades])
    for name, color in (("p50", GREEN), ("p99", ORANGE), ("p999", VERMILLION)):
        heights = [ends.index(end) + 1 if end in ends else np.nan for end in _rounded(series, name)]
        axes.plot(series.steps, heights, color=color, linewidth=1.4, label=name, **_marker(series))
    axes.grid(False)


def _rounded(series: Series, name: str) -> list[float]:
    """A percentile of |log-ratio| as the bins' names write their ends."""
    return [float(f"{value:.3g}") for value in series[f"rollout_corr/log_ratio_abs_{name}"]]


LEDGER = "ledger/([a-z]+)/share"


def draw_ledger(axes: Axes, series: Series) -> None:
    for name, term in series.matching(LEDGER).items():
        _plot_share(axes, series.steps, series[name], term)


def _plot_share(axes: Axes, steps: np.ndarray, shares: np.ndarray, label: str) -> None:
    """In percent, at the steps that have one."""
    known = np.isfinite(shares)
    axes.plot(steps[known], 100 * shares[known], label=label, linewidth=1.4, marker="o")


CAUSES = "ledger/as/(.+)/share"
MOST_CAUSES = 6


def draw_causes(axes: Axes, series: Series) -> None:
    """The changes of the server that explain most at any step; one that explains nothing is at 0."""
    found = {change: series[name].clip(min=0.0) for name, change in series.matching(CAUSES).items()}
    largest = {change: np.nan_to_num(shares).max() for change, shares in found.items()}
    for change in sorted(largest, key=lambda one: -largest[one])[:MOST_CAUSES]:
        _plot_share(axes, series.steps, found[change], change)
    axes.set_ylim(-3, 103)


PLACES = "ledger/at/(.+)/share"
MOST_PLACES = 8


def draw_places(axes: Axes, series: Series) -> None:
    """The servers, engines and experts' ranks that have most of the rest at any step."""
    found = {
        place.replace("_", " ").replace("/", " "): series[name]
        for name, place in series.matching(PLACES).items()
    }
    largest = {place: np.nan_to_num(shares).max() for place, shares in found.items()}
    for place in sorted(largest, key=lambda one: -largest[one])[:MOST_PLACES]:
        _plot_share(axes, series.steps, found[place], place)
    axes.set_ylim(-3, 103)


@dataclass(frozen=True)
class Panel:
    """One plot: a short name for files, a title, how to read it, the metrics that it needs any of."""

    name: str
    title: str
    reading: str
    draw: Callable[[Axes, Series], None]
    needs: tuple[str, ...]
    family: str = ""
    """A pattern of further metrics that it needs any of."""

    def has_data(self, series: Series) -> bool:
        return any(series.has(name) for name in self._names(series))

    def draw_on(self, axes: Axes, series: Series) -> None:
        """Draw the steps that may have data: a line with gaps between all of its points would not show."""
        self.draw(axes, series.with_any(self._names(series)))

    def _names(self, series: Series) -> tuple[str, ...]:
        return (*self.needs, *(series.matching(self.family) if self.family else ()))


PANELS = (
    Panel("reward", "Reward", "should rise", draw_reward, ("reward/mean",)),
    Panel(
        "eval_reward",
        "Held-out reward",
        "should rise with the reward of the training",
        lambda axes, series: draw_evaluated(axes, series, EVAL_REWARDS),
        ("eval/reward",),
        EVAL_REWARDS,
    ),
    Panel(
        "eval_pass",
        "Held-out pass@k",
        "1 - C(n - c, k) / C(n, k), mean over prompts",
        lambda axes, series: draw_evaluated(axes, series, EVAL_PASSES),
        ("eval/pass@1",),
        EVAL_PASSES,
    ),
    Panel(
        "response_length",
        "Response length, tokens",
        "sudden moves deserve a look",
        draw_response_length,
        ("response_length/mean",),
    ),
    Panel(
        "kl",
        "Train-infer KL (k3)",
        "flat and below the alert level; log scale",
        draw_kl,
        ("rollout_corr/k3_kl",),
    ),
    Panel(
        "log_ratio_sizes",
        "Tokens by |log-ratio|",
        "darker: more tokens; the dark band should stay low",
        draw_bins,
        ("rollout_corr/log_ratio_abs_bin/upto_1e-06",),
    ),
    Panel(
        "by_turn",
        "Train-infer KL (k3) by turn",
        "later turns, behind tool results, are often worse; log scale",
        draw_by_turn,
        (f"{BY_TURN}/1/k3_kl", f"{BY_TURN}/later/k3_kl"),
    ),
    Panel(
        "by_turn_number",
        "Mean |log-ratio| by turn number",
        "should not grow with the turn",
        draw_by_turn_number,
        (f"{BY_TURN}/1/log_ratio_abs_mean",),
    ),
    Panel(
        "probe",
        "Pushed weights: |log-ratio| of fixed texts",
        "grows as the policy gets surer; worst server; log scale",
        draw_probe,
        ("rollout/probe_max_abs_log_ratio",),
    ),
    Panel("weight", "Importance weight", "mean close to 1", draw_weight, ("rollout_corr/weight_mean",)),
    Panel(
        "ess",
        "ESS and kept tokens",
        "both close to 1",
        draw_shares,
        ("rollout_corr/ess", "rollout_corr/kept_fraction"),
    ),
    Panel(
        "quadrants",
        "Gradient by its direction",
        "good, above and bad, below widen the mismatch",
        draw_quadrants,
        ("rollout_corr/quadrant/good_above_mass",),
    ),
    Panel("grad_norm", "Gradient norm", "steady; spikes follow mismatch", draw_grad_norm, ("grad_norm",)),
    Panel("throughput", "Tokens per second", "higher is better", draw_throughput, ("tokens_per_s",)),
    Panel(
        "times",
        "Seconds per step",
        "the thickest band is the bottleneck",
        draw_times,
        tuple(name for name, _ in TIMES.values()),
    ),
    Panel(
        "ledger",
        "What the mismatch comes from, %",
        "shares add up to 100; the largest is where to look",
        draw_ledger,
        ("ledger/rest/share",),
        LEDGER,
    ),
    Panel(
        "ledger_causes",
        "What the rest looks like, % of its square",
        "with the routing; what would be gone if servers computed so; near 100 the cause is found",
        draw_causes,
        ("ledger/as_square",),
        CAUSES,
    ),
    Panel(
        "ledger_places",
        "Where the rest sits, % of its square",
        "each kind's shares add up to 100; one far above its share of the tokens is where to look",
        draw_places,
        ("ledger/at/server/1/share",),
        PLACES,
    ),
    Panel("lag", "Weight lag, versions", "0 is on-policy", draw_lag, ("weight_lag",)),
    Panel(
        "queue",
        "Groups sampled ahead",
        "many ready: training is the bottleneck; none: sampling is",
        draw_queue,
        tuple(QUEUE.values()),
    ),
)
_NEEDS = ordered(panel.needs[0] for panel in PANELS)
PAGE_PANELS = tuple(sorted(PANELS, key=lambda panel: _NEEDS.index(panel.needs[0])))
"""All panels, in the catalogue's order of what they show."""
_ON_THE_PAGE_ALONE = (
    "log_ratio_sizes",
    "by_turn",
    "by_turn_number",
    "probe",
    "quadrants",
    "ledger",
    "ledger_causes",
    "ledger_places",
    "queue",
    "eval_reward",
    "eval_pass",
)
OVERVIEW_PANELS = tuple(panel for panel in PAGE_PANELS if panel.name not in _ON_THE_PAGE_ALONE)
"""Those of the overview, nine of them."""

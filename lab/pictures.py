"""The laboratory's figures: the map, the laws over it, and the trainings."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path

import matplotlib
import matplotlib.ticker
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.bounds import BoundRow, looseness, quantile
from lab.map import BATCHES, DRAWN, LENGTHS, Cell, Means, Row
from lab.mismatch import KINDS
from lab.training import Runs
from lab.verdicts import ALIKE, MEASURES, best

matplotlib.rcParams |= {"svg.hashsalt": "lab", "svg.fonttype": "none"}  # the same bytes each time, and small
COLORS = {
    "auto": "#D81B60",
    "none": "#9E9E9E",
    "token_truncate": "#90CAF9",
    "token_mask": "#1E88E5",
    "token_unbounded": "#0D47A1",
    "turn_truncate": "#9575CD",
    "sequence_truncate": "#FFCC80",
    "sequence_mask": "#FB8C00",
    "sequence_unbounded": "#BF360C",
    "geometric_truncate": "#A5D6A7",
    "rule:seq_mean_ratio": "#43A047",
    "preset:decoupled_geo_rs_token_tis": "#1B5E20",
    "bypass:ppo_clip": "#F48FB1",
}
"""Arm -> its colour: tokens blue, turns violet, sequences orange, geometric means green."""
LABELS = {
    "preset:decoupled_geo_rs_token_tis": "geo_rs_token_tis (tight)",
    "rule:seq_mean_ratio": "geo gate [0.9, 1.1]",
}
NOTHING = "#FFFFFF"
"""Of cells in which no arm's step is better than none at all."""
DARK = (
    "token_mask",
    "token_unbounded",
    "sequence_unbounded",
    "rule:seq_mean_ratio",
    "preset:decoupled_geo_rs_token_tis",
)


def label(arm: str) -> str:
    """The arm's name in a legend."""
    return LABELS.get(arm, arm)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


def draw_map(means: Means, task: str, measure: str, path: Path) -> None:
    """A row a kind, a panel a batch: in each cell the best of DRAWN, and none's error over that arm's."""
    kinds = [kind for kind in KINDS if any(cell.kind == kind and cell.task == task for cell in means)]
    if not kinds:
        return
    figure = Figure(figsize=(12.0, 2.6 * len(kinds) + 1), layout="constrained")
    panels = figure.subplots(len(kinds), len(BATCHES), squeeze=False)
    for row, kind in zip(panels, kinds, strict=True):
        for axes, batch in zip(row, BATCHES, strict=True):
            _draw_panel(axes, means, task, kind, MEASURES[measure], batch)
            axes.set_title(f"{kind}, N = {batch}", fontsize=9)
        row[0].set_ylabel(KINDS[kind].unit, fontsize=7)
    for axes in panels[-1]:
        axes.set_xlabel("tokens of a response")
    handles = [matplotlib.patches.Patch(color=COLORS[arm], label=label(arm)) for arm in DRAWN]
    blank = matplotlib.patches.Patch(
        facecolor=NOTHING, edgecolor="black", label="- : no arm beats a step of 0"
    )
    handles.append(blank)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _save(figure, path)


def _draw_panel(axes: Axes, means: Means, task: str, kind: str, measure, batch: int) -> None:
    sizes = KINDS[kind].sizes
    for y, size in enumerate(sizes):
        for x, length in enumerate(LENGTHS):
            arms = means.get(Cell(task, kind, size, length))
            if arms is None:
                continue
            name = best(arms, DRAWN, measure, batch)
            least = measure(arms[name], batch)
            gain = measure(arms["none"], batch) / max(least, 1e-12)
            color, text = COLORS[name], _factor(gain)
            if least > 1 - ALIKE:  # an arm that rejects everything would win
                color, text = NOTHING, "-"
            axes.add_patch(matplotlib.patches.Rectangle((x, y), 1, 1, color=color, linewidth=0))
            ink = "white" if name in DARK and color != NOTHING else "black"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7, color=ink)
    axes.set(xlim=(0, len(LENGTHS)), ylim=(0, len(sizes)))
    axes.set_xticks([x + 0.5 for x in range(len(LENGTHS))], [str(length) for length in LENGTHS], fontsize=7)
    axes.set_yticks([y + 0.5 for y in range(len(sizes))], [f"{size:g}" for size in sizes], fontsize=7)


def _factor(gain: float) -> str:
    if gain < 10:
        return f"{gain:.2f}" if gain < 2 else f"{gain:.1f}"
    return f"{gain:.0f}" if gain < 10_000 else f"{gain:.0e}".replace("e+0", "e")


LAW_ARMS = (
    "none",
    "token_unbounded",
    "token_truncate",
    "geometric_truncate",
    "sequence_truncate",
    "sequence_mask",
)
LAW_SIZES = (0.1, 1.0)


def draw_laws(rows: list[Row], path: Path, *, task: str = "parity", kind: str = "rounding") -> None:
    """Bias over length with the bounds 2 G R T (T - m) Delta, and E[w^2] of products with (1 + chi)^T."""
    figure = Figure(figsize=(13.0, 5.0), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, size in zip((left, middle), LAW_SIZES, strict=True):
        _draw_bias(
            axes, [row for row in rows if (row["task"], row["kind"], row["size"]) == (task, kind, size)]
        )
        axes.set_title(f"bias, {kind} {size:g}, {task}", fontsize=10)
    for size in KINDS[kind].sizes[2:]:
        of_size = [
            row
            for row in rows
            if (row["kind"], row["size"], row["arm"]) == (kind, size, "none") and row["task"] == task
        ]
        seconds = [_mean(of_size, length, lambda row: 1 / row["ess"] - 1) for length in LENGTHS]
        laws = [
            _mean(of_size, length, lambda row: (1 + row["chi2"]) ** row["length"] - 1) for length in LENGTHS
        ]
        (line,) = right.plot(LENGTHS, seconds, marker="o", label=f"{size:g}: E[w^2] - 1")
        right.plot(LENGTHS, laws, linestyle="--", color=line.get_color(), label=f"{size:g}: (1 + chi)^T - 1")
    right.set(title="variance of the product w", xlabel="tokens of a response", yscale="log")
    right.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    _save(figure, path)


def _mean(rows: list[Row], length: int, value) -> float:
    of_length = [value(row) for row in rows if row["length"] == length]
    return sum(of_length) / len(of_length) if of_length else float("nan")


def _bias_bound(row: Row, corrected: int) -> float:
    """2 G R T (T - m) Delta with m places corrected: G = 2^0.5 is the longest score, R the largest |A|."""
    return 2 * 2**0.5 * row["reach"] * row["length"] * (row["length"] - corrected) * row["tv"]


def _draw_bias(axes: Axes, rows: list[Row]) -> None:
    for arm in LAW_ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        biases = [_mean(of_arm, length, lambda row: row["bias2"] ** 0.5 * row["norm"]) for length in LENGTHS]
        style = "--" if arm == "token_unbounded" else "-"  # it often lies on token_truncate
        axes.plot(
            LENGTHS,
            biases,
            style,
            marker="o",
            color=COLORS[arm],
            label=arm,
            zorder=2.5 if style == "--" else 2,
        )
    of_none = [row for row in rows if row["arm"] == "none"]
    for style, name, corrected in ((":", "2 G R T^2 Delta", 0), ("--", "2 G R T (T - 1) Delta", 1)):
        bounds = [_mean(of_none, length, partial(_bias_bound, corrected=corrected)) for length in LENGTHS]
        bounds = [bound or float("nan") for bound in bounds]  # a logarithm has no 0
        axes.plot(LENGTHS, bounds, style, color="black", label=name)
    axes.set(
        xlabel="tokens of a response", ylabel="|E g_hat - g|", yscale="log", xscale="log", ylim=(1e-6, None)
    )
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


STRIDE = 5
"""Of the steps of a training, one in so many is drawn."""


def draw_trainings(runs: dict[str, dict[str, Runs]], path: Path) -> None:
    """A panel a setting: J over the steps, the mean of an arm's seeds and the band of their middle half."""
    across = 3
    down = -(-len(runs) // across)
    figure = Figure(figsize=(14.0, 3.0 * down + 0.8), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[len(runs) :]:
        axes.axis("off")
    shown: dict[str, object] = {}
    for axes, (setting, arms) in zip(panels, runs.items(), strict=False):
        for arm, found in arms.items():
            rewards = found.rewards[::STRIDE]
            low, high = torch.quantile(rewards, torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
            steps = range(0, len(found.rewards), STRIDE)
            color, means = COLORS[arm], rewards.mean(dim=1)
            (shown[arm],) = axes.plot(steps, means, color=color, label=label(arm), linewidth=1.2)
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
        axes.set_title(textwrap.fill(setting, 60), fontsize=7)
        axes.set(ylim=(0, 1.02))
    figure.legend(
        list(shown.values()),
        [label(arm) for arm in shown],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=8,
    )
    _save(figure, path)


BOUND_COLORS = {"sampled": "#1E88E5", "limit": "#0D47A1", "distributions": "#FB8C00", "trivial": "#9E9E9E"}
BOUNDED_ARMS = ("none", "token_truncate", "sequence_truncate", "sequence_mask")


def draw_bounds(rows: list[BoundRow], path: Path) -> None:
    """bound / true bias: over the arms with the middle 90 % of the cases, and its median over the length."""
    figure = Figure(figsize=(13.0, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (bound, color) in enumerate(BOUND_COLORS.items()):
        for x, arm in enumerate(DRAWN):
            factors = looseness([row for row in rows if row["arm"] == arm], bound)
            at = x + 0.18 * (place - 1.5)
            left.plot(
                [at, at], [quantile(factors, 0.05), quantile(factors, 0.95)], color=color, linewidth=1.5
            )
            name = bound if x == 0 else None
            left.plot([at], [quantile(factors, 0.5)], marker="o", markersize=4, color=color, label=name)
    left.set_xticks(range(len(DRAWN)), [label(arm) for arm in DRAWN], rotation=35, ha="right", fontsize=7)
    left.set(yscale="log", ylabel="bound / bias", ylim=(0.8, None), title="over all cases: median, 5 to 95 %")
    lengths = sorted({row["length"] for row in rows})
    for arm in BOUNDED_ARMS:
        for bound, style in (("sampled", "-"), ("distributions", ":")):
            medians = [
                quantile(
                    looseness([row for row in rows if (row["arm"], row["length"]) == (arm, length)], bound),
                    0.5,
                )
                for length in lengths
            ]
            right.plot(lengths, medians, style, marker="o", color=COLORS[arm], label=f"{arm}: {bound}")
    right.set(yscale="log", xlabel="tokens of a response", title="median over the length")
    for axes in (left, right):
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.legend(fontsize=7, frameon=False, ncols=2)
    _save(figure, path)

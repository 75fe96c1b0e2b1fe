"""Turns a run's metrics into an overview PNG and into one SVG or PNG per panel (matplotlib, no display)."""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_rl_corr.commands.report.panels import (
    ALERT_SHADE,
    OVERVIEW_PANELS,
    PAGE_PANELS,
    Panel,
    Series,
    mark_steps,
    shade_steps,
)
from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.observability.alerts import alert_steps, summarise
from megatron_rl_corr.observability.early_warnings import find_warnings

OVERVIEW_NAME = "overview.png"
OVERVIEW_INCHES, PANEL_INCHES, DPI = (16.0, 11.0), (5.2, 3.4), 100
MAP_INCHES_WIDE, INCHES_A_LAYER, MAP_INCHES_MORE = 5.2, 0.16, 1.2
LONGEST_TITLE = 48
INK, SOFT_INK, FAINT = "#222222", "#666666", "#DDDDDD"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.8,
    "axes.labelcolor": SOFT_INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT_INK,
    "ytick.color": SOFT_INK,
    # A fixed salt and no date make the same run give the same bytes.
    "svg.hashsalt": "megatron_rl_corr",
    "savefig.facecolor": "white",
}


def write_overview(rows: Sequence[dict], path: str | os.PathLike, *, title: str = "") -> Path:
    """Write the nine panels as one 1600 x 1100 PNG.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
        path: the file.
        title: of the run; begins the headline.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError(f"no steps to plot into {path}; let the run finish at least one step")
    series = Series(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=OVERVIEW_INCHES, dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15, wspace=0.03, hspace=0.05)
        figure.suptitle(_headline(rows, title), x=0.012, ha="left", fontsize=13, parse_math=False)
        shaded, marked = steps_to_shade(rows), steps_to_mark(rows)
        texts = {"shaded: a step with an alert": shaded, "1, 2, ...: since then an early warning": marked}
        legend = "; ".join(text for text, steps in texts.items() if steps)
        if legend:
            figure.text(
                0.988,
                0.982,
                legend,
                ha="right",
                va="top",
                color=SOFT_INK,
                bbox={"facecolor": ALERT_SHADE, "edgecolor": "none", "pad": 4},
            )
        for axes, panel in zip(figure.subplots(3, 3).flat, OVERVIEW_PANELS, strict=True):
            _draw(axes, panel, series, shaded, marked)
        return write_atomically(path, render_figure(figure, "png"))


def render_panels(rows: Sequence[dict], *, kind: str = "svg") -> dict[str, bytes]:
    """The panels that have data, by name, each as the bytes of an image file.

    Args:
        rows: the run's steps, as `metrics_file.read_metrics` returns them.
        kind: svg or png.
    """
    series = Series(rows)
    shaded, marked = steps_to_shade(rows), steps_to_mark(rows)
    images = {}
    with matplotlib.rc_context(STYLE):
        for panel in PAGE_PANELS:
            if panel.has_data(series):
                figure = Figure(figsize=PANEL_INCHES, dpi=DPI, layout="constrained")
                _draw(figure.subplots(), panel, series, shaded, marked)
                images[panel.name] = render_figure(figure, kind)
    return images


def _draw(axes: Axes, panel: Panel, series: Series, shaded: Sequence[int], marked: Sequence[int]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=12, fontweight="bold", pad=40)
    _above(axes, panel.reading, offset=24, color=SOFT_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.set_xlabel("step")
    if not panel.has_data(series):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=SOFT_INK)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    panel.draw_on(axes, series)
    shade_steps(axes, shaded)
    mark_steps(axes, marked)
    # Half a step on both sides leaves room for bars and for the marker of a single step.
    axes.set_xlim(series.steps[0] - 0.5, series.steps[-1] + 0.5)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 0.99),
            ncols=5,
            frameon=False,
            fontsize=9,
            borderaxespad=0.2,
            handlelength=1.4,
            columnspacing=1.2,
            labelcolor=SOFT_INK,
        )


def _above(axes: Axes, text: str, *, offset: float, color: str) -> None:
    axes.annotate(
        text,
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, offset),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=9.5,
        color=color,
    )


def steps_to_shade(rows: Sequence[dict]) -> list[int]:
    """The steps with an alert, or none where they are so many that shading would only hide the curves."""
    steps = alert_steps(rows)
    return steps if 3 * len(steps) <= len(rows) else []


def steps_to_mark(rows: Sequence[dict]) -> list[int]:
    """The first steps of the early warnings, in order, as the page numbers them."""
    return [warning.first_step for warning in find_warnings(rows)]


def _headline(rows: Sequence[dict], title: str) -> str:
    title = title if len(title) <= LONGEST_TITLE else title[: LONGEST_TITLE - 1] + "…"
    summary = summarise(rows)
    parts = [f"{summary.steps} step{'s' if summary.steps != 1 else ''}"]
    if summary.first_reward is not None:
        parts.append(f"reward {summary.first_reward:.3g} → {summary.last_reward:.3g}")
    if summary.mean_kl is not None:
        parts.append(f"mean KL {summary.mean_kl:.1e}")
    if summary.max_abs_log_ratio is not None:
        parts.append(f"max |log-ratio| {summary.max_abs_log_ratio:.3g}")
    return (f"{title}:  " if title else "") + "   ·   ".join(parts)


def render_figure(figure: Figure, kind: str) -> bytes:
    """The bytes of an SVG or PNG file, the same for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def render_expert_map(table: np.ndarray, layers: Sequence[str], title: str) -> bytes:
    """A heat map of one value of every expert as the bytes of an SVG file.

    Args:
        table: [layers, experts], NaN where an expert has no token.
        layers: the layers' numbers, for the axis.
    """
    with matplotlib.rc_context(STYLE):
        size = (MAP_INCHES_WIDE, MAP_INCHES_MORE + INCHES_A_LAYER * len(layers))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        axes = figure.subplots()
        axes.grid(False)
        picture = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set(title=title, xlabel="expert", ylabel="layer")
        places = range(0, len(layers), max(1, len(layers) // 8))
        axes.set_yticks(list(places), [layers[place] for place in places])
        figure.colorbar(picture, ax=axes)
        return render_figure(figure, "svg")

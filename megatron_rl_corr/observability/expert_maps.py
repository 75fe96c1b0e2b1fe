"""Draws the last step's tables of every expert, layers x experts, where a run wrote experts.jsonl."""

import base64
import json
import os
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from megatron_rl_corr.observability.plots import DPI, STYLE, render_figure

FILE_NAME = "experts.jsonl"
INCHES_WIDE, INCHES_A_LAYER, INCHES_MORE = 5.2, 0.16, 1.2
TITLES = {
    "tokens": "Tokens", "log_ratio_abs_mean": "Mean |log-ratio|", "weight_mean": "Mean weight",
    "rejected_fraction": "Rejected fraction",
}  # fmt: skip


def expert_section(run_dir: str | os.PathLike) -> str:
    """The page's section of heat maps; empty for a run without the file. ValueError for a last line that is not one."""
    path = Path(run_dir) / FILE_NAME
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        return ""
    try:
        step = json.loads(lines[-1])
        tables = {name: np.array(step[name], dtype=float) for name in TITLES}
        layers = [str(layer) for layer in step["layers"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its last line holds no tables of experts: {error!r}; remove it") from error
    tags = []
    for name, title in TITLES.items():
        data = base64.b64encode(_drawn(tables[name], layers, title)).decode("ascii")
        text = escape(f"{title} of every expert, layers x experts", quote=True)
        tags.append(f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"></figure>')
    return f'<h2>Experts, step {int(step["step"])}</h2><div class="figures">{"".join(tags)}</div>'


def _drawn(table: np.ndarray, layers: list[str], title: str) -> bytes:
    with matplotlib.rc_context(STYLE):
        size = (INCHES_WIDE, INCHES_MORE + INCHES_A_LAYER * len(layers))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        axes = figure.subplots()
        axes.grid(False)
        picture = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set(title=title, xlabel="expert", ylabel="layer")
        places = range(0, len(layers), max(1, len(layers) // 8))
        axes.set_yticks(list(places), [layers[place] for place in places])
        figure.colorbar(picture, ax=axes)
        return render_figure(figure, "svg")

"""Writes a run's `report.html`: one file that needs nothing from the net, and `overview.png` beside it."""

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from megatron_rl_corr.commands.report.page_events import page_events
from megatron_rl_corr.commands.report.page_samples import page_samples
from megatron_rl_corr.commands.report.panels import PAGE_PANELS, plain_label
from megatron_rl_corr.commands.report.plots import (
    OVERVIEW_NAME,
    render_expert_map,
    render_panels,
    steps_to_shade,
    write_overview,
)
from megatron_rl_corr.engines.secrets import json_without_secrets
from megatron_rl_corr.files import CONFIG_NAME, write_atomically
from megatron_rl_corr.moe import statistics
from megatron_rl_corr.observability.alerts import Summary, find_alerts, finite_values, metric_names, summarise
from megatron_rl_corr.observability.catalogue import BINS, catalogue, grouped, label_of, spec_of, usual_range
from megatron_rl_corr.observability.early_warnings import find_warnings
from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics
from megatron_rl_corr.tables import readable, visible

PAGE_NAME, TEMPLATE_NAME = "report.html", "page.html.j2"


def write_page(run_dir: str | os.PathLike) -> Path:
    """Write the page and the overview of a run into its folder; each replaces its file in one move.

    Args:
        run_dir: holds metrics.jsonl, and run.json and experts.jsonl if the run wrote them; samples and events
            are found through run.json.

    Raises:
        FileNotFoundError: there is no such folder, or no metrics.jsonl in it.
        ValueError: metrics.jsonl has no steps, or it or run.json cannot be read. What else is there and
            can't be shown is left out, and the page says why.
    """
    run_dir = Path(run_dir)
    rows = _read_steps(run_dir)
    config = _read_config(run_dir / CONFIG_NAME)
    title = run_dir.resolve().name
    experts, samples = _expert_maps(run_dir / statistics.FILE_NAME), page_samples(run_dir)
    write_overview(rows, run_dir / OVERVIEW_NAME, title=title)
    # Autoescape, as names of metrics and values of settings come from the run; `visible`, as what turns the
    # direction of writing is no markup. An undefined name is an error.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(TEMPLATE_NAME).render(
        title=title,
        summary=_summary_entries(summarise(rows)),
        warnings=find_warnings(rows),
        alerts=find_alerts(rows),
        **_watched(rows),
        figures=_figures(rows),
        shaded=bool(steps_to_shade(rows)),
        experts=experts,
        samples=samples,
        events=page_events(run_dir),
        groups=_metric_groups(rows),
        config=config,
        config_name=CONFIG_NAME,
    )
    # A lone surrogate, which JSON can hold and UTF-8 can't, must not cost the page.
    return write_atomically(run_dir / PAGE_NAME, page.encode("utf-8", "replace"))


def flatten(settings: Mapping, prefix: str = "") -> dict[str, str]:
    """Nested settings as `outer.inner` names with values as text; an empty group stays visible as {}."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _read_steps(run_dir: Path) -> list[dict]:
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {run_dir}; give the folder that the run wrote into")
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no {FILE_NAME} in {run_dir}; give the folder that the run wrote into")
    rows = read_metrics(path)
    if not rows:
        raise ValueError(f"{path} holds no steps; let the run finish at least one step")
    return rows


def _read_config(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; repair or remove it") from error
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise ValueError(f"{path} must hold an object of settings, got {kind}; repair or remove it")
    return flatten(json_without_secrets(settings, os.environ))


def _summary_entries(summary: Summary) -> dict[str, str]:
    numbers = {
        "steps": summary.steps,
        "mean reward, first 5 steps": summary.first_reward,
        "mean reward, last 5 steps": summary.last_reward,
        "max |log-ratio|": summary.max_abs_log_ratio,
        "mean KL (k3)": summary.mean_kl,
        "last weight version": summary.weight_version,
    }
    return {label: readable(number) for label, number in numbers.items()}


def _watched(rows: Sequence[dict]) -> dict[str, Any]:
    """Whether any metric with a usual range was recorded, and the labels of those of every
    run that were not.
    """
    recorded = set(metric_names(rows))
    return {
        "any_watched": any(usual_range(name) for name in recorded),
        "unwatched": [
            label_of(name)
            for name, spec in catalogue().items()
            if spec.usual and not spec.only_with and name not in recorded
        ],
    }


def _figure(description: str, svg: bytes) -> dict[str, str]:
    """An image of its own, so that the names inside one SVG cannot meet another's."""
    return {"alt": description, "src": f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"}


def _figures(rows: Sequence[dict]) -> list[dict[str, str]]:
    images = render_panels(rows)
    panels = [panel for panel in PAGE_PANELS if panel.name in images]
    return [_figure(f"{panel.title}: {panel.reading}", images[panel.name]) for panel in panels]


def _expert_maps(path: Path) -> dict[str, Any] | None:
    """Heat maps of the last whole line in experts.jsonl; None for a run without the file, or
    before its first line.

    The last line may be half written, as of a run that is training or was killed.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    if not lines:
        return None
    try:
        step = json.loads(lines[-1])
        tables = {name: np.array(step[name], dtype=float) for name in statistics.COLUMNS}
        layers = [plain_label(str(layer)) for layer in step["layers"]]
        figures = [
            _figure(
                f"{title} of every expert, layers x experts", render_expert_map(tables[name], layers, title)
            )
            for name, title in statistics.COLUMNS.items()
        ]
        return {"why_not": None, "step": int(step["step"]), "figures": figures}
    except (ValueError, KeyError, TypeError) as error:
        return {"why_not": f"{path}: its last line holds no tables of experts: {error!r}"}


def _metric_groups(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """The rows of the table of metrics by heading; the bins of |log-ratio| are a figure instead."""
    shown = [name for name in metric_names(rows) if name != "step" and not name.startswith(BINS)]
    return {group: [_metric_row(rows, name) for name in names] for group, names in grouped(shown).items()}


def _metric_row(rows: Sequence[dict], name: str) -> dict[str, Any]:
    """First, last, smallest and largest finite value of a metric, and what it means."""
    recorded = [row[name] for row in rows if name in row]
    finite = finite_values(rows, name)
    values = (recorded[0], recorded[-1], min(finite, default=None), max(finite, default=None))
    return {
        "name": name,
        "cells": list(_cells(name, values)),
        "usual": usual_range(name),
        "spec": spec_of(name),
    }


def _cells(name: str, values: Iterable[float | None]) -> Iterable[dict[str, Any]]:
    usual = usual_range(name)
    for value in values:
        bad = usual is not None and value is not None and usual.excludes(value)
        yield {"text": readable(value), "bad": bad}

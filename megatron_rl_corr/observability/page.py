"""Writes a run's `report.html`: one file that needs nothing from the net, and `overview.png` beside it."""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megatron_rl_corr.observability import markup
from megatron_rl_corr.observability.atomic import write_atomically
from megatron_rl_corr.observability.expert_maps import expert_section
from megatron_rl_corr.observability.findings import find_alerts, summarise
from megatron_rl_corr.observability.metrics_file import CONFIG_NAME, FILE_NAME, read_metrics
from megatron_rl_corr.observability.plots import OVERVIEW_NAME, render_panels, steps_to_shade, write_overview

PAGE_NAME = "report.html"


def write_page(run_dir: str | os.PathLike) -> Path:
    """Read `metrics.jsonl` (and `run.json`, if there) in `run_dir`, write the page and the overview into it.

    Both files are replaced in one move. FileNotFoundError for a missing folder or metrics file, ValueError
    for one without steps or with a line that cannot be read.
    """
    run_dir = Path(run_dir)
    rows = _read_steps(run_dir)
    config = _read_config(run_dir / CONFIG_NAME)
    title = run_dir.resolve().name
    write_overview(rows, run_dir / OVERVIEW_NAME, title=title)
    page = _page(title, rows, config, render_panels(rows), expert_section(run_dir))
    return write_atomically(run_dir / PAGE_NAME, page.encode("utf-8"))


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
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; repair or remove it") from error
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise ValueError(f"{path} must hold an object of settings, got {kind}; repair or remove it")
    return flatten(settings)


def _page(
    title: str, rows: Sequence[dict], config: Mapping[str, str], images: Mapping[str, bytes], experts: str
) -> str:
    body = (
        f"<h1>{escape(title)}</h1>"
        + markup.summary_line(summarise(rows))
        + "<h2>Findings</h2>"
        + markup.findings_list(find_alerts(rows), rows)
        + "<h2>Curves</h2>"
        + markup.figures(images, shaded=bool(steps_to_shade(rows)))
        + experts
        + "<h2>Metrics</h2>"
        + markup.metrics_table(rows)
        + "<h2>Configuration</h2>"
        + markup.config_table(config, CONFIG_NAME)
    )
    return markup.document(title, body)

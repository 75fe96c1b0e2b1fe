"""Turns summaries, findings, plots and tables into HTML; every text from a run is escaped here."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from megatron_rl_corr.observability.bins import bins_of
from megatron_rl_corr.observability.catalogue import MEANINGS, label_of, meaning_of, usual_range
from megatron_rl_corr.observability.findings import Finding, Summary, finite_values, metric_names
from megatron_rl_corr.observability.panels import PAGE_PANELS
from megatron_rl_corr.observability.values import readable

# The policy forbids scripts and everything from the net, whatever a metric or a setting is called.
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #222; background: #fff;
  max-width: 1180px; margin: 2rem auto; padding: 0 1.25rem; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .75rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.25rem 0 .75rem; }}
.summary {{ display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 0; padding: .9rem 0;
  border-block: 1px solid #ddd; }}
.summary dt {{ color: #666; font-size: .85rem; }}
.summary dd {{ margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }}
.findings {{ list-style: none; margin: 0; padding: 0; }}
.findings li {{ border-left: 4px solid #D55E00; background: #fdf5f0; margin: .6rem 0; padding: .6rem 1rem; }}
.findings li.good {{ border-color: #009E73; background: #f0f8f5; }}
.findings p {{ margin: .25rem 0 0; color: #444; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1.25rem; }}
.figures figure {{ margin: 0; }}
.figures img {{ width: 100%; height: auto; display: block; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th, td {{ text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0;
  border-bottom: 1px solid #e6e6e6; }}
th {{ color: #666; font-weight: 600; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
td.bad {{ color: #B34700; font-weight: 600; }}
code {{ font: .92em ui-monospace, Menlo, Consolas, monospace; }}
td code {{ white-space: nowrap; }}
.soft {{ color: #666; }}
.break code {{ white-space: normal; overflow-wrap: anywhere; }}
</style></head>
<body>
"""


def document(title: str, body: str) -> str:
    return HEAD.format(title=escape(title)) + body + "\n</body></html>\n"


def summary_line(summary: Summary) -> str:
    """The run in six numbers."""
    entries = {
        "steps": readable(summary.steps),
        "mean reward, first 5 steps": readable(summary.first_reward),
        "mean reward, last 5 steps": readable(summary.last_reward),
        "max |log-ratio|": readable(summary.max_abs_log_ratio),
        "mean KL (k3)": readable(summary.mean_kl),
        "last weight version": readable(summary.weight_version),
    }
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in entries.items())
    return f'<dl class="summary">{"".join(items)}</dl>'


def findings_list(findings: Sequence[Finding], rows: Sequence[dict]) -> str:
    """What left its usual range, or that nothing did; and which watched metrics were not recorded."""
    recorded = set(metric_names(rows))
    watched = [name for name in MEANINGS if usual_range(name)]
    items = [f"<li>{escape(finding.sentence)}<p>{escape(finding.remedy)}</p></li>" for finding in findings]
    if not findings and recorded.intersection(watched):
        items = ['<li class="good">Every watched metric stayed in its usual range.</li>']
    missing = escape(", ".join(label_of(name) for name in watched if name not in recorded))
    note = f'<p class="soft">Not recorded, so not watched: {missing}.</p>' if missing else ""
    return f'<ul class="findings">{"".join(items)}</ul>{note}'


def figures(images: Mapping[str, bytes], *, shaded: bool) -> str:
    """The panels' SVGs, embedded; as images, so that the names inside one SVG cannot meet another's."""
    tags = []
    for panel in PAGE_PANELS:
        if panel.name in images:
            data = base64.b64encode(images[panel.name]).decode("ascii")
            text = escape(f"{panel.title}: {panel.reading}", quote=True)
            tags.append(f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"></figure>')
    note = '<p class="soft">A pale band marks a step with an alert.</p>' if shaded else ""
    return f'<div class="figures">{"".join(tags)}</div>{note}'


def metrics_table(rows: Sequence[dict]) -> str:
    """First, last, smallest and largest finite value of every metric, and what it means; bins are a figure instead."""
    head = ('<tr><th>metric</th><th class="n">first</th><th class="n">last</th><th class="n">min</th>'
            '<th class="n">max</th><th class="n">usually</th><th>meaning</th></tr>')
    names = metric_names(rows)
    hidden = {"step", *bins_of(names)}
    lines = "".join(_metric_row(rows, name) for name in names if name not in hidden)
    return f'<div class="wide"><table>{head}{lines}</table></div>'


def _metric_row(rows: Sequence[dict], name: str) -> str:
    recorded = [row[name] for row in rows if name in row]
    finite = finite_values(rows, name)
    usual = usual_range(name)
    cells = ""
    for value in (recorded[0], recorded[-1], min(finite, default=None), max(finite, default=None)):
        bad = " bad" if usual and value is not None and usual.excludes(value) else ""
        cells += f'<td class="n{bad}">{escape(readable(value))}</td>'
    meaning = meaning_of(name)
    text = escape(meaning.text) if meaning else '<span class="soft">not described</span>'
    if meaning and meaning.formula:
        text += f' <span class="soft">[{escape(meaning.formula)}]</span>'
    expected = escape(str(usual)) if usual else ""
    return f'<tr><td><code>{escape(name)}</code></td>{cells}<td class="n">{expected}</td><td>{text}</td></tr>'


def config_table(config: Mapping[str, str], source: str) -> str:
    """The run's settings, one a line."""
    if not config:
        return f'<p class="soft">No {escape(source)} in the run\'s folder.</p>'
    lines = "".join(
        f'<tr><td><code>{escape(name)}</code></td><td class="break"><code>{escape(value)}</code></td></tr>'
        for name, value in config.items()
    )
    return f'<div class="wide"><table><tr><th>setting</th><th>value</th></tr>{lines}</table></div>'

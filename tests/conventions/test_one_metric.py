"""A new metric costs one file: described where it is computed, it appears in everything that shows metrics.

The patch adds a metric to one module of a copy of the package, and a process that imports the copy shows it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PATCHED = "megatron_rl_corr/core/correction.py"
PATCH = """

import dataclasses
import torch
from megatron_rl_corr.core.metric_spec import Column, MetricSpec, UsualRange
from megatron_rl_corr.reduce.metrics import Mean

METRICS = (
    MetricSpec(
        "rollout_corr/made_up", "weights above 1", "tokens with w > 1 / tokens", "made up",
        UsualRange("made-up weights are large", "Make up smaller ones.", high=0.5),
        group="Importance weights", column=Column(8, "{:.1%}".format), compared=True,
    ),
)
_before = compute_correction


def compute_correction(*args, **kwargs):
    correction = _before(*args, **kwargs)
    above = torch.stack([(correction.weights > 1).sum(), torch.tensor(correction.weights.numel())]).double()
    return dataclasses.replace(correction, metrics=correction.metrics | {"made_up": Mean(above)})
"""

SHOW = """
import importlib.util, io, json, sys, tempfile
from pathlib import Path
import torch
import megatron_rl_corr
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.commands.correct.compare import KeptBatch, comparison
from megatron_rl_corr.observability.console import LiveTable
from megatron_rl_corr.observability.metrics_file import FILE_NAME, MetricsFile
from megatron_rl_corr.commands.report.page import write_page

assert megatron_rl_corr.__file__.startswith(sys.argv[1])
config = RolloutCorrectionConfig.from_preset("decoupled_token_is")
# rho: 1, 4, 1/2, 2 -> weights 1, 2, 1/2, 2: two of four are above 1.
batch = KeptBatch(
    torch.tensor([0.5, 0.4, 0.1, 0.2]).log(),
    torch.tensor([0.5, 0.1, 0.2, 0.1]).log(),
    torch.ones(4, dtype=torch.bool),
    torch.tensor([0, 0, 1, 1]),
    2,
    None,
    None,
)
numbers = batch.metrics(config)
console = io.StringIO()
LiveTable(stream=console).row({"step": 1, **numbers, "rollout_corr/made_up": 0.75})
run = Path(tempfile.mkdtemp(dir=sys.argv[1]))
file = MetricsFile(run / FILE_NAME)
file.write({"step": 1, **numbers})
spec = importlib.util.spec_from_file_location("generate_docs", Path(sys.argv[1]) / "scripts/generate_docs.py")
generate_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate_docs)
shown = {
    "value": numbers.get("rollout_corr/made_up"),
    "console": console.getvalue(),
    "page": write_page(run).read_text(),
    "docs": generate_docs.metrics_page(),
    "compared": comparison({"x": numbers}),
}
print(json.dumps(shown))
"""


def show(folder: Path) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", SHOW, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy").resolve()
    for name in ("megatron_rl_corr", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_metric_when_described_where_it_is_computed_then_every_place_shows_it(copy):
    file = copy / PATCHED
    file.write_text(file.read_text() + PATCH)
    shown = show(copy)
    assert shown["value"] == 0.5
    header, row, *explained = shown["console"].splitlines()
    assert header.index("ESS") < header.index("kept") and " made up " in header and "75.0%!" in row
    assert "[rl-corr] ! made up 0.75, usually at most 0.5: made-up weights are large" in explained
    assert (
        "<code>rollout_corr/made_up</code>" in shown["page"]
        and "[tokens with w &gt; 1 / tokens]" in shown["page"]
    )
    line = "| `rollout_corr/made_up` | weights above 1 | `tokens with w > 1 / tokens` | at most 0.5 |"
    heading = shown["docs"].index("## Importance weights")
    assert heading < shown["docs"].index(line) < shown["docs"].index("## Rejection")
    assert (
        "**`rollout_corr/made_up`** (at most 0.5): made-up weights are large. Make up smaller ones."
        in shown["docs"]
    )
    assert ["made", "up", "0.5"] in [row.split() for row in shown["compared"].splitlines()]

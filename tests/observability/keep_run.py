"""Keeps of a run's metrics.jsonl what early warnings are made of: keep_run.py METRICS.jsonl NAME [STEPS]

Writes runs/NAME.jsonl, of the first STEPS steps, with five significant digits.
"""

import math
import sys
from pathlib import Path

from megatron_rl_corr.observability.early_warnings import TRENDS
from megatron_rl_corr.observability.metrics_file import encode_line, read_metrics

RUNS = Path(__file__).resolve().parent / "runs"


def main(source, name, steps="1000000"):
    names = ("step", *sorted({metric for trend in TRENDS for metric in trend.metrics}))
    rows = [
        {metric: row[metric] for metric in names if metric in row}
        for row in read_metrics(source)[: int(steps)]
    ]
    short = [
        {
            name: float(f"{value:.5g}") if isinstance(value, float) and math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]
    (RUNS / f"{name}.jsonl").write_text("".join(map(encode_line, short)))


if __name__ == "__main__":
    main(*sys.argv[1:])

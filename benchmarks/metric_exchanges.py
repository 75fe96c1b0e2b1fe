"""Other ways to bring metrics together over a group, to be compared with the package's two all-reduces.

P packed partial values.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.reduce.collectives import all_gather_stacked, all_reduce_metrics
from megatron_rl_corr.reduce.metrics import Metric

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def one_gather(metrics: dict[str, Metric], group: ProcessGroup) -> dict[str, float]:
    """All values of all ranks on each: one collective, but R times P values on R ranks."""
    names = sorted(metrics)
    gathered = all_gather_stacked(torch.cat([metrics[name].values for name in names]), group)
    rows = {"sum": gathered.sum(dim=0), "max": gathered.amax(dim=0), "min": gathered.amin(dim=0)}
    sizes = [metrics[name].values.numel() for name in names]
    pieces = {kind: dict(zip(names, row.split(sizes), strict=True)) for kind, row in rows.items()}
    return _numbers(metrics, {name: pieces[metrics[name].reduction][name] for name in names})


def one_per_metric(metrics: dict[str, Metric], group: ProcessGroup) -> dict[str, float]:
    """As a training loop logs key after key."""
    done = {name: metric.values.clone() for name, metric in metrics.items()}
    for name in sorted(metrics):
        if group.size() > 1:
            dist.all_reduce(done[name], OPERATIONS[metrics[name].reduction], group)
    return _numbers(metrics, done)


WAYS = {
    "two all-reduces (this package)": all_reduce_metrics,
    "one gather": one_gather,
    "one all-reduce per metric": one_per_metric,
}


def check_equal(way: str, numbers: dict[str, float], expected: dict[str, float]) -> None:
    """All ways are exact but for the order of additions."""
    for name, value in expected.items():
        same = math.isnan(value) and math.isnan(numbers[name])
        if not same and not math.isclose(numbers[name], value, rel_tol=1e-9, abs_tol=1e-9):
            raise SystemExit(f"{name}: {value} by two all-reduces, {numbers[name]} by {way}")


def _numbers(metrics: dict[str, Metric], done: dict[str, torch.Tensor]) -> dict[str, float]:
    numbers = {}
    for name, metric in metrics.items():
        numbers |= metric.numbers(name, done[name].tolist())
    return numbers

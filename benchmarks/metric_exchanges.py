"""Other ways to bring metrics together over a group, to be compared with the package's one gather.

P packed partial values.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.parallel.reduce import all_gather_metrics

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def two_all_reduces(metrics: dict[str, Metric], group: ProcessGroup) -> dict[str, float]:
    """One for all sums, one for all extrema, with minima negated: P values however many ranks there are."""
    names, done = sorted(metrics, key=lambda name: (metrics[name].reduction != "sum", name)), {}
    sums = [name for name in names if metrics[name].reduction == "sum"]
    for part, operation in ((sums, "sum"), (names[len(sums):], "max")):
        sign = [-1.0 if metrics[name].reduction == "min" else 1.0 for name in part]
        packed = torch.cat([metrics[name].values * s for name, s in zip(part, sign, strict=True)])
        if group.size() > 1:
            dist.all_reduce(packed, OPERATIONS[operation], group)
        pieces = packed.split([metrics[name].values.numel() for name in part])
        done |= {name: piece * s for name, piece, s in zip(part, pieces, sign, strict=True)}
    return _numbers(metrics, done)


def one_per_metric(metrics: dict[str, Metric], group: ProcessGroup) -> dict[str, float]:
    """As a training loop logs key after key."""
    done = {name: metric.values.clone() for name, metric in metrics.items()}
    for name in sorted(metrics):
        if group.size() > 1:
            dist.all_reduce(done[name], OPERATIONS[metrics[name].reduction], group)
    return _numbers(metrics, done)


WAYS = {"one gather (this package)": all_gather_metrics, "two all-reduces": two_all_reduces,
        "one all-reduce per metric": one_per_metric}  # fmt: skip


def check_equal(way: str, numbers: dict[str, float], expected: dict[str, float]) -> None:
    """All ways are exact but for the order of additions."""
    for name, value in expected.items():
        same = math.isnan(value) and math.isnan(numbers[name])
        if not same and not math.isclose(numbers[name], value, rel_tol=1e-9, abs_tol=1e-9):
            raise SystemExit(f"{name}: {value} by one gather, {numbers[name]} by {way}")


def _numbers(metrics: dict[str, Metric], done: dict[str, torch.Tensor]) -> dict[str, float]:
    numbers = {}
    for name, metric in metrics.items():
        numbers |= metric.numbers(name, done[name].tolist())
    return numbers

"""Writes a step's metrics as TensorBoard scalars, and the sizes of log-ratios as a histogram."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_rl_corr.observability.bins import bins_of
from megatron_rl_corr.observability.values import host_number

HISTOGRAM = "rollout_corr/log10_log_ratio_abs"


def open_writer(run_dir: str | os.PathLike):
    """A SummaryWriter in the run's `tensorboard` folder, for a trainer that has none of its own."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(Path(run_dir) / "tensorboard"))


def write_scalars(writer, metrics: Mapping[str, int | float], step: int) -> None:
    """Write every metric under its own name at `step`; `writer` is any SummaryWriter, such as Megatron's own.

    `step` itself is the axis, not a curve; the bins of |log-ratio| are one histogram, not curves. TypeError for a
    value that is not a number of the host.
    """
    bins = bins_of(metrics)
    for name, value in metrics.items():
        number = host_number(name, value)
        if name != "step" and name not in bins:
            writer.add_scalar(name, number, step)
    shares = [metrics[name] for name in bins]
    if shares and math.isfinite(sum(shares)):
        _write_histogram(writer, list(bins.values()), shares, metrics["rollout_corr/valid_tokens"], step)


def _write_histogram(writer, ends: list[float], shares: list[float], tokens: float, step: int) -> None:
    """Over log10 |D|, as its bins are even there; the lowest bin, open below, and the highest are a decade wide."""
    limits = [math.log10(end) for end in ends[:-1]]
    limits.append(limits[-1] + 1)
    middles = [limits[0] - 0.5, *((low + high) / 2 for low, high in zip(limits[:-1], limits[1:], strict=True))]
    counts = [share * tokens for share in shares]
    writer.add_histogram_raw(
        HISTOGRAM, min=limits[0] - 1, max=limits[-1], num=tokens, bucket_limits=limits, bucket_counts=counts,
        sum=sum(at * count for at, count in zip(middles, counts, strict=True)),
        sum_squares=sum(at * at * count for at, count in zip(middles, counts, strict=True)),
        global_step=step,
    )

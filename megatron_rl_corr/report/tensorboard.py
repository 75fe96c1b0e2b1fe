"""Writes a step's metrics as TensorBoard scalars."""

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_rl_corr.report.values import host_number


def open_writer(run_dir: str | os.PathLike):
    """A SummaryWriter in the run's `tensorboard` folder, for a trainer that has none of its own."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(Path(run_dir) / "tensorboard"))


def write_scalars(writer, metrics: Mapping[str, int | float], step: int) -> None:
    """Write every metric under its own name at `step`; `writer` is any SummaryWriter, such as Megatron's own.

    `step` itself is the axis, not a curve. TypeError for a value that is not a number of the host.
    """
    for name, value in metrics.items():
        if name != "step":
            writer.add_scalar(name, host_number(name, value), step)

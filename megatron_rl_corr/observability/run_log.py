"""Where a run's numbers go: the live table, metrics.jsonl and TensorBoard; opened at the
first step's report.
"""

import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl_corr.engines.secrets import json_without_secrets
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import CONFIG_NAME, refuse_link, write_atomically
from megatron_rl_corr.observability.catalogue import bins_of
from megatron_rl_corr.observability.console import LiveTable
from megatron_rl_corr.observability.early_warnings import TrendWatch
from megatron_rl_corr.observability.launch_record import LAUNCHES, earlier_launches
from megatron_rl_corr.observability.metrics_file import FILE_NAME, MetricsFile, host_number, read_metrics

HISTOGRAM = "rollout_corr/log10_log_ratio_abs"
"""TensorBoard's name for the histogram of |log-ratio|; every other metric has its own name."""

logger = logging.getLogger(__name__)


class RunLog:
    """`write(metrics)` once a step. Nothing is written outside log_dir; without one there is only the table.

    writer is the trainer's own SummaryWriter; without it, one is opened in log_dir. settings (dataclasses
    by name) go to run.json, which the report page shows, and launch with them: `launch_record` with the
    `first_step` of this start.
    """

    def __init__(
        self,
        log_dir: str | None,
        settings: Mapping[str, object],
        writer=None,
        launch: Mapping[str, Any] | None = None,
    ):
        self._table = LiveTable(stream=sys.stdout)
        self._file = None
        self._watch: TrendWatch | None = None
        self._writer = writer
        if log_dir is None:
            return
        folder = Path(log_dir)
        self._file = MetricsFile(folder / FILE_NAME)
        named = {name: dataclasses.asdict(value) for name, value in settings.items()}
        plain = json_without_secrets(named, os.environ)
        if launch is not None:
            plain[LAUNCHES] = [*earlier_launches(folder / CONFIG_NAME, launch["first_step"]), launch]
        write_atomically(folder / CONFIG_NAME, (json.dumps(plain, indent=2) + "\n").encode())
        if writer is None:
            self._writer = open_writer(folder)

    def write(self, metrics: Mapping[str, int | float]) -> None:
        """Print one step, and append it to the files that there are.

        Args:
            metrics: by their logged names, `step` among them.

        Raises:
            TypeError, ValueError: as `MetricsFile.write`.
        """
        self._table.row(metrics)
        self._warn(metrics)
        if self._file is not None:
            self._file.write(metrics)
        if self._writer is not None:
            write_scalars(self._writer, metrics, int(metrics["step"]))
            self._writer.flush()

    def _warn(self, metrics: Mapping[str, int | float]) -> None:
        """Print and tell the warnings that begin or end with this step."""
        step = int(metrics["step"])
        # a restart, which goes on behind the steps of the file
        if self._watch is None or step <= self._watch.step:
            self._watch = TrendWatch(self._rows_before(step))
        for warning in self._watch.add(metrics):
            self._table.warn(warning)
            kind = "warning_began" if warning.last_step is None else "warning_ended"
            EVENTS.tell(kind, warning.sentence, warning=warning.trend.name)

    def _rows_before(self, step: int) -> list[dict]:
        if self._file is None:
            return []
        try:
            return [row for row in read_metrics(self._file.path) if row["step"] < step]
        except ValueError as error:
            logger.warning(
                "trends are of the steps from %d on, as earlier ones can't be read: %s", step, error
            )
            return []


def open_writer(run_dir: str | os.PathLike):
    """A SummaryWriter in the run's `tensorboard` folder, for a trainer that has none of its own."""
    from torch.utils.tensorboard import SummaryWriter

    refuse_link(Path(run_dir) / "tensorboard")
    return SummaryWriter(str(Path(run_dir) / "tensorboard"))


def write_scalars(writer, metrics: Mapping[str, int | float], step: int) -> None:
    """Write every metric under its own name; the bins of |log-ratio| are one histogram, not curves.

    Args:
        writer: any SummaryWriter, such as Megatron's own.
        metrics: by their logged names; `step` among them is the axis, not a curve.
        step: at which they are written.

    Raises:
        TypeError: a value is no number of the host.
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
    """Over log10 |D|, as its bins are even there; the lowest bin, open below, and the highest
    are a decade wide.
    """
    limits = [math.log10(end) for end in ends[:-1]]
    limits.append(limits[-1] + 1)
    middles = [
        limits[0] - 0.5,
        *((low + high) / 2 for low, high in zip(limits[:-1], limits[1:], strict=True)),
    ]
    counts = [share * tokens for share in shares]
    writer.add_histogram_raw(
        HISTOGRAM,
        min=limits[0] - 1,
        max=limits[-1],
        num=tokens,
        bucket_limits=limits,
        bucket_counts=counts,
        sum=sum(at * count for at, count in zip(middles, counts, strict=True)),
        sum_squares=sum(at * at * count for at, count in zip(middles, counts, strict=True)),
        global_step=step,
    )

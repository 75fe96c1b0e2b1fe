"""Where a run's numbers go: the live table, metrics.jsonl and TensorBoard; opened at the first step's report."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_rl_corr.observability.atomic import write_atomically
from megatron_rl_corr.observability.metrics_file import CONFIG_NAME, FILE_NAME, MetricsFile
from megatron_rl_corr.observability.table import LiveTable
from megatron_rl_corr.observability.tensorboard import open_writer, write_scalars


class RunLog:
    """`write(metrics)` once a step. Nothing is written outside log_dir; without one there is only the table.

    writer is the trainer's own SummaryWriter; without it, one is opened in log_dir. settings (dataclasses by name) go
    to run.json, which the report page shows.
    """

    def __init__(self, log_dir: str | None, settings: Mapping[str, object], writer=None):
        self._table = LiveTable(stream=sys.stdout)
        self._file = None
        self._writer = writer
        if log_dir is None:
            return
        folder = Path(log_dir)
        self._file = MetricsFile(folder / FILE_NAME)
        plain = {name: dataclasses.asdict(value) for name, value in settings.items()}
        write_atomically(folder / CONFIG_NAME, (json.dumps(plain, indent=2) + "\n").encode())
        if writer is None:
            self._writer = open_writer(folder)

    def write(self, metrics: Mapping[str, int | float]) -> None:
        self._table.row(metrics)
        if self._file is not None:
            self._file.write(metrics)
        if self._writer is not None:
            write_scalars(self._writer, metrics, int(metrics["step"]))
            self._writer.flush()

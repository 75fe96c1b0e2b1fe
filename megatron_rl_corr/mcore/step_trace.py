"""--rollout-trace: the times of each batch's samples and of the steps made of them, in a file per replica."""

from __future__ import annotations

import re
import time
from pathlib import Path

from megatron_rl_corr.mcore.batch_collector import BatchCollector
from megatron_rl_corr.mcore.step_metrics import StepTimes
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.trace import clock
from megatron_rl_corr.rollout.trace_file import Phase, write_trace

NAME = re.compile(r"step_(\d+)_replica(\d+)\.json")
"""Of a batch's file: its first step, and the replica."""


class StepTrace:
    """Writes FOLDER/step_000001_replica0.json and so on, from each replica's data leader.

    Args:
        folder: --rollout-trace.
        layout: this rank's process groups.
        updates: steps that a batch makes.
    """

    def __init__(self, folder: str, layout: Layout, updates: int):
        self._folder, self._layout, self._updates = Path(folder), layout, updates
        self._base, self._base_unix = clock(), time.time()
        self._steps: dict[int, list[Phase]] = {}
        if layout.is_data_leader:
            self._folder.mkdir(parents=True, exist_ok=True)

    def end_step(self, step: int, times: StepTimes, collector: BatchCollector) -> None:
        """Note the parts of a step, from 1; after a batch's last one its file is written.

        Raises:
            OSError: it can't be written.
        """
        if not self._layout.is_data_leader:
            return
        self._steps[step] = times.phases
        if step % self._updates:
            return
        first, steps = min(self._steps), self._steps
        self._steps = {}
        path = self._folder / f"step_{first:06d}_replica{self._layout.dp_rank}.json"
        facts = {
            "clock": "time.perf_counter of this replica's leader",
            "base_unix_s": self._base_unix,
            "replica": self._layout.dp_rank,
            "replicas": self._layout.dp_size,
        }
        try:
            write_trace(path, collector.traces, steps, taken=collector.taken_at, base=self._base, facts=facts)
        except OSError as error:
            raise OSError(f"--rollout-trace {self._folder}: {error}") from error

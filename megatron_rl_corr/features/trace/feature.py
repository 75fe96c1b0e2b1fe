"""--rollout-trace: the times of each batch's samples and of the steps made of them, in a file per replica."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore.feature import EndedStep, Feature, RunParts
from megatron_rl_corr.rollout.trace import clock
from megatron_rl_corr.rollout.trace_file import Phase, write_trace


class TraceFeature(Feature):
    """Writes FOLDER/step_000001_replica0.json and so on, from each replica's data leader."""

    needs_traces = True

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._folder, self._run = Path(options.trace), None
        self._steps: dict[int, list[Phase]] = {}

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.trace is not None

    def open(self, run: RunParts) -> None:
        self._run, self._base, self._base_unix = run, clock(), time.time()
        if run.settings.layout.is_data_leader:
            self._folder.mkdir(parents=True, exist_ok=True)

    def end_step(self, ended: EndedStep) -> None:
        """Note the parts of a step; after a batch's last one its file is written.

        Raises:
            OSError: it can't be written.
        """
        layout, collector = self._run.settings.layout, self._run.collector
        if not layout.is_data_leader:
            return
        self._steps[ended.number] = ended.times.phases
        if ended.number % self.options.updates_of_batch:
            return
        first, steps = min(self._steps), self._steps
        self._steps = {}
        path = self._folder / f"step_{first:06d}_replica{layout.dp_rank}.json"
        facts = {
            "clock": "time.perf_counter of this replica's leader",
            "base_unix_s": self._base_unix,
            "replica": layout.dp_rank,
            "replicas": layout.dp_size,
        }
        try:
            write_trace(path, collector.traces, steps, taken=collector.taken_at, base=self._base, facts=facts)
        except OSError as error:
            raise OSError(f"--rollout-trace {self._folder}: {error}") from error


FEATURE = TraceFeature

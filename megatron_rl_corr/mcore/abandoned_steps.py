"""What an earlier attempt wrote of steps that this one does anew is removed at the start: rows, samples, traces.

So each step is once in metrics.jsonl and experts.jsonl, and no sample file is of weights that the run has given up.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.files import METRICS_NAME
from megatron_rl_corr.mcore.step_trace import NAME as TRACE
from megatron_rl_corr.moe.statistics import FILE_NAME as EXPERTS_NAME
from megatron_rl_corr.parallel.failure import StartupError, all_reduce_failure
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout.abandoned import drop_files, drop_rows
from megatron_rl_corr.rollout.sample_folder import NAME as SAMPLES


def all_reduce_drop_abandoned(options: RunConfig, layout: Layout, iteration: int) -> None:
    """Remove what an earlier attempt wrote of the steps after `iteration`; every rank calls it, as the last of a start.

    Each rank removes where it writes itself. A run that begins at step 0 removes nothing, as a folder that was named by
    mistake may hold another run's samples; only where torchrun has restarted it, what is there is its own.

    Raises:
        StartupError: on one rank, where a file can't be read or replaced; on the others PeerFailure.
    """
    error = None
    if iteration > 0 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        try:
            if layout.is_job_reporter and options.log_dir is not None:
                for name in (METRICS_NAME, EXPERTS_NAME):
                    _tell(Path(options.log_dir, name), "rows", drop_rows(Path(options.log_dir, name), iteration))
            if layout.is_data_leader:
                for folder, names in ((options.save_trajectories, SAMPLES), (options.trace, TRACE)):
                    if folder is not None:
                        _tell(Path(folder), "files", len(drop_files(Path(folder), names, iteration)))
        except OSError as failure:
            error = StartupError(
                f"what an earlier attempt wrote of steps after {iteration} can't be removed: {failure}; make it "
                "writable, or name another folder"
            )
    all_reduce_failure(error)


def _tell(path: Path, what: str, count: int) -> None:
    if count:
        print(f"[rollout] {path}: {count} {what} of steps that are done anew were removed", flush=True)
        EVENTS.tell("files_dropped", f"{what} of steps that are done anew", path=str(path), **{what: count})

"""Training from the samples of an earlier run, without servers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options, option

SAMPLE_FILES = r"step_(\d+)_replica(\d+)\.parquet"
"""Names of the files that a replay reads, a regular expression: first step and replica."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Options):
    """Replay: training from the samples of an earlier run, without servers."""

    replay: str | None = option(None, metavar="DIR")
    """Train on the samples that `save_trajectories` wrote to DIR, each step on those of the same step, to
    debug the trainer alone: without servers, prompts and rewards, and with nothing pushed. Any parallel
    layout will do; the temperature and what else samples were drawn with must be given as it was.
    """


def last_replayed(iteration: int, train_iters: int, exit_interval: int | None) -> int:
    """The iteration that a replay ends behind: it needs no samples of what --exit-interval leaves out.

    Args:
        iteration: that it begins at.
        train_iters: the schedule's.
        exit_interval: the run ends at a multiple of it; None or 0: only at the schedule's end.
    """
    if not exit_interval:
        return train_iters
    return min(train_iters, (iteration // exit_interval + 1) * exit_interval)

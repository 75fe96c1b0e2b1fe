"""Writes each step's numbers once, with those of the evaluation that was started after it.

Without samples ahead of training an evaluation is waited for at once. With them the trainer goes on with
the next step, and waits before the next push, which would change the weights: an evaluation is of one
version of them. The numbers of the step that it belongs to wait with it, and behind them those of the
steps that end meanwhile, the first updates of the next batch: a file whose steps go back is read as that
of a run which began again from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from megatron_rl_corr.mcore.evaluate import Evaluation, RunningEvaluation

Write = Callable[[dict[str, float]], None]


class StepReports:
    """The numbers of a run's steps, on every rank; they are empty but on the one that reports.

    Args:
        write: takes a step's numbers, on the rank that reports.
    """

    def __init__(self, write: Write):
        self._write = write
        self.numbers: dict[str, float] = {}
        """Metrics of the step under way, or the last."""
        self._running: RunningEvaluation | None = None
        self._held: list[dict[str, float]] = []
        """Rows that wait: that of the step which the running evaluation belongs to, and those of
        the steps since.
        """

    def all_reduce_end_step(self, evaluation: Evaluation | None, step: int, *, ahead: bool) -> None:
        """Write the numbers of the step that has ended, or keep them for its evaluation; every rank calls it.

        Args:
            evaluation: None: there is none.
            step: its number, from 1.
            ahead: another step follows, whose samples are taken meanwhile.
        """
        if evaluation is None or not evaluation.is_due(step):
            if self._running is None:
                self._write_numbers(self.numbers)
            else:
                self._held.append(dict(self.numbers))
            return
        assert self._running is None, "an evaluation was not waited for before a push"
        self._running, self._held = evaluation.start(step), [dict(self.numbers)]
        if not ahead:
            self._all_reduce_evaluated(waited=True)

    def all_reduce_evaluated(self) -> bool:
        """Wait for the evaluation that is running, and write its step's numbers; False: none was.
        Every rank calls it.

        Raises:
            RolloutError: the servers failed; on other ranks PeerFailure.
        """
        return self._all_reduce_evaluated(waited=False)

    def _all_reduce_evaluated(self, *, waited: bool) -> bool:
        """waited: the seconds of the evaluation are among the numbers of its step."""
        if self._running is None:
            return False
        running, self._running = self._running, None
        evaluated: dict[str, float] = {}
        try:
            evaluated = running.all_reduce_metrics()
        finally:  # without the evaluation where it failed
            # Empty where `close` has written them meanwhile.
            held, *since = self._held or [{}]
            self._held = []
            if held and waited:
                held["time/eval_s"] = held.get("time/eval_s", 0.0) + time.monotonic() - running.begun
            for numbers in (held | evaluated if held else held, *since):
                self._write_numbers(numbers)
        if held:
            for line in _lines(running, evaluated):
                print(line, flush=True)
        return True

    def close(self) -> None:
        """Write what still waits, after a failure: its evaluation is given up. On this rank alone,
        from any thread.
        """
        running, self._running = self._running, None
        held, self._held = self._held, []
        if running is not None:
            running.close()
        for numbers in held:
            self._write_numbers(numbers)

    def _write_numbers(self, numbers: dict[str, float]) -> None:
        if numbers:
            self._write(dict(numbers))


def _lines(running: RunningEvaluation, metrics: dict[str, float]) -> list[str]:
    """A line for each set, as Megatron's own line averages over the steps between two lines."""
    lines = []
    for one in running.evaluation.sets:
        name = f" of {one.options.name}" if one.options.name else ""
        reward = metrics[f"{one.options.prefix}reward"]
        line = f"[rollout] held-out reward{name} after step {running.step}: {reward:.4f}"
        passed = metrics[f"{one.options.prefix}pass@{one.options.samples}"]
        if one.options.samples > 1 and not math.isnan(passed):
            line += f", pass@{one.options.samples} {passed:.4f}"
        lines.append(line)
    return lines

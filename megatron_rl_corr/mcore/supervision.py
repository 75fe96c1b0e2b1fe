"""What a run shows of itself while it goes on: its events in a file, and Prometheus text at
a port of rank 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.supervision import SupervisionConfig
from megatron_rl_corr.events import EVENTS, KINDS, file_of_host
from megatron_rl_corr.mcore.endpoint import Endpoint
from megatron_rl_corr.reduce.restarts import attempts_before, begin_again

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.session import Session

PREFIX = "megatron_rl_corr"
PATIENCE_S = 10.0
"""How long a restarted run waits for a port that what is left of the attempt before may hold."""


class Supervision:
    """One a process: it outlives Megatron's in-process restarts.

    A step costs two assignments; everything else happens when somebody asks.
    """

    def __init__(self, options: SupervisionConfig):
        self._options = options
        self._endpoint: Endpoint | None = None
        self._began, self._last = time.time(), time.monotonic()
        self._waited_s = 0.0
        self._step: int | None = None
        """The last step that has ended."""
        self._restarts = 0
        """Within this process: Megatron's in-process restart."""
        self._open, self.begun = False, False
        """begun: a start that has not ended in order; the next one is a restart within the process."""
        self._session: Session | None = None

    def open(self) -> None:
        """Open the events' file on every rank and the endpoint on rank 0, before the model is made.

        Raises:
            ValueError: naming the flag, for a file that can't be written or a port that can't be opened.
        """
        self.begun = True
        if self._open:
            return
        self._open, problems = True, Problems()
        problems.check("events", self._open_events)
        problems.check("endpoint", self._open_endpoint)
        problems.raise_all()

    def _open_events(self) -> None:
        if self._options.events is None:
            return
        path = file_of_host(self._options.events)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            EVENTS.open(path)
        except OSError as error:
            raise ValueError(
                f"`events` {path} can't be written: {error.strerror or error}; name a file, no link, in a "
                "folder that this user may write"
            ) from error

    def _open_endpoint(self) -> None:
        address, port = self._options.metrics_address, self._options.metrics_port
        if port is None or os.environ.get("RANK", "0") != "0":
            return
        try:
            self._endpoint = Endpoint(
                address, port, self.text, patience_s=PATIENCE_S if attempts_before() else 0.0
            )
        except OSError as error:
            raise ValueError(
                f"`metrics_port` {port} can't be opened at `metrics_address` {address}: "
                f"{error.strerror or error}; give another one"
            ) from error

    def started(self, session: Session, iteration: int) -> None:
        """The run's first step follows. iteration: steps that a checkpoint has, 0 without one."""
        self._session, self._last = session, time.monotonic()
        self._step = iteration or None
        EVENTS.step = iteration + 1
        if os.environ.get("RANK", "0") != "0":
            return
        at = f"at step {iteration + 1}" if iteration == 0 else f"at step {iteration + 1}, from a checkpoint"
        if self._restarts:
            reason = f"{at}: restart {self._restarts} within the process"
            EVENTS.tell("run_restarted", reason, restarts=self._restarts)
        elif attempt := attempts_before():
            EVENTS.tell("run_restarted", f"{at}: restart {attempt} of torchrun", restarts=attempt)
        else:
            EVENTS.tell("run_started", at)

    def end_step(self, step: int, waited_s: float) -> None:
        """A step has ended; it is counted from 1. waited_s: seconds of it that it waited for samples."""
        self._waited_s += waited_s
        self._step, self._last = step, time.monotonic()
        EVENTS.step = step + 1

    def close(self) -> None:
        """The run has ended in order. File and endpoint stay open until the process ends: it may
        begin another one.
        """
        if self._session is not None and os.environ.get("RANK", "0") == "0":
            EVENTS.tell("run_ended", "no step was made" if self._step is None else f"after step {self._step}")
        self._session, self.begun = None, False

    def restart(self) -> None:
        """What was running has failed, and is set up again within the process."""
        self._session, self._restarts = None, self._restarts + 1
        begin_again()

    def text(self) -> str:
        """What Prometheus reads, in its text format, version 0.0.4."""
        # a host's clock may be set back, and would hide for hours that a run hangs
        age = time.monotonic() - self._last
        families = [
            ("step", "gauge", "Last step that has ended.", {"": self._step or 0}),
            (
                "last_step_age_seconds",
                "gauge",
                "Seconds since the last step ended, or since the run began.",
                {"": age},
            ),
            (
                "start_time_seconds",
                "gauge",
                "When this process began its run, in Unix seconds.",
                {"": self._began},
            ),
            (
                "restarts",
                "gauge",
                "Restarts before this attempt, by torchrun or within the process.",
                {"": attempts_before() + self._restarts},
            ),
            (
                "servers",
                "gauge",
                "Rollout servers by state: in are sampled from, left_out are not.",
                self._servers(),
            ),
            *self._waits(),
            (
                "groups",
                "gauge",
                "Groups of rank 0's replica: being sampled, and done but not yet trained.",
                self._groups(),
            ),
            (
                "events_total",
                "counter",
                "Events that rank 0 told, by kind; those of all ranks are in the events' file.",
                {f'{{kind="{kind}"}}': EVENTS.counts[kind] for kind in KINDS},
            ),
            (
                "events_lost_total",
                "counter",
                "Lines that rank 0 could not write into the events' file.",
                {"": EVENTS.lost},
            ),
        ]
        return "".join(line for family in families for line in _lines(*family))

    def _servers(self) -> dict[str, int]:
        source = self._session and self._session.parts.source
        if not source:
            return {}
        client = source.client
        out, gone = len(client.left_out), len(client.fleet.dropped)  # at a restart, until the next one
        return {'{state="in"}': len(client.base_urls) - out, '{state="left_out"}': out + gone}

    def _waits(self) -> list[tuple[str, str, str, Mapping[str, float]]]:
        """What an autoscaler goes by."""
        source = self._session and self._session.parts.source
        if not source:
            return []
        client = source.client
        wanted = "Servers that the samples wanted now would keep busy: see the guide to servers."
        waited = "Seconds that steps which have ended waited for samples."
        idle = "Seconds in which rank 0's replica had no request at any server."
        return [
            ("servers_wanted", "gauge", wanted, {"": client.servers_wanted}),
            ("training_waits_seconds_total", "counter", waited, {"": self._waited_s}),
            ("sampling_waits_seconds_total", "counter", idle, {"": client.idle_s}),
        ]

    def _groups(self) -> dict[str, int]:
        collector = self._session and self._session.parts.collector
        if not collector:
            return {}
        return {f'{{state="{state}"}}': count for state, count in collector.waiting().items()}


def _lines(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> list[str]:
    """One family of the text format. values: labels in braces, or nothing, -> value."""
    if not values:
        return []
    name = f"{PREFIX}_{name}"
    return [
        f"# HELP {name} {help_text}\n",
        f"# TYPE {name} {kind}\n",
        *(f"{name}{labels} {value}\n" for labels, value in values.items()),
    ]

"""What operators and supervisors see of a run while it goes on: a file of events, and an
endpoint for Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, option


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig(Options):
    """Supervision: what happens to a run beside its steps, and whether it is alive."""

    events: str | None = option(None, metavar="FILE")
    """Append a JSON line there for everything that is left out, asked again, dropped, taken back or
    started again, with its reason, for `megatron-rl-corr report` and for people. The ranks of the first
    host write FILE, those of the next one FILE.host1, and so on.
    """

    metrics_port: Annotated[int | None, Between(1, 65535)] = option(None, metavar="PORT")
    """Answer GET /metrics there, on the host of rank 0, with Prometheus text: the step, the age of the
    last one, servers, queue, counters of events.
    """

    metrics_address: str | None = option(None, metavar="ADDRESS", needs="metrics_port", usual="127.0.0.1")
    """Address of this host that `metrics_port` is open at; whoever reaches it can read the numbers."""

    def check(self) -> None:
        """ValueError for an address that is none: a socket would take "" for every address of the host."""
        if self.metrics_address is not None and not self.metrics_address.strip():
            raise ValueError(
                f"`metrics_address` must name an address of this host, got {self.metrics_address!r}, which "
                "would open the port at all of them; drop it for 127.0.0.1, or say 0.0.0.0 if you mean all"
            )

"""How buckets of named tensors get to the servers: what every transport must do."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.weight_sync.buckets import NamedTensor


class WeightTransport:
    """One rank's half of a transport: every rank has one, the senders send, and rank 0 starts and delivers.

    An update is `aim` on every rank, `start` on rank 0, `send` for each bucket on each stage's sender, one stage after
    the other, then `deliver` on rank 0. It may be broken off anywhere and begun again from `aim`.
    """

    in_session = True
    """Whether buckets reach the servers as they are sent, between /begin_weight_update and /end_weight_update. If not,
    the servers sample on while the stages send, and are stopped for `deliver` alone."""

    broken = False
    """Whether servers may be waiting for ever in what a failed `send` began: they are asked for nothing more."""

    def __init__(self):
        self.servers: ServerControl | None = None

    def aim(self, servers: ServerControl, *, rejoined: Sequence[str] | None = None) -> None:
        """Send to these servers from now on.

        rejoined: None where they are the last update's, unchanged; else those that still have what the last update
        set up there.
        """
        self.servers = servers

    def start(self, version: str) -> None:
        """Rank 0, before the first bucket."""

    def send(self, bucket: list[NamedTensor]) -> None:
        """Take one bucket to all servers; back when its tensors may change. RolloutServerError if one has it not."""
        raise NotImplementedError

    def deliver(self, version: str) -> None:
        """Rank 0, after the last bucket of the last stage."""

    def close(self) -> None:
        """Take off the servers what was set up there."""

"""The interface of all transports of weights, and the number of ranks of the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.types import NamedTensor, ServerRanks


class WeightTransport:
    """One rank's part of a transport. Every rank has one; the stages' senders send, rank 0
    starts and delivers.

    An update is `aim` on every rank, `start` on rank 0, `send` for each bucket and then `finish` on each
    stage's sender, one stage after the other, then `deliver` on rank 0. It may fail anywhere, and begins
    again with `aim`.
    """

    in_session = True
    """True: buckets reach the servers as they are sent, inside an update session. False: the servers
    sample while the stages send, and are paused only for `deliver`.
    """

    broken = False
    """True: servers may be waiting forever in what a failed `send` began, and get no more requests."""

    def __init__(self):
        self.servers: ServerControl | None = None

    def aim(self, servers: ServerControl, *, rejoined: Sequence[str] | None = None) -> None:
        """Send to these servers from now on.

        Args:
            servers: of the update.
            rejoined: None: they are those of the last update. Otherwise the servers that still have what
                the last update set up there.
        """
        self.servers = servers

    def start(self, version: str) -> None:
        """Prepare to send the weights of `version`; rank 0 calls it before the first bucket."""

    def send(self, bucket: list[NamedTensor]) -> None:
        """Send one bucket to all servers, or begin to: its tensors must stay as they are until the next
        call of `send` or `finish` has returned.

        Raises:
            RolloutError: a server did not receive it, or the one before.
            OSError: the group or the folder that it goes through failed.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Return once all servers have what was sent. Raises as `send`."""

    def deliver(self, version: str) -> None:
        """Make the servers load what was sent; rank 0 calls it after the last bucket of the last stage."""

    def close(self) -> None:
        """Remove what was set up at the servers."""


def common_ranks(servers: ServerControl, infos: Sequence[Mapping[str, Any]]) -> ServerRanks:
    """The number of ranks that each server runs its model on.

    Args:
        servers: the servers.
        infos: their answers to `Engine.server_info`.

    Raises:
        RolloutProtocolError: a server has another number of ranks than the first one, or hides
            several replicas.
    """
    urls = servers.base_urls
    ranks = [servers.engine_of(url).ranks(url, info) for url, info in zip(urls, infos, strict=True)]
    for url, own in zip(urls, ranks, strict=True):
        if own.count != ranks[0].count:
            raise RolloutProtocolError(
                url,
                servers.engine_of(url).server_info().endpoint,
                f"it has {own.count} ranks and {urls[0]} has {ranks[0].count}; give all servers the same "
                "tensor-parallel and pipeline-parallel size",
            )
    return ranks[0]

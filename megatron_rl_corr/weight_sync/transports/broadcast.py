"""Weights by broadcast: one process group of a sender and all servers' ranks, over NCCL or gloo."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.update_group import UpdateGroup, count_ranks

logger = logging.getLogger(__name__)


class DistributedTransport(WeightTransport):
    """The group is made at a sender's first bucket and kept; a server that left or came needs a new one.

    Where a server dies in a broadcast, the others stay in it until this process ends and its connections with it:
    neither gloo nor NCCL can take them out from here.

    control: the ServerControl of some servers' addresses.
    """

    def __init__(self, control: Callable[[Sequence[str]], ServerControl], loop: LoopThread, *, backend: str):
        super().__init__()
        self._control, self._loop, self._backend = control, loop, backend
        self._group: UpdateGroup | None = None

    def aim(self, servers, *, rejoined=None):
        if rejoined is not None:
            self._drop_group(rejoined)
        super().aim(servers)

    def send(self, bucket: list[NamedTensor]) -> None:
        if self._group is None:
            self._make_group()
        try:
            self._group.broadcast(bucket)
        except (RolloutError, OSError) as error:
            self._break(error)
            raise

    def _make_group(self) -> None:
        ranks_per_server = count_ranks(self.servers.base_urls, self._loop.call(self.servers.server_info()))
        try:
            self._group = UpdateGroup(
                self.servers, self._loop, backend=self._backend, ranks_per_server=ranks_per_server
            )
        except (RolloutError, OSError) as error:
            answered = isinstance(error, RolloutServerError) and error.status is not None
            if len(self.servers.base_urls) > 1 or not answered:
                self._break(error)
            raise

    def _break(self, error: Exception) -> None:
        self.broken = True
        error.add_note(
            "other servers may wait in the broadcast, so this run can't go on without this one; "
            "--rollout-weight-transport tensor and disk can"
        )

    def close(self):
        self._drop_group(self.servers.base_urls if self.servers else ())

    def _drop_group(self, urls: Sequence[str]) -> None:
        if self._group is None or self.broken:
            return
        for url in urls:
            try:
                self._loop.call(self._control([url]).destroy_weights_update_group(self._group.name))
            except RolloutServerError as error:  # it is gone, and the group with it
                logger.warning("a broadcast group was not taken off: %s", error)
        self._group.destroy()
        self._group = None

"""Weights by broadcast: one process group of a sender and all servers' ranks, over NCCL or gloo."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.control import ServerControl
from megatron_rl_corr.rollout.errors import RolloutServerError
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.transport import WeightTransport
from megatron_rl_corr.weight_sync.update_group import UpdateGroup

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
            self._group = UpdateGroup(self.servers, self._loop, backend=self._backend)
        try:
            self._group.broadcast(bucket)
        except RolloutServerError as error:
            self.broken = True
            error.add_note(
                "the other servers wait for it in the broadcast, so this run can't go on without it; "
                "--rollout-weight-transport tensor and disk can"
            )
            raise

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
        self._group = None

"""The servers of an update on the trainer's own GPUs: what they have released they get back in its course."""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron_rl_corr.engines.memory import ALL_MEMORY
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.weight_sync.memory import ServerMemory
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.updatable import (
    is_changing,
    missing_memory,
    unfinished,
    weights_of,
    without_cache,
)

logger = logging.getLogger(__name__)


class ColocatedServers(WeightServers):
    """Servers that release their memory while the trainer trains, and get it back by an update.

    An update gives memory for the weights before it sends any, and memory for keys and values before it lets
    a server sample: no other order can be asked for. A server that missed a release, as after a restart, has
    all of it already. One whose answer was lost while its memory changed is as absent as one that died, until
    it is restarted.

    Args:
        memory: of the servers; on rank 0 it knows what was released before.
        arguments: as of `WeightServers`, by position and by name.
    """

    _colocated = True

    def __init__(self, *arguments: Any, memory: ServerMemory, **named: Any):
        super().__init__(*arguments, **named)
        self.memory = memory

    def expect_release(self) -> None:
        """On every rank before `release_memory`: its client samples nothing until `expect`."""
        self._loop.call(self.client.expect_pause(released=True))

    def release_memory(self) -> None:
        """Rank 0: free the memory of every server that answers; an update gives it back. One that was stuck
        in the last update keeps what it has, as one that is gone.

        Raises:
            RolloutError: as `ServerMemory.release`, and as `find` where every server is stuck.
        """
        versions = self._without_stuck(self._reported_versions())
        names = {
            url: name for url, name in zip(self.client.base_urls, versions, strict=True) if name is not None
        }
        for url in sorted(self._answers_alone):
            why = "it was stuck in the last push, and keeps its memory"
            logger.warning("rollout server %s did not release its memory: %s", url, why)
            EVENTS.tell("memory_not_released", why, server=url)
        self._loop.call(self.memory.release(self.client.control(list(names)), names))

    @staticmethod
    def free_cached() -> None:
        """On every rank: give the GPU back the memory of tensors that are gone, which torch would
        keep from servers.
        """
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # buckets that servers have closed
            torch.cuda.empty_cache()

    def release(self) -> None:
        super().release()
        self.memory.tell_left()

    def close(self) -> None:
        super().close()
        self.memory.tell_left()

    def _reported_versions(self) -> list[str | None]:
        """None also for a server of which nobody knows which memory it has, if another one is left.

        At the start, where another trainer has left it so, it is refused by its name instead.
        """
        versions = super()._reported_versions()
        lost = [version is not None and is_changing(version) for version in versions]
        is_left = any(version is not None and not gone for version, gone in zip(versions, lost, strict=True))
        if not (self.memory.begun and is_left):
            return versions
        for url, version, is_lost in zip(self.client.base_urls, versions, lost, strict=True):
            if is_lost and url not in self._told_absent:
                why = f"its weights are called {version!r}: nobody knows which memory it has; restart it"
                logger.warning("rollout server %s misses a weight update: %s", url, why)
                EVENTS.tell("server_missed_update", why, server=url)
                self._told_absent.add(url)
        return [None if is_lost else version for version, is_lost in zip(versions, lost, strict=True)]

    def _is_own(self, name: str) -> bool:
        return super()._is_own(weights_of(name) if missing_memory(name) else name)

    async def _name_unfinished(self, version: str) -> None:
        found = {url: self._found[url] for url in self.urls}
        after = {
            url: without_cache(version) if missing_memory(found[url]) else unfinished(version)
            for url in found
        }
        await self.memory.resume(self._control, found, ("weights",), after)
        # What a refused update calls them again: never by a name that promises memory, or weights, of before.
        self._found |= {url: after[url] for url in found if missing_memory(found[url])}

    async def _name_finished(self, version: str) -> None:
        # Names of the moment: those that the update was begun with, or `unfinished` ones where all
        # memory is there.
        now = {
            url: name if missing_memory(name := self._found[url]) else unfinished(version)
            for url in self.urls
        }
        await self.memory.resume(self._control, now, ALL_MEMORY, dict.fromkeys(now, version))

    def _can_sample(self, url: str) -> bool:
        return url not in self.memory.lacking | self.memory.unknown

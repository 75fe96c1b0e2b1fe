"""Hands the memory of servers to a trainer on the same GPUs, and back: weights first, keys and
values after the push.

Releasing memory twice ends a server, and no endpoint reports its state. So the state stands in the name of
its weights, as after `released` or `without_cache`, where a trainer that is started after a killed one finds
it. The name is true at every moment; between two states it says that the state is not known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_rl_corr.engines.concurrency import all_or_raise_first, raise_first
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import (
    RolloutProtocolError,
    RolloutServerError,
    UnreadableAnswer,
    is_refusal,
)
from megatron_rl_corr.engines.memory import ALL_MEMORY, MemoryPart
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.weight_sync.updatable import (
    briefly,
    changing,
    check_memory,
    missing_memory,
    released,
    weights_of,
)

IDLE_S = 10.0
"""How long a paused server may take to be rid of requests that were ended; then it drops its cache."""

logger = logging.getLogger(__name__)


class ServerMemory:
    """Which servers lack memory, and the requests that change it; each server is asked by
    itself, all at once.

    Names of weights are given as address -> what the server calls them.
    """

    def __init__(self):
        self._told = False
        self.lacking: set[str] = set()
        """Addresses of servers that lack memory, as far as this process has seen to it."""
        self.unknown: set[str] = set()
        """And of those whose answer was lost when theirs was to change."""
        self.begun = False
        """Whether this process has had them release it once."""
        self.resume_s = 0.0
        """Seconds that servers took to get memory back, since the last `take_resume_s`."""

    async def release(self, control: ServerControl, names: Mapping[str, str]) -> None:
        """Pause servers, wait until nothing runs there, free their memory.

        One whose answer is lost has none, or keeps what it has; that is told.

        Args:
            control: reaches the servers.
            names: of their weights.

        Raises:
            RolloutError: a server refuses, can't release its memory, or runs requests of others;
                or none answers.
        """
        answers = await asyncio.gather(
            *(self._release(control, url, name) for url, name in names.items()), return_exceptions=True
        )
        gone = [isinstance(one, BaseException) and _is_lost(one) for one in answers]
        raise_first([one for one, is_gone in zip(answers, gone, strict=True) if not is_gone or all(gone)])
        for url, answer, is_gone in zip(names, answers, gone, strict=True):
            if is_gone:
                logger.warning("rollout server %s did not release its memory: %s", url, answer)
                EVENTS.tell("memory_not_released", str(answer), server=url)
        self.begun = True

    async def _release(self, control: ServerControl, url: str, name: str) -> None:
        engine, ask = control.engine_of(url), partial(control.ask, url)
        check_memory(url, name, endpoint=engine.model_info().endpoint, colocated=True)
        problem = engine.memory_problem(await ask(engine.server_info()))
        if problem is not None:
            raise RolloutProtocolError(url, engine.server_info().endpoint, problem)
        present = [part for part in ALL_MEMORY if part not in missing_memory(name)]
        if present:
            await ask(engine.pause_generation("retract"))
            try:
                await control.flush_cache_of(url, timeout_s=IDLE_S)
            except RolloutServerError as error:
                if error.status is not None:
                    await self._go_on(control, url, name)
                raise
            await self._change(control, url, engine.release_memory(present), name, released(weights_of(name)))
        self.unknown.discard(url)
        self.lacking.add(url)

    async def resume(
        self,
        control: ServerControl,
        names: Mapping[str, str],
        parts: Sequence[MemoryPart],
        after: Mapping[str, str],
    ) -> None:
        """Give servers memory for these parts back, those of them that lack it.

        Args:
            control: reaches the servers.
            names: of their weights now.
            parts: what they are to have.
            after: what the weights of each are called then.

        Raises:
            RolloutError: a server refuses, or does not answer.
        """
        begun = time.monotonic()

        async def resume(url: str, name: str) -> None:
            engine = control.engine_of(url)
            lacking = [part for part in parts if part in missing_memory(name)]
            if lacking:
                await self._change(control, url, engine.resume_memory(lacking), name, after[url])
            else:
                await control.ask(url, engine.update_weight_version(after[url]))
            self.unknown.discard(url)
            if not missing_memory(after[url]):
                self.lacking.discard(url)

        await all_or_raise_first(resume(*one) for one in names.items())
        self.resume_s += time.monotonic() - begun

    def take_resume_s(self) -> float:
        """Seconds that servers took to get memory back, since the last call."""
        seconds, self.resume_s = self.resume_s, 0.0
        return seconds

    def tell_left(self) -> None:
        """Say which servers are left without memory: the trainer ends between two pushes."""
        if (urls := sorted(self.lacking - self.unknown)) and not self._told:
            self._told = True
            what = (
                "they released their memory to this trainer; those that run answer nobody and have no "
                "weights, until the next start with --rollout-colocate, or until they are restarted"
            )
            logger.warning("rollout servers %s are left as they are: %s", ", ".join(urls), what)
            EVENTS.tell("memory_left_released", what, servers=urls)

    async def _change(
        self, control: ServerControl, url: str, request: Request, name: str, after: str
    ) -> None:
        """Send what changes a server's memory; the name says meanwhile that its state is not known.

        So it does afterwards, unless the server itself has done or refused it: what stands before a server
        fails, with HTTP 504 for instance, also where the server has done what it was asked.
        """
        engine = control.engine_of(url)
        self.unknown.add(url)
        try:
            await control.ask(url, engine.update_weight_version(changing(weights_of(name))))
            await control.ask(url, request)
        except RolloutServerError as error:
            if is_refusal(error):
                self.unknown.discard(url)
                await briefly(control.ask(url, engine.update_weight_version(name)))
                await self._go_on(control, url, name)
            raise
        await control.ask(url, engine.update_weight_version(after))

    async def _go_on(self, control: ServerControl, url: str, name: str) -> None:
        """Let a server whose weights have this name sample again, if it has all of its memory."""
        if not missing_memory(name):
            await briefly(control.ask(url, control.engine_of(url).continue_generation()))


def _is_lost(error: BaseException) -> bool:
    """True if a server has not answered itself: it may have done what it was asked, and be
    well, or be gone.
    """
    return isinstance(error, UnreadableAnswer) or (
        isinstance(error, RolloutServerError) and not is_refusal(error)
    )

"""Keeps groups running ahead of the training that takes them: how far ahead, and what happens to old groups.

G groups a step; version v is that of the weights after v steps. A step is a batch here, however many
updates it makes.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl_corr.engines.errors import GroupsFilteredOut
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.groups import Group, PutAside, Selection, StreamState, Taken


class GroupStream:
    """Samples G * max_lag groups ahead, and returns G groups for each step in the order in
    which they are done.

    A step's groups may begin once the weights are within max_lag versions of that step's. So max_lag 0 is
    on-policy: groups begin with the weights of their step, and none runs while weights change. A group that
    takes long may still be older than max_lag when it is done: it is trained on like the others or, with
    drop_stale, put aside and replaced by another, which prefers short responses.

    A group that does not pass the selection's filter is replaced by another, up to the selection's limit.

    With over-sampling, more groups run than steps need, and each step takes those that are done first. With
    max_lag 0 the others are ended before `take` returns, and their numbers are drawn again first. With a lag,
    as many groups more may run as are still running from before the present version, and all are kept: a
    group that is done in time is not older than max_lag for it.

    For one event loop.

    Args:
        sample: sample(number) samples and scores a whole group; None: one of its samples failed for good, and
            another group is begun in its place.
        draw: the number of the next group to begin.
        groups_per_step: G.
        first, last: the steps are [first, last), by the weight version that they start from.
        max_lag: versions that the weights may be behind a step's when its groups begin.
        drop_stale: put groups aside that are older than max_lag when they are done.
        selection: which groups pass, and how many more are sampled.
        resumed: what `state` gave when a checkpoint was saved. Groups that waited then are taken before all
            others, in the order of then; so `draw` must give their numbers first, but for those of `ready`.
        ready: groups of these that the checkpoint holds: they are done.

    Raises:
        ValueError: groups_per_step below 1 or max_lag below 0.
    """

    def __init__(
        self,
        sample: Callable[[int], Coroutine[Any, Any, Group | None]],
        draw: Callable[[], int],
        *,
        groups_per_step: int,
        first: int,
        last: int,
        max_lag: int = 0,
        drop_stale: bool = False,
        selection: Selection | None = None,
        resumed: StreamState | None = None,
        ready: Sequence[Group] = (),
    ):
        if groups_per_step < 1 or max_lag < 0:
            raise ValueError(
                f"groups_per_step must be at least 1 and max_lag 0, got {groups_per_step} and {max_lag}"
            )
        self._sample, self._draw = sample, draw
        self._per_step, self._last, self._max_lag = groups_per_step, last, max_lag
        self._drop_stale, self._selection = drop_stale, selection or Selection()
        self._version = self._next = first
        self._running: dict[asyncio.Task, tuple[int, int]] = {}
        """Number of the group, and the weight version at which it was begun."""
        self._done: deque[Group] = deque(ready)
        self._again: deque[int] = deque()
        """Numbers that were drawn and aborted."""
        self._taken: list[Group] = []
        self._dropped, self._aborted, self._refilled = 0, 0, 0
        self._filtered, self._surplus = PutAside(), PutAside()
        self._spare: deque[Group] = deque(maxlen=groups_per_step)
        """The last groups that did not pass."""
        self._aside: list[Trajectory] = []
        """One sample of each of some that did not pass: all alike likely, however many there were."""
        self._draws = random.Random(first)
        self._first: dict[int, int] = {}
        """Number of a group that waited at the checkpoint -> its place among them."""
        if resumed is not None:
            self._first = {number: place for place, number in enumerate(resumed.waiting)}
            self._filtered, self._dropped = replace(resumed.filtered), resumed.dropped
            if self._selection.refills:  # with others the step may be completed, and those of then are gone
                self._filtered.groups = min(self._filtered.groups, self._limit)
        self._failure: BaseException | None = None
        self._aborting = self._closing = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> int:
        """Groups that are done and not taken."""
        return len(self._done)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def filtered(self) -> int:
        """Groups that did not pass the filter since the last step took its own."""
        return self._filtered.groups

    async def take(self, version: int) -> Taken:
        """The groups of the step that starts from this weight version: waits until G are done.

        Raises:
            GroupsFilteredOut: too few groups pass the filter.
            BaseException: what `sample` raised, after all other groups are cancelled.
        """
        self._version = self._next = version
        try:
            while self._failure is None:
                if self._drop_stale:
                    self._drop(version)
                self._begin()
                if not self._running:  # all that may be sampled is done
                    self._refill()
                if len(self._done) >= self._per_step and self._first_are_done():
                    return await self._take_first()
                self._changed.clear()
                await self._changed.wait()
            raise self._failure
        except BaseException:
            await self.close()
            raise

    def untrained(self, *, with_taken: bool = False) -> list[int]:
        """The numbers that were drawn and whose groups are not trained, nor dropped, replaced or filtered.

        with_taken: no update was made with the groups that were taken last, so that they count too.
        """
        state = self.state(with_taken=with_taken)
        return [*state.running, *state.again, *state.waiting]

    def state(self, *, with_taken: bool = False) -> StreamState:
        """What a checkpoint keeps. with_taken: as in `untrained`; the groups taken last are
        taken first then.
        """
        return StreamState(
            tuple(group.number for group in self.waiting(with_taken=with_taken)),
            tuple(number for number, _ in self._running.values()),
            tuple(self._again),
            replace(self._filtered),
            self._dropped,
        )

    def waiting(self, *, with_taken: bool = False) -> list[Group]:
        """The groups of `StreamState.waiting`."""
        done = sorted(self._done, key=self._place)
        return [*self._taken, *done] if with_taken else done

    async def close(self) -> None:
        """Cancel the groups that are being sampled."""
        self._closing = True
        await self._cancel_running()

    async def _cancel_running(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _begin(self) -> None:
        """Begin every group that may begin at the present version."""
        beyond_limit = max(0, self._filtered.groups - self._limit)
        wanted = self._steps_ahead * self._per_step + self._extra() - beyond_limit
        for _ in range(wanted - len(self._running) - len(self._done)):
            number = self._again.popleft() if self._again else self._draw()
            task = asyncio.get_running_loop().create_task(self._judged(number))
            self._running[task] = number, self._version
            task.add_done_callback(self._ended)

    @property
    def _steps_ahead(self) -> int:
        """Steps whose groups may be sampled and are not taken."""
        return min(self._version + 1 + self._max_lag, self._last) - self._next

    @property
    def _limit(self) -> int:
        """Groups that may not pass between two steps."""
        return math.ceil((self._selection.limit - 1) * self._per_step) * (self._max_lag + 1)

    def _extra(self) -> int:
        """Groups that may be sampled beyond those of the steps ahead."""
        if self._steps_ahead == 0:
            return 0
        extra = math.ceil((self._selection.oversampling - 1) * self._per_step)
        if self._max_lag == 0:
            return extra
        # More than this, and groups that are done in time would wait until they are older than max_lag.
        return min(extra, sum(begun < self._version for _, begun in self._running.values()))

    async def _judged(self, number: int) -> tuple[Group | None, bool]:
        """(the group of this number, whether it passes); (None, False): it is lost."""
        group, passes = await self._sample(number), self._selection.passes
        if group is None or passes is None:
            return group, group is not None
        passed = await passes(group)
        return (None, False) if passed is None else (group, passed)

    def _ended(self, task: asyncio.Task) -> None:
        """Keep the group, or its failure for `take`, which may be called much later."""
        number, _ = self._running.pop(task)
        if task.cancelled():
            if self._aborting:
                self._aborted += 1
                self._again.append(number)
            elif not self._closing:  # by what it awaited; without this the failure would be lost
                self._failure = self._failure or RuntimeError("sampling a group was cancelled from within")
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
        else:
            group, passed = task.result()
            if passed:
                self._done.append(group)
            elif group is not None:
                self._filtered.count(group)
                self._keep_one(group)
                EVENTS.tell("group_filtered", "it did not pass `group_filter`", group=group.number)
                self._spare.extend([group] if self._selection.refills else [])
            if not passed:
                self._replace()
        self._changed.set()

    def _keep_one(self, group: Group) -> None:
        """Keep a sample of a group that did not pass, in a reservoir of `Selection.measured`."""
        if not self._selection.measured or (sample := self._selection.choose(group)) is None:
            return
        if len(self._aside) < self._selection.measured:
            self._aside.append(sample)
        elif (place := self._draws.randrange(self._filtered.groups)) < len(self._aside):
            self._aside[place] = sample

    def _replace(self) -> None:
        """Begin another group at once, also while a step is trained."""
        if self._closing or self._failure is not None:
            return
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  raised by `take`; the loop would only print it
            self._failure = error

    def _refill(self) -> None:
        """Complete a step whose groups do not pass with those that did not."""
        missing = self._per_step - len(self._done)
        if missing <= 0:
            return
        if not self._selection.refills:
            aside = self._filtered
            raise GroupsFilteredOut(
                f"`group_filter`: {len(self._done)} of the {self._per_step} groups that a step takes of each "
                f"replica pass, and {aside.groups} do not, after which `group_filter_limit` "
                f"{self._selection.limit:g} ends the step. The mean reward of those is "
                f"{aside.rewards / max(aside.samples, 1):.4g}, above 0 in {aside.above_0} of them. Are the "
                "prompts too easy or too hard, or does the reward give every response the same? Otherwise "
                "raise `group_filter_limit`, or train on them with `group_filter_exhausted` take"
            )
        self._done.extend(self._spare.pop() for _ in range(missing))
        self._refilled += missing

    def _place(self, group: Group) -> int:
        """Its place among those that waited at the checkpoint; behind all of them, if it did not."""
        return self._first.get(group.number, len(self._first))

    def _first_are_done(self) -> bool:
        """True if none of those that a step takes next waited at the checkpoint and is still running."""
        if not self._first:
            return True
        running = {number for number, _ in self._running.values()}
        open_ = running | {group.number for group in self._done}
        first = [number for number in self._first if number in open_]  # others were taken, lost or left out
        return running.isdisjoint(first[: self._per_step])

    async def _take_first(self) -> Taken:
        """The step's groups; with max_lag 0 no group is left behind them."""
        # stable: the others stay in the order of their ends
        self._done = deque(sorted(self._done, key=self._place))
        groups = sorted((self._done.popleft() for _ in range(self._per_step)), key=lambda group: group.number)
        self._taken, self._next = groups, self._version + 1
        if self._max_lag == 0:
            await self._end_surplus()
        beyond = self.running + self.ready - self._steps_ahead * self._per_step
        taken = Taken(
            groups,
            self.ready,
            self.running,
            self._dropped,
            self._filtered,
            self._refilled,
            self._aborted,
            self._surplus,
            self._aside,
            max(0, beyond),
        )
        self._dropped, self._aborted, self._refilled = 0, 0, 0
        self._filtered, self._surplus, self._aside = PutAside(), PutAside(), []
        self._spare.clear()
        return taken

    async def _end_surplus(self) -> None:
        """End what was sampled beside the step's groups. Its numbers are drawn again, as its
        prompts are untrained.
        """
        before, self._aborting = len(self._again), True
        await self._cancel_running()
        self._aborting = False
        for group in self._done:
            self._surplus.count(group)
            self._again.append(group.number)
        self._done.clear()
        if len(self._again) > before:
            groups = sorted(list(self._again)[before:])
            EVENTS.tell(
                "surplus_ended", "the step has its groups, and with no lag none may be older", groups=groups
            )
        self._again = deque(sorted(self._again))

    def _drop(self, version: int) -> None:
        done, self._done = self._done, deque()
        for group in done:
            if group.oldest_version >= version - self._max_lag:
                self._done.append(group)
            else:
                self._dropped += 1
                why = f"it has samples more than {self._max_lag} versions old"
                EVENTS.tell("group_dropped", why, group=group.number)

"""Which groups each replica draws, and what a checkpoint keeps so that a later run draws none
twice and loses none.

A run that goes on with as many replicas also takes them in the order in which they would have been taken.

R replicas share one endless sequence: group n is the n-th prompt of `PromptDataset.at` since the run's
beginning, and replica r draws first + r, first + r + R, ...
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.rollout.failures import FailedPrompts


@dataclass(frozen=True)
class Drawn:
    """Where a replica stands: it has drawn none of its numbers from `base` + rank on, and must still
    train on `open`.

    Example: Drawn(base=12, waiting=(6, 4), running=(8, 10)): steps take group 6 first, then 4.
    """

    base: int
    waiting: tuple[int, ...] = ()
    """Groups that are done and not trained, in the order in which steps take them."""
    running: tuple[int, ...] = ()
    """Groups that are being sampled, in the order in which they were begun."""
    again: tuple[int, ...] = ()
    """Numbers that are drawn next, before those from `base` on: of groups that were aborted, or left
    by an earlier run.
    """
    counts: dict[str, Any] = field(default_factory=dict)
    """What decides later, by who counts it, as JSON has it; {} in a file of an older version."""

    @property
    def open(self) -> tuple[int, ...]:
        """What was drawn and is not trained yet, in the order in which a run that goes on begins it."""
        return (*self.waiting, *self.running, *self.again)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Drawn:
        """From a checkpoint's JSON. Raises KeyError, TypeError, AttributeError or ValueError
        for anything else.
        """
        lists = {name: tuple(int(n) for n in values[name]) for name in ("waiting", "running", "again")}
        return cls(int(values["base"]), **lists, counts=dict(values["counts"]))


@dataclass(frozen=True)
class Cursor:
    """Where all replicas stand: no number from `next` on was drawn; of those before, `again` are not trained.

    Example: three replicas have drawn 0, 3 and 1, 4, 7 (the group 1 was replaced) and 2, 5, and 4
    is being sampled: Cursor(next=9, again=(4, 6, 8)), whose 6 and 8 the first and the last replica
    have still to draw.
    """

    next: int
    again: tuple[int, ...] = ()

    @classmethod
    def merged(cls, replicas: Sequence[Drawn]) -> Cursor:
        """The cursor of all replicas, from each one's place, in the order of their ranks."""
        size, top = len(replicas), max(replica.base for replica in replicas)
        again = {number for replica in replicas for number in replica.open}
        for rank, replica in enumerate(replicas):
            again.update(range(replica.base + rank, top + rank, size))
        return cls(top, tuple(sorted(again)))


class GroupNumbers:
    """The numbers that one replica draws, in order: its share of cursor.again, then those
    from cursor.next on.

    Example: of Cursor(next=9, again=(4, 6, 8)) replica 0 of 3 draws 4, 9, 12, ... and replica 1
    draws 6, 10, 13, ...

    Args:
        cursor: where all replicas stand.
        rank: of this replica, in [0, size).
        size: how many replicas there are.
        own: where this replica stood among as many, in place of the cursor: it draws its own open
            numbers, in order.
    """

    def __init__(self, cursor: Cursor, rank: int, size: int, own: Drawn | None = None):
        self._again = deque(cursor.again[rank::size] if own is None else own.open)
        self._base, self._rank, self._size = cursor.next if own is None else own.base, rank, size

    @property
    def goes_on(self) -> bool:
        """True if the next number is of before the checkpoint: of a group that was drawn then
        and is not trained.
        """
        return bool(self._again)

    def draw(self) -> int:
        """The next number."""
        if self._again:
            return self._again.popleft()
        self._base += self._size
        return self._base - self._size + self._rank

    def drawn(
        self, running: Iterable[int] = (), *, waiting: Iterable[int] = (), again: Iterable[int] = ()
    ) -> Drawn:
        """Where the replica stands, while these were drawn and are not trained, as in `Drawn`."""
        return Drawn(self._base, tuple(waiting), tuple(running), (*again, *self._again))


def dealt_order(waiting: Sequence[Sequence[int]]) -> list[int]:
    """The order of all replicas' waiting groups: the first of each, then the second of each, and so on.

    Where each replica's step takes G groups, and each has G or more, the first R G are those that the step of
    all R replicas takes.

    Example: dealt_order([(6, 4), (3,), (5, 2)]) == [6, 3, 5, 4, 2].

    Args:
        waiting: of each replica, in the order in which its steps take them.
    """
    longest = max(map(len, waiting), default=0)
    return [own[place] for place in range(longest) for own in waiting if place < len(own)]


@dataclass(frozen=True)
class SavedCursor:
    """Where all replicas stood, in the data of which prompts, and which of these had failed."""

    seed: int
    """The seed of the prompts' order."""
    prompts: int
    """Rows of the data set."""
    next: int
    """As in `Cursor`."""
    again: tuple[int, ...]
    failed: dict[int, int] = field(default_factory=dict)
    """Row of the data set -> dropped groups, as `FailedPrompts` counts them."""
    left_out: dict[int, int] = field(default_factory=dict)
    """Row -> the last epoch without it."""
    batches: int | None = None
    """Batches that the run had trained. None, in a file of an older version: one a step."""
    sources: str = ""
    """`PromptDataset.identity`."""
    replicas: tuple[Drawn, ...] = ()
    """Each replica's own place, by rank; () in a file of an older version."""
    failed_batches: tuple[dict[str, float], ...] = ()
    """`FailedFraction.state`."""
    digest: str = ""
    """`PromptDataset.digest`; "" in a file of an older version, which is not compared."""
    auto_level: str = ""
    """`AutoWeights.level` of the next batch; "" without --rollout-correction auto."""

    @classmethod
    def of(
        cls,
        replicas: Sequence[Drawn],
        prompts: PromptDataset,
        failed: FailedPrompts,
        batches: int,
        failed_batches: Sequence[dict[str, float]] = (),
    ) -> SavedCursor:
        """What a checkpoint keeps at this point of a run. replicas: by rank."""
        counts, left_out, cursor = dict(failed.counts), dict(failed.left_out), Cursor.merged(replicas)
        return cls(
            prompts.seed,
            len(prompts),
            cursor.next,
            cursor.again,
            counts,
            left_out,
            batches,
            prompts.identity,
            tuple(replicas),
            tuple(failed_batches),
            prompts.digest,
        )

    @classmethod
    def parse(cls, text: str) -> SavedCursor:
        """The cursor from a checkpoint's JSON text.

        Raises:
            ValueError: the text holds no cursor.
        """
        try:
            values = json.loads(text)
            again = tuple(int(number) for number in values.pop("again"))
            maps = {
                name: {int(row): int(n) for row, n in values.pop(name).items()}
                for name in ("failed", "left_out")
            }
            texts = {name: str(values.pop(name, "")) for name in ("sources", "digest", "auto_level")}
            replicas = tuple(Drawn.parse(one) for one in values.pop("replicas", ()))
            failed = tuple(
                {str(name): float(n) for name, n in batch.items()}
                for batch in values.pop("failed_batches", ())
            )
            numbers = {name: int(value) for name, value in values.items()}
            return cls(again=again, **maps, **texts, replicas=replicas, failed_batches=failed, **numbers)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no data cursor ({type(error).__name__}: {error})") from None

    def cursor_of(self, prompts: PromptDataset) -> Cursor:
        """Where to go on. With other prompts the numbers in `again` mean other rows, so they are
        not drawn again.
        """
        if self.difference(prompts) is None:
            return Cursor(self.next, self.again)
        return Cursor(self.next)

    def own_of(self, prompts: PromptDataset, rank: int, size: int) -> Drawn | None:
        """The place of the replica of this rank; None where there were not `size` of them, or
        with other prompts.
        """
        same = len(self.replicas) == size and self.difference(prompts) is None
        return self.replicas[rank] if same else None

    def dealt_of(self, prompts: PromptDataset, rank: int, size: int) -> Drawn | None:
        """The place of a replica among another number of them, where the checkpoint holds the groups that
        waited: all are dealt out in the order of `dealt_order`, then the rest by number. None with other
        prompts.
        """
        if self.difference(prompts) is not None:
            return None
        waiting = dealt_order([replica.waiting for replica in self.replicas])
        rest = sorted(set(self.again).difference(waiting))
        return Drawn(self.next, tuple(waiting[rank::size]), again=tuple(rest[rank::size]))

    def failed_of(self, prompts: PromptDataset) -> FailedPrompts:
        """The prompts that failed so far; none of other prompts."""
        if self.difference(prompts) is None:
            return FailedPrompts(len(prompts), self.failed, self.left_out)
        return FailedPrompts(len(prompts))

    def difference(self, prompts: PromptDataset) -> str | None:
        """Why its numbers mean other rows than those of these prompts; None: they mean the same."""
        digest = prompts.digest if self.digest else ""
        own = {
            "seed": self.seed,
            "rows": self.prompts,
            "sources": self.sources or "one",
            "contents": self.digest,
        }
        now = {
            "seed": prompts.seed,
            "rows": len(prompts),
            "sources": prompts.identity or "one",
            "contents": digest,
        }
        return next(
            (f"{name} {own[name]} there, {now[name]} here" for name in own if own[name] != now[name]), None
        )

"""Samples that failed for good: how many by cause, whether they are too many, and which
prompts they are of.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.engines.errors import SampleFailure, TooManyFailures
from megatron_rl_corr.events import EVENTS

CAUSES = (
    "refused",
    "retries",
    "protocol",
    "environment",
    "environment_timeout",
    "agent",
    "agent_timeout",
    "reward_error",
    "reward_timeout",
    "group_filter",
)
"""In the order in which they are counted."""
JUDGED_AFTER = 100
"""Samples before which no fraction is judged."""
JUDGED_BATCHES = 20
HOPELESS = 0.5
"""More failures than this, among the last JUDGED_AFTER samples of a replica, end the run within a step."""
HOPELESS_GROUPS = 50
"""So many groups dropped in a row end the run within a step too: one failure in a large group is
a small fraction.
"""
NAMED_AFTER = 3
"""Dropped groups after which a prompt is named and left out."""


logger = logging.getLogger(__name__)


class Failures:
    """Counts one replica's samples, since the run's beginning.

    Args:
        max_fraction: share of the samples that may fail.
        warn: takes a line about the first failure of each cause.
    """

    def __init__(self, max_fraction: float, warn: Callable[[str], None] = logger.warning):
        self._max_fraction, self._warn = max_fraction, warn
        self.ended = 0
        """Samples that came to an end, well or not. Those that were cancelled with their group
        are not counted.
        """
        self.by_cause = Counter(dict.fromkeys(CAUSES, 0))
        self.groups = 0
        """Groups that were dropped for a failure."""
        self.lengths: list[int] = [0, 0]
        """Samples of dropped groups that had been sampled to their end, and their tokens."""
        self.truncated_groups = 0
        """Groups dropped for a sample that was cut, with `truncated_samples` drop; `groups`
        counts them too.
        """
        self.cut_lengths: list[int] = [0, 0]
        """Samples that had ended of groups that were cut as surplus, and their tokens."""
        self.texts: dict[str, str] = {}
        """The last failure of each cause."""
        self._recent: deque[bool] = deque(maxlen=JUDGED_AFTER)
        self._dropped: list[tuple[int, int]] = []
        self._dropped_in_a_row = self._truncated_in_a_row = 0
        self._told: dict[str, int] = {}

    def scored(self) -> None:
        """A sample has its reward."""
        self.ended += 1
        self._recent.append(False)

    def failed(self, failure: SampleFailure, what: str, **place: int) -> None:
        """A sample has none. The first of each cause is a warning, later ones are events alone;
        place: the event's.
        """
        self.ended += 1
        self._recent.append(True)
        self.by_cause[failure.cause] += 1
        EVENTS.tell("sample_failed", f"{what}: {failure}", cause=failure.cause, **place)
        if failure.cause not in self.texts:
            self._warn(f"{what} failed for good ({failure.cause}; further ones are only counted): {failure}")
        self.texts[failure.cause] = f"{what}: {failure}"

    def dropped(
        self, prompt: Prompt, number: int, lengths: Sequence[int], why: str = "a sample failed"
    ) -> None:
        """The whole group, with its samples of these lengths."""
        EVENTS.tell("group_dropped", why, group=number, row=prompt.index)
        self.groups += 1
        self.lengths[0] += len(lengths)
        self.lengths[1] += sum(lengths)
        self._dropped.append((prompt.index, number))
        self._dropped_in_a_row += 1

    def truncated(self, prompt: Prompt, number: int, lengths: Sequence[int]) -> None:
        """The whole group, as one of its samples was cut: which is no failure.

        Raises:
            TooManyFailures: it is so with every group.
        """
        self.dropped(prompt, number, lengths, "a sample was cut at its longest")
        self.truncated_groups += 1
        self._truncated_in_a_row += 1
        if self._truncated_in_a_row >= HOPELESS_GROUPS:
            raise TooManyFailures(
                f"the last {self._truncated_in_a_row} groups of a replica were all dropped for a sample that "
                "was cut, so its step may never be complete; give a larger `max_new_tokens`, or use "
                "`truncated_samples` mask"
            )

    def cut(self, lengths: Sequence[int]) -> None:
        """A group was cut as surplus, which is no failure; its samples of these lengths had ended."""
        self.cut_lengths[0] += len(lengths)
        self.cut_lengths[1] += sum(lengths)

    def kept(self) -> None:
        """A whole group."""
        self._dropped_in_a_row = self._truncated_in_a_row = 0

    def check(self) -> None:
        """TooManyFailures where a replica's samples fail so often that its step may never be complete."""
        if len(self._recent) < JUDGED_AFTER:
            return
        failed = sum(self._recent)
        if failed > max(self._max_fraction, HOPELESS) * JUDGED_AFTER:
            raise self.too_many(f"{failed} of the last {JUDGED_AFTER} samples of a replica", self.by_cause)
        if self._dropped_in_a_row >= HOPELESS_GROUPS and self._max_fraction < 1.0:
            raise TooManyFailures(
                f"the last {self._dropped_in_a_row} groups of a replica were all dropped for a sample that "
                "failed for good, so its step may never be complete; mend what fails, give failed rewards a "
                "value with `on_failed_reward`, or use a smaller `group_size`. "
                f"{self._told_causes(self.by_cause)}"
            )

    def too_many(self, share: str, by_cause: dict[str, int]) -> TooManyFailures:
        """The error that ends the run, with the last failure of each cause."""
        return TooManyFailures(
            f"{share} failed for good, which is more than `max_failed_fraction` {self._max_fraction:g} "
            f"allows. {self._told_causes(by_cause)}"
        )

    def _told_causes(self, by_cause: dict[str, int]) -> str:
        causes = ", ".join(f"{cause} {int(count)}" for cause, count in by_cause.items() if count)
        texts = "\n".join(f"{cause}: {text}" for cause, text in self.texts.items())
        return f"By cause: {causes}. The last of each cause:\n{texts}"

    def since_last(self) -> dict[str, int]:
        """What was counted since the last call."""
        since, self._told = self._untold(), self._totals()
        return since

    def _untold(self) -> dict[str, int]:
        return {name: count - self._told.get(name, 0) for name, count in self._totals().items()}

    def _totals(self) -> dict[str, int]:
        return {
            "ended": self.ended,
            "replaced": self.groups,
            "truncated": self.truncated_groups,
            "lost_samples": self.lengths[0],
            "lost_tokens": self.lengths[1],
            "cut_ended": self.cut_lengths[0],
            "cut_ended_tokens": self.cut_lengths[1],
            **{f"failed_{cause}": self.by_cause[cause] for cause in CAUSES},
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON has it: what is judged, and what `since_last` and
        `take_dropped` owe.
        """
        return {
            "untold": {name: count for name, count in self._untold().items() if count},
            "recent": [int(failed) for failed in self._recent],
            "dropped": self._dropped,
            "dropped_in_a_row": self._dropped_in_a_row,
            "truncated_in_a_row": self._truncated_in_a_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was asked for, at the run's start; {} for a checkpoint without it."""
        untold = Counter(state.get("untold", {}))
        self.ended, self.groups, self.truncated_groups = (
            untold["ended"],
            untold["replaced"],
            untold["truncated"],
        )
        self.lengths = [untold["lost_samples"], untold["lost_tokens"]]
        self.cut_lengths = [untold["cut_ended"], untold["cut_ended_tokens"]]
        self.by_cause.update({cause: untold[f"failed_{cause}"] for cause in CAUSES})
        self._recent.extend(bool(failed) for failed in state.get("recent", ()))
        self._dropped = [(row, number) for row, number in state.get("dropped", ())]
        self._dropped_in_a_row = state.get("dropped_in_a_row", 0)
        self._truncated_in_a_row = state.get("truncated_in_a_row", 0)

    def take_dropped(self) -> list[tuple[int, int]]:
        """(row of the data set, number) of the groups dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped


class FailedFraction:
    """Failed samples among all that ended in the last JUDGED_BATCHES batches, of all replicas together."""

    def __init__(self, max_fraction: float):
        self._max_fraction = max_fraction
        self._batches: deque[list[float]] = deque(maxlen=JUDGED_BATCHES)

    def state(self) -> list[dict[str, float]]:
        """What a checkpoint keeps of each batch: "ended", and causes of failures."""
        return [
            {name: n for name, n in zip(("ended", *CAUSES), batch, strict=True) if n}
            for batch in self._batches
        ]

    def restore(self, state: Sequence[Mapping[str, float]]) -> None:
        """Go on where `state` was asked for, at the run's start."""
        self._batches.extend([float(batch.get(name, 0.0)) for name in ("ended", *CAUSES)] for batch in state)

    def exceeded(self, batch: list[float]) -> tuple[str, dict[str, float]] | None:
        """batch: samples that ended, then those that failed by CAUSES. Above the bound: how
        many, and by cause.
        """
        self._batches.append(batch)
        ended, *failed = (sum(column) for column in zip(*self._batches, strict=True))
        if ended < JUDGED_AFTER or sum(failed) <= self._max_fraction * ended:
            return None
        share = f"{int(sum(failed))} of the {int(ended)} samples of the last {len(self._batches)} batches"
        return share, dict(zip(CAUSES, failed, strict=True))


class FailedPrompts:
    """Rows of a data set of `size` whose groups were dropped; a row that was so NAMED_AFTER
    times is left out.

    It is not drawn again in the epoch of its last failure, nor in the one behind it; then it
    is counted anew.
    """

    def __init__(
        self, size: int, counts: dict[int, int] | None = None, left_out: dict[int, int] | None = None
    ):
        self._size = size
        self.counts = Counter(counts or {})
        self.left_out = dict(left_out or {})
        """Row -> the last epoch without it."""

    def add(self, row: int, number: int) -> bool:
        """The group `number` of this row was dropped; whether the row is left out from now on."""
        self.counts[row] += 1
        if self.counts[row] < NAMED_AFTER:
            return False
        del self.counts[row]
        self.left_out[row] = number // self._size + 1
        return True

    def leaves_out(self, row: int, number: int) -> bool:
        """True if the row is not to be drawn as this number."""
        return row in self.left_out and number // self._size <= self.left_out[row]

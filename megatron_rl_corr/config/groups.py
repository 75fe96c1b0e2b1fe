"""Which groups a step takes, and how many are sampled for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, Options, option

SPREAD = "spread"
"""The value of `group_filter` that asks for unequal rewards."""


@dataclass(frozen=True, kw_only=True)
class GroupsConfig(Options):
    """Groups: which groups a step takes, and how many are sampled for it."""

    group_filter: str | None = option(None, metavar="spread|FILE.py:NAME", none="none")
    """Groups that a step takes (dynamic sampling): spread, those whose rewards are not all exactly equal,
    or those that your function NAME(prompt, group) returns True for; also package.module:NAME. Another
    group is sampled in the place of one that does not pass; its prompt is used up, and it is no failure.
    """

    group_filter_limit: Annotated[float | None, Between(1, finite=True)] = option(
        None, metavar="X", needs="group_filter", usual=10.0
    )
    """Groups that are sampled for a step, as a multiple of those that it takes, while groups do not pass.
    With `max_lag` K so many may be sampled for each of the K + 1 steps that are under way.
    """

    group_filter_exhausted: Literal["stop", "take"] = option("stop", needs="group_filter")
    """What follows where too few of them pass: stop ends the run, take fills the step with the last
    ones that did not.
    """

    oversampling: Annotated[float, Between(1, finite=True)] = option(1.0, metavar="X")
    """Sample X times as many groups as a step takes, so that slow ones do not hold it up; it takes those
    that are done first, which prefers short responses. With `max_lag` 0 the others are aborted, and their
    prompts drawn again for the next step. With a lag each group that is still running from an earlier step
    is made up for by one more, at most X - 1 times the groups of a step; all are kept.
    """

    def check(self) -> None:
        if self.group_filter is not None and self.group_filter != SPREAD and ":" not in self.group_filter:
            raise ValueError(
                f"`group_filter` must be {SPREAD}, path/to/file.py:name or package.module:name, got "
                f"{self.group_filter!r}"
            )

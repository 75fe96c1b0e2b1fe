"""A group of samples, what a step takes of them, and by which rules; G groups a step."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron_rl_corr.engines.trajectory import Trajectory, episode_numbers
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.trace import GroupTrace


@dataclass(frozen=True)
class Group:
    """The samples of one prompt. number: its place in the sequence of all groups.

    A sample is an episode, of one trajectory or of several: its branches, one behind the other.
    """

    number: int
    trajectories: list[Trajectory]
    rewards: list[float]
    """The reward of each trajectory: its own, or that of its episode."""
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    """The named rewards of each trajectory's episode, before their weights; empty where the environment gave
    the reward.
    """
    trace: GroupTrace | None = None
    """When what was done, with --rollout-trace."""

    @cached_property
    def episodes(self) -> list[list[Trajectory]]:
        """The trajectories of each episode."""
        return self._by_episode(self.trajectories)

    @cached_property
    def episode_rewards(self) -> list[float]:
        """The mean reward of each episode's trajectories."""
        return [mean_reward(own) for own in self._by_episode(self.rewards)]

    @property
    def episode_parts(self) -> list[dict[str, float]]:
        """The named rewards of each episode."""
        return [own[0] for own in self._by_episode(self.reward_parts)] if self.reward_parts else []

    def _by_episode[Value](self, values: Sequence[Value]) -> list[list[Value]]:
        found: list[list[Value]] = []
        for value, number in zip(values, episode_numbers(self.trajectories), strict=True):
            if number == len(found):
                found.append([])
            found[number].append(value)
        return found

    @property
    def oldest_version(self) -> int:
        return min(versions.number(trajectory.oldest_version) for trajectory in self.trajectories)


def mean_reward(rewards: Sequence[float]) -> float:
    """The reward of an episode from those of its trajectories: their mean, exactly theirs if all are one."""
    return rewards[0] if len(set(rewards)) == 1 else math.fsum(rewards) / len(rewards)


@dataclass
class PutAside:
    """Counts groups that were sampled to their end and are not trained."""

    groups: int = 0
    above_0: int = 0
    """Those of them whose mean reward is above 0."""
    samples: int = 0
    tokens: int = 0
    """Sampled tokens of these samples."""
    rewards: float = 0.0
    """The sum of their rewards."""

    def count(self, group: Group) -> None:
        """Add a group."""
        self.groups += 1
        self.above_0 += sum(group.episode_rewards) > 0
        self.samples += len(group.episodes)
        self.tokens += sum(int(sample.sampled.sum()) for sample in group.trajectories)
        self.rewards += sum(group.episode_rewards)


@dataclass(frozen=True)
class Taken:
    """The groups of a step, the state of the stream when they were taken, and its counts since
    the step before.
    """

    groups: list[Group]
    """[G], by number."""
    ready: int
    """Groups that were done and are left for later steps."""
    running: int
    """Groups that were being sampled."""
    dropped: int
    """Groups put aside for their age."""
    filtered: PutAside = field(default_factory=PutAside)
    """Groups that did not pass the filter, those of `refilled` among them."""
    refilled: int = 0
    """Groups of this step that did not pass it, as too few others did."""
    aborted: int = 0
    """Groups that were sampled beside the step's own and ended unfinished."""
    surplus: PutAside = field(default_factory=PutAside)
    """Those that were done when the step had its own, and are not kept."""
    aside: list[Trajectory] = field(default_factory=list)
    """One sample of each of some groups that did not pass the filter."""
    kept_surplus: int = 0
    """Groups done or running beyond those of the steps ahead."""


@dataclass(frozen=True)
class StreamState:
    """What a stream has drawn and not trained, and what it has counted since the last step took its groups.

    Example: steps take group 6 first, then 4; 8 is being sampled: StreamState(waiting=(6, 4), running=(8,)).
    """

    waiting: tuple[int, ...] = ()
    """Groups that are done, in the order in which steps take them."""
    running: tuple[int, ...] = ()
    """Groups that are being sampled, in the order in which they were begun."""
    again: tuple[int, ...] = ()
    """Groups that were aborted and are begun next."""
    filtered: PutAside = field(default_factory=PutAside)
    """As `Taken.filtered`, so far."""
    dropped: int = 0
    """As `Taken.dropped`, so far."""

    def counts(self) -> dict[str, Any]:
        """The part that is counted, as JSON has it."""
        return {"dropped": self.dropped, "filtered": asdict(self.filtered)}

    @classmethod
    def resumed(cls, waiting: Sequence[int], counts: Mapping[str, Any]) -> StreamState:
        """What a stream that goes on begins with. counts: what `counts` gave, or {}."""
        return cls(
            tuple(waiting), filtered=PutAside(**counts.get("filtered", {})), dropped=counts.get("dropped", 0)
        )


@dataclass(frozen=True)
class Selection:
    """Which groups a step takes, and how many are sampled for it. Without settings: as many,
    and all of them.
    """

    passes: Callable[[Group], Awaitable[bool | None]] | None = None
    """Whether a group is trained; None: it could not be judged, and is lost as one with a
    failed sample is.
    """
    limit: float = 10.0
    """--rollout-group-filter-limit."""
    refills: bool = False
    """--rollout-group-filter-exhausted take."""
    oversampling: float = 1.0
    """--rollout-oversampling."""
    measured: int = 0
    """Sequences kept of groups that do not pass, one of each, between two steps."""
    choose: Callable[[Group], Trajectory | None] = lambda group: group.trajectories[0]
    """The sample of such a group that is kept; None: none of it."""

"""Groups that are being sampled: what a checkpoint keeps of their finished samples and running episodes.

The event loop that samples a group alone changes it; a checkpoint takes copies there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.engines.trajectory import FinishReason, Trajectory
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.turns import Turns


@dataclass(frozen=True)
class FinishedSample:
    """A sample that was sampled to its end. Example: FinishedSample([Trajectory(...)])."""

    branches: list[Trajectory]
    """One, but of an agent that has edited its history."""
    latest: int = 0
    """The branch of the latest turn, which rewards are of."""


@dataclass
class EpisodeSoFar:
    """An episode that an environment has not ended. Example: EpisodeSoFar(Turns([1, 2]), "stop", [60])."""

    turns: Turns
    finish_reason: FinishReason
    """How its last turn ended; those before have ended with stop."""
    reply: list[int] | None = None
    """What the environment has said to the last turn, [] for DONE; None: nothing yet."""


@dataclass
class BegunGroup:
    """What has been sampled of a group.

    Example: sample 0 of group 812 is done and scored, sample 1 has made turns: BegunGroup(812, {0:
    FinishedSample([...])}, {0: Score(1.0)}, {1: EpisodeSoFar(...)}).
    """

    number: int
    samples: dict[int, FinishedSample] = field(default_factory=dict)
    """The finished ones, by their indices in the group."""
    scores: dict[int, Score | None] = field(default_factory=dict)
    """The rewards that are known; None: it has failed, and on_failed_reward takes its place."""
    episodes: dict[int, EpisodeSoFar] = field(default_factory=dict)
    """Those under way whose environments may be replayed, by the indices of their samples."""
    whole: Group | None = None
    """All of it, while a filter judges it."""

    @classmethod
    def at(cls, number: int, begun: Mapping[int, BegunGroup] | None) -> BegunGroup:
        """The group of this number; one that nobody keeps if begun has none."""
        return (begun or {}).get(number) or cls(number)

    async def sample(
        self, index: int, new: Callable[[], Awaitable[tuple[Sequence[Trajectory], int]]]
    ) -> FinishedSample:
        """A sample that is finished already, or that new() samples: its branches, and which is the latest."""
        if index not in self.samples:
            self.finish(index, *await new())
        return self.samples[index]

    def finish(self, index: int, branches: Sequence[Trajectory], latest: int = 0) -> None:
        """Keep a sample that was sampled to its end."""
        self.samples[index] = FinishedSample(list(branches), latest)
        self.episodes.pop(index, None)

    def copied(self) -> BegunGroup:
        """What it is now, for another thread."""
        episodes = {
            index: replace(one, turns=one.turns.copied())
            for index, one in self.episodes.items()
            if one.turns.response_tokens
        }
        return replace(self, samples=dict(self.samples), scores=dict(self.scores), episodes=episodes)

    @property
    def is_empty(self) -> bool:
        """Nothing of it was sampled."""
        return self.whole is None and not self.samples and not self.episodes

    @property
    def trajectories(self) -> list[Trajectory]:
        """All that was sampled, by sample; an episode under way ends with its last turn, by `abort`."""
        if self.whole is not None:
            return self.whole.trajectories
        running = {
            index: [replace(one.turns.whole("abort"), sample_index=index)]
            for index, one in self.episodes.items()
        }
        sequences = {index: one.branches for index, one in self.samples.items()} | running
        return [one for index in sorted(sequences) for one in sequences[index]]

    @property
    def oldest_version(self) -> int:
        """As `Group.oldest_version`, of what was sampled."""
        if self.whole is not None:
            return self.whole.oldest_version
        branches = [branch for one in self.samples.values() for branch in one.branches]
        found = [*branches, *(one.turns for one in self.episodes.values())]
        return min(versions.number(one.oldest_version) for one in found)

"""When each sample was waiting, sampled and scored: noted while it happens, for --rollout-trace.

Times are seconds of `time.perf_counter`, one clock for the event loop's thread and the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

clock = time.perf_counter

CURRENT: ContextVar[GroupTrace | None] = ContextVar("group_trace", default=None)
"""The group that the running coroutine samples, where its times are noted; coroutines started
within inherit it.
"""


@dataclass
class RequestTrace:
    """One request of a sample: from the wait for a place at a server to its answer."""

    sample: int
    queued: float
    sent: float | None = None
    """When a server had a place for it."""
    answered: float | None = None
    server: str = ""
    tokens: int = 0
    """Sampled tokens of the answer."""
    failure: str | None = None
    """Why there is no answer that can be used."""
    server_times: dict[str, float] = field(default_factory=dict)
    """Seconds that the server tells, by `Engine.server_times`."""
    turn: int = 0
    """Which answer of an episode it is for; several requests where one failed or was continued."""


@dataclass
class EpisodeTrace:
    """One episode: between its turns the user's code has the time."""

    sample: int
    code: str
    """What that code is: harness or environment."""
    begun: float = field(default_factory=clock)
    ended: float | None = None


@dataclass
class GroupTrace:
    """The times of a group."""

    number: int
    begun: float = field(default_factory=clock)
    requests: list[RequestTrace] = field(default_factory=list)
    rewards: list[tuple[int | None, float, float]] = field(default_factory=list)
    """(sample, or None for the whole group; begin; end) of each call of rewards."""
    episodes: list[EpisodeTrace] = field(default_factory=list)

    def request(self, sample: int, turn: int = 0) -> RequestTrace:
        """A request of this sample, which begins to wait for a place."""
        self.requests.append(RequestTrace(sample, clock(), turn=turn))
        return self.requests[-1]


@contextmanager
def traced_episode(sample: int, code: str) -> Iterator[None]:
    """Note an episode of the group that the running coroutine samples, from its begin to its end."""
    group = CURRENT.get()
    episode = EpisodeTrace(sample, code)
    try:
        yield
    finally:
        episode.ended = clock()
        if group is not None:
            group.episodes.append(episode)

"""The time that a push of weights may take, and which servers have used it up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_rl_corr.engines.errors import PushTooLong, RolloutServerError

FAIR = 0.1
"""Share of a push's time that each request has at least, while there is so much: a server which had it and
did not answer is stuck.
"""


@dataclass
class PushBounds:
    """Bounds every request of one push, and of the attempts that it consists of.

    An attempt has half of the time that is left when it begins: a server that is waited for by then is
    `stuck`, and the other half is for the others. Requests that begin later have FAIR of the push's time, so
    that a push which is slow, but moves on, is not cut before its end.

    Example: of 100 s, begun at 0: a request at 20 s has 30 s, one at 45 s has 10 s, one at 95 s has 5 s, and
    then PushTooLong is raised.
    """

    limit_s: float = math.inf
    """The seconds of the whole push."""
    half: float = math.inf
    """When the attempt has used up its half, by time.monotonic."""
    end: float = math.inf
    """When the push has used up limit_s, by time.monotonic."""
    stuck: set[str] = field(default_factory=set)
    """Addresses of servers that were waited for in vain in this push."""

    @property
    def is_open(self) -> bool:
        """A push is under way."""
        return self.end < math.inf

    @property
    def is_over(self) -> bool:
        """The push that is under way has no time left."""
        return time.monotonic() >= self.end

    def begin(self, limit_s: float) -> None:
        """A push begins, and its first attempt."""
        self.limit_s, self.end = limit_s, time.monotonic() + limit_s
        self.stuck.clear()
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Another attempt of the push begins."""
        now = time.monotonic()
        self.half = now + (self.end - now) / 2

    def close(self) -> None:
        """The push is over: nothing is bounded."""
        self.half = self.end = math.inf

    @contextmanager
    def bounding(self, url: str, endpoint: str, own_s: float) -> Iterator[float]:
        """The seconds that a request which begins now may take; its timeout makes the server `stuck`.

        Args:
            url, endpoint: of the request.
            own_s: what it might take if it were of no push.

        Raises:
            PushTooLong: no time is left, or what was left for an answer was not enough to blame the server.
        """
        now, fair_s = time.monotonic(), FAIR * self.limit_s
        left_s = self.end - now
        if left_s <= 0:
            raise PushTooLong(url, endpoint, self.limit_s)
        limit_s = min(own_s, max(self.half - now, fair_s), left_s)
        try:
            yield limit_s
        except RolloutServerError as error:
            if not error.timed_out:
                raise
            if limit_s < min(own_s, fair_s):
                raise PushTooLong(url, endpoint, self.limit_s) from error
            self.stuck.add(url)
            raise

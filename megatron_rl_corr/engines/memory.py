"""The part of the seam that hands a server's GPU memory to a trainer on the same GPUs, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_rl_corr.engines.types import Request, UnsupportedByEngine

MemoryPart = Literal["weights", "cache"]
"""cache: of keys and values, with whatever else sampling needs beside weights."""
ALL_MEMORY: tuple[MemoryPart, ...] = ("weights", "cache")


class MemoryRelease(Protocol):
    """What an engine needs to take turns with a trainer on its GPUs."""

    name: str

    def memory_problem(self, server_info: Mapping[str, Any]) -> str | None:
        """Why this server, as it was started, can't release its memory and get new weights, with the
        remedy; None: it can.
        """
        raise UnsupportedByEngine(self.name, "`colocate`: the release of its memory is not tested here")

    def release_memory(self, parts: Sequence[MemoryPart]) -> Request:
        """Free the memory of these parts. The server must be paused, and run nothing: it
        may end otherwise.
        """
        raise UnsupportedByEngine(self.name, "`colocate`")

    def resume_memory(self, parts: Sequence[MemoryPart]) -> Request:
        """Take memory for these parts, which were released, and no other: the server may end otherwise. It
        holds nothing of before.
        """
        raise UnsupportedByEngine(self.name, "`colocate`")

"""What a reward may be, and how many processes compute it; without torch, for the processes themselves."""

import math
import struct
from numbers import Real

FLAG = "--rollout-reward-function"
DEFAULT_WORKERS = 4
"""Processes of a replica."""


def checked_reward(value: object, source: str) -> float:
    """The number, as float32 has it. ValueError that names who gave it."""
    if not isinstance(value, Real):
        raise ValueError(f"{source} must return a number, got {value!r} ({type(value).__name__})")
    try:
        reward = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ValueError(f"{source} must return a number that is finite in float32, got {value!r}")
    return reward

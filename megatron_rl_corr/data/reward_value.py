"""The check of what a reward returned: numbers, or dicts of named numbers."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from numbers import Real
from typing import Any

SCORE = "score"
"""The key of a dict whose value is the reward; the others are only logged."""
PART = re.compile(r"[A-Za-z_][\w.-]*")


def checked_reward(value: object, source: str) -> float:
    """The reward rounded to float32.

    Args:
        value: what the user's code returned.
        source: that code, for the error.

    Raises:
        ValueError: not a number, or not finite in float32.
    """
    if not isinstance(value, Real):
        raise ValueError(f"{source} must return a number, got {_shown(value)} ({type(value).__name__})")
    try:
        reward = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ValueError(f"{source} must return a number that is finite in float32, got {_shown(value)}")
    return reward


def is_reward(value: object) -> bool:
    """True for a number as `checked_reward` gives it and JSON brings it back."""
    return type(value) in (int, float) and math.isfinite(value)


def checked_parts(value: object, name: str, source: str) -> dict[str, float]:
    """{name: the reward, name/key: each further number of a dict}, as float32 has them.

    Args:
        value: a number, or a dict of numbers that has SCORE.
        name: of the reward.
        source: as `checked_reward`'s.

    Raises:
        ValueError: as `checked_reward`, or a dict without SCORE or with a key that is no name.
    """
    if not isinstance(value, Mapping):
        return {name: checked_reward(value, source)}
    if SCORE not in value:
        raise ValueError(
            f'{source} must return a number or a dict with "{SCORE}", the reward, got a dict with '
            f"{_shown(list(value))}"
        )
    parts = {name: checked_reward(value[SCORE], f'{source}: "{SCORE}"')}
    for key, part in value.items():
        if not isinstance(key, str) or not PART.fullmatch(key):
            raise ValueError(f"{source}: a key of its dict must be a word, got {_shown(key)}")
        if key != SCORE:
            parts[f"{name}/{key}"] = checked_reward(part, f'{source}: "{key}"')
    return parts


def checked_group(values: object, count: int, name: str, source: str) -> list[dict[str, float]]:
    """`checked_parts` of each sample of a group or batch.

    Raises:
        ValueError: no list of `count` values, or as `checked_parts`, with the place of the sample.
    """
    if not isinstance(values, (list, tuple)):
        # An array, or a tensor of CPU numbers, is as good.
        values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else _shown(values)
        raise ValueError(f"{source} must return a list of {count} rewards, one for each sample, got {got}")
    return [checked_parts(one, name, f"{source}: sample {place}") for place, one in enumerate(values)]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."

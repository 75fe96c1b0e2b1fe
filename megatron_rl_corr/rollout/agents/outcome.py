"""What a harness's result may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.data.reward_value import SCORE, checked_parts

REWARD = "reward"
"""The key of a dict whose value is the reward; the others are only logged."""
NAME = "agent"
"""What the reward is called among the named ones."""


def checked_outcome(value: Any, source: str) -> dict[str, float] | None:
    """{"agent": the reward, "agent/KEY": each further number of a dict}, as float32 has them; None: none.

    Example: {"agent": 1.0, "agent/steps": 3.0} of {"reward": 1, "steps": 3}, {"agent": 0.5} of 0.5.

    Args:
        value: what the user's code returned.
        source: that code, for errors.

    Raises:
        ValueError: it is neither None nor a finite number nor a dict of such that has REWARD.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if REWARD not in value or SCORE in value:
            wrong = f'has "{SCORE}"' if REWARD in value else f"has {str(list(value))[:200]}"
            raise ValueError(
                f'{source} must return a number, None or a dict of numbers with "{REWARD}", the reward, and '
                f'without "{SCORE}", got a dict that {wrong}'
            )
        value = {SCORE if key == REWARD else key: one for key, one in value.items()}
    return checked_parts(value, NAME, source)

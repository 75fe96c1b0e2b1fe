"""What a harness's result may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.data.reward_value import SCORE, checked_parts, checked_reward, is_reward

REWARD = "reward"
"""The key of a dict whose value is the reward; the others are only logged."""
REWARDS = "rewards"
"""The key of a dict of rewards of single branches, by the id of an answer in them."""
NAME = "agent"
"""What the reward is called among the named ones."""


def checked_outcome(value: Any, source: str) -> dict[str, Any] | None:
    """{"agent": the reward, "agent/KEY": each further number of a dict, REWARDS: as it was given, if it was},
    numbers as float32 has them; None: none.

    Example: {"agent": 1.0, "agent/steps": 3.0} of {"reward": 1, "steps": 3}, {"agent": 0.5} of 0.5.

    Args:
        value: what the user's code returned.
        source: that code, for errors.

    Raises:
        ValueError: it is neither None nor a finite number nor a dict of such that has REWARD, or REWARDS is
            no dict of finite numbers.
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
        if REWARDS in value:
            parts = {key: one for key, one in value.items() if key != REWARDS}
            return checked_outcome(parts, source) | {REWARDS: _checked_rewards(value[REWARDS], source)}
        value = {SCORE if key == REWARD else key: one for key, one in value.items()}
    return checked_parts(value, NAME, source)


def is_outcome(value: Any) -> bool:
    """True for what `checked_outcome` gives: what came out of a harness's process may be another's, as of a
    tool that runs what the policy wrote and found the descriptor.
    """
    if value is None:
        return True
    if not isinstance(value, dict) or NAME not in value:
        return False
    rewards = value.get(REWARDS, {})
    numbers = [one for key, one in value.items() if key != REWARDS]
    return isinstance(rewards, dict) and all(map(is_reward, [*numbers, *rewards.values()]))


def _checked_rewards(value: Any, source: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f'{source}: "{REWARDS}" must be a dict of numbers by the id of an answer, such as '
            f'{{"chatcmpl-3": 1.0}}, got {str(value)[:200]}'
        )
    return {key: checked_reward(one, f'{source}: "{REWARDS}" of {key[:100]}') for key, one in value.items()}

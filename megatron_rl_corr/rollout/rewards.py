"""Loads the user's reward function and scores trajectories with it, or takes what their environments scored.

N trajectories.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch

from megatron_rl_corr.rollout.loading import load
from megatron_rl_corr.rollout.prompts import Prompt
from megatron_rl_corr.rollout.trajectory import Trajectory

FLAG = "--rollout-reward-function"

RewardFunction = Callable[[Prompt, list[int], str], float]
"""reward(prompt, output_ids, finish_reason) -> a finite number."""


def load_function(spec: str) -> RewardFunction:
    """The function named by "path/to/file.py:name" or "package.module:name"; errors as `load`'s."""
    return load(spec, FLAG)


def score(
    trajectories: Sequence[Trajectory], prompts: Sequence[Prompt], function: RewardFunction | None
) -> torch.Tensor:
    """[N] float32: the reward of each trajectory, whose prompt is prompts[trajectory.prompt_index].

    function None: the environments' own rewards. A function sees all of an episode behind the prompt, what the
    environment said too. Raises ValueError naming the trajectory for a reward that is not a finite number, for one
    that nobody gives or both do, and where the trajectory is of another prompt. An exception of the function gets a
    note saying which trajectory it was.
    """
    rewards = torch.empty(len(trajectories), dtype=torch.float32)
    for row, trajectory in enumerate(trajectories):
        label = f"prompt {trajectory.prompt_index} sample {trajectory.sample_index}"
        prompt, own = prompts[trajectory.prompt_index], trajectory.environment_reward
        if prompt.input_ids != trajectory.prompt_ids.tolist():
            raise ValueError(f"{label}: the trajectory's prompt_ids are not the prompt's input_ids")
        if (function is None) == (own is None):
            said = "its environment's reward() gave none" if own is None else f"its environment's reward() gave {own}"
            remedy = "give one of them" if own is None else "drop one of them"
            raise ValueError(f"{label}: {said}, and {FLAG} is {'not ' * (own is None)}given; {remedy}")
        if function is None:
            rewards[row] = checked_reward(own, "the environment's reward()", label)
            continue
        try:
            value = function(prompt, trajectory.output_ids.tolist(), trajectory.finish_reason)
        except Exception as error:
            error.add_note(f"{FLAG} was scoring {label} (row {prompt.index} of the data set)")
            raise
        rewards[row] = checked_reward(value, FLAG, label)
    return rewards


def checked_reward(value: object, source: str, label: str) -> float:
    """The number, as float32 has it. ValueError naming who gave it, and for what."""
    if not isinstance(value, Real):
        raise ValueError(f"{source} must return a number, got {value!r} ({type(value).__name__}) for {label}")
    reward = torch.tensor(float(value), dtype=torch.float32).item()
    if not math.isfinite(reward):
        raise ValueError(f"{source} must return a number that is finite in float32, got {value!r} for {label}")
    return reward

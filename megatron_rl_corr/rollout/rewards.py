"""Loads the user's reward function and scores trajectories with it.

N trajectories.
"""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from types import ModuleType

import torch

from megatron_rl_corr.rollout.prompts import Prompt
from megatron_rl_corr.rollout.trajectory import Trajectory

FLAG = "--rollout-reward-function"
FORMS = "give path/to/file.py:name or package.module:name"

RewardFunction = Callable[[Prompt, list[int], str], float]
"""reward(prompt, output_ids, finish_reason) -> a finite number."""


def load_function(spec: str) -> RewardFunction:
    """The function named by "path/to/file.py:name" or "package.module:name".

    Raises ValueError naming the flag and the remedy where there is no such file, module, name, or where it is
    not callable. An exception of the user's own module is raised as it is.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(f"{FLAG}: {FORMS}, got {spec!r}")
    module = _load_file(source) if source.endswith(".py") else _load_module(source)
    function = getattr(module, name, None)
    if function is None:
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        has = ", ".join(sorted(known)) or "no functions"
        raise ValueError(f"{FLAG}: {source} has no {name!r}; it has {has}")
    if not callable(function):
        raise ValueError(f"{FLAG}: {name!r} in {source} is a {type(function).__name__}, not a function")
    return function


def score(
    trajectories: Sequence[Trajectory], prompts: Sequence[Prompt], function: RewardFunction
) -> torch.Tensor:
    """[N] float32: the reward of each trajectory, whose prompt is prompts[trajectory.prompt_index].

    Raises ValueError naming the trajectory for a reward that is not a finite number, and where the trajectory
    is of another prompt. An exception of the function gets a note saying which trajectory it was.
    """
    rewards = torch.empty(len(trajectories), dtype=torch.float32)
    for row, trajectory in enumerate(trajectories):
        label = f"prompt {trajectory.prompt_index} sample {trajectory.sample_index}"
        prompt = prompts[trajectory.prompt_index]
        if prompt.input_ids != trajectory.prompt_ids.tolist():
            raise ValueError(f"{label}: the trajectory's prompt_ids are not the prompt's input_ids")
        try:
            value = function(prompt, trajectory.output_ids.tolist(), trajectory.finish_reason)
        except Exception as error:
            error.add_note(f"{FLAG} was scoring {label} (row {prompt.index} of the data set)")
            raise
        rewards[row] = _checked(value, label)
    return rewards


def _checked(value, label: str) -> float:
    if not isinstance(value, Real):
        raise ValueError(f"{FLAG} must return a number, got {value!r} ({type(value).__name__}) for {label}")
    reward = torch.tensor(float(value), dtype=torch.float32).item()
    if not math.isfinite(reward):
        raise ValueError(f"{FLAG} must return a number that is finite in float32, got {value!r} for {label}")
    return reward


def _load_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    if not path.is_file():
        raise ValueError(f"{FLAG}: there is no file {source} (looked for {path}); {FORMS}")
    name = f"rollout_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source + ".").startswith(error.name + "."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"{FLAG}: there is no module {error.name!r} on PYTHONPATH; {FORMS}") from None

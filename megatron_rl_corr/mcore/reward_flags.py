"""The flags of rewards: where they are computed, how long a call may take, and how many samples may fail.

Nothing heavy is imported, as in arguments.py.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.data.reward_value import DEFAULT_WORKERS, checked_reward

DEFAULT_TIMEOUT_S, DEFAULT_FAILED_FRACTION = 120.0, 0.05


@dataclass(frozen=True)
class RewardOptions:
    """How samples are scored."""

    workers: int | None
    """Processes a replica; 0: a thread of the trainer. None: not given, so DEFAULT_WORKERS where they are of use."""
    timeout_s: float
    """Of one call."""
    on_failed: float | None
    """The reward of a sample whose reward failed; None: its group is dropped."""
    max_failed_fraction: float


def add_reward_arguments(group: Any) -> None:
    """Add them to a group of a parser."""
    add = group.add_argument
    add("--rollout-reward-workers", metavar="N", type=int, default=None,
        help="processes of each data-parallel replica that compute a plain reward function, each with the function's "
        f"file and its setup() of its own (default {DEFAULT_WORKERS}); 0 computes one reward at a time in a thread of "
        "the trainer, where a call that hangs can't be ended. An async function runs on the trainer's event loop")
    add("--rollout-reward-timeout-s", metavar="S", type=float, default=None,
        help=f"longest call of the reward function; its worker is then killed and replaced (default "
        f"{DEFAULT_TIMEOUT_S:g})")
    add("--rollout-on-failed-reward", metavar="drop|VALUE", default=None,
        help="a sample whose reward failed (an exception, no finite number, the limit): drop (default) drops its group "
        "and samples the next prompt instead, a number is taken as its reward")
    add("--rollout-max-failed-fraction", metavar="X", type=float, default=DEFAULT_FAILED_FRACTION,
        help="the run ends when more of the samples of the last 20 steps than this failed for good: refused by the "
        "server, out of retries, or with a failed environment or reward; judged after 100 samples "
        f"(default {DEFAULT_FAILED_FRACTION:g}; 1 never ends it)")


def reward_options(values: argparse.Namespace, *, function: str | None) -> RewardOptions:
    """ValueError for what is out of range or, without a reward function, of no effect."""
    workers, timeout_s = values.rollout_reward_workers, values.rollout_reward_timeout_s
    on_failed, fraction = values.rollout_on_failed_reward, values.rollout_max_failed_fraction
    for name, value in (("reward-workers", workers), ("reward-timeout-s", timeout_s), ("on-failed-reward", on_failed)):
        if value is not None and function is None:
            raise ValueError(f"--rollout-{name} {value} has no effect without --rollout-reward-function; drop it")
    if workers is not None and workers < 0:
        raise ValueError(f"--rollout-reward-workers must be at least 0, got {workers}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"--rollout-reward-timeout-s must be positive, got {timeout_s}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"--rollout-max-failed-fraction must be from 0 to 1, got {fraction}")
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    return RewardOptions(workers, timeout_s, _on_failed(on_failed), fraction)


def _on_failed(given: str | None) -> float | None:
    if given in (None, "drop"):
        return None
    try:
        return checked_reward(float(given), "--rollout-on-failed-reward")
    except ValueError:
        raise ValueError(
            f"--rollout-on-failed-reward must be drop or a number that is finite in float32, got {given!r}"
        ) from None

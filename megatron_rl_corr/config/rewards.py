"""Who computes rewards, how long a call may take, and how many samples may fail."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class RewardsConfig(Options):
    """Rewards: who computes them, how long a call may take, and how many samples may fail."""

    reward_function: str | None = option(None, metavar="FILE.py:NAME", none="none")
    """reward(prompt, output_ids, finish_reason) -> number; also package.module:NAME, or none where the environment
    scores."""

    reward_workers: Annotated[int | None, Between(0)] = option(None, metavar="N", needs="reward_function")
    """Processes of each data-parallel replica that compute a plain reward function, each with the function's file and
    its setup() of its own (default: 4). 0 computes one reward at a time in a thread of the trainer, where a call that
    hangs can't be ended. An async function runs on the trainer's event loop."""

    reward_timeout_s: Annotated[float | None, Positive()] = option(
        None, metavar="S", needs="reward_function", usual=120.0
    )
    """Longest call of the reward function, in seconds; its worker is then killed and replaced."""

    on_failed_reward: float | None = option(None, metavar="drop|VALUE", none="drop", needs="reward_function")
    """A sample whose reward failed (an exception, no finite number, the time limit): drop drops its group and samples
    the next prompt instead, a number is taken as its reward (default: drop)."""

    max_failed_fraction: Annotated[float, Between(0, 1)] = option(0.05, metavar="X")
    """The run ends when more than this share of the samples of the last 20 batches failed for good: refused by the
    server, out of retries, or with a failed environment or reward. It is judged after 100 samples; 1 never ends the
    run."""

    def check(self) -> None:
        if self.on_failed_reward is None:
            return
        rounded = _as_float32(self.on_failed_reward)
        if not math.isfinite(rounded):
            raise ValueError(
                f"`on_failed_reward` must be drop or a number that is finite in float32, got {self.on_failed_reward}"
            )
        # Like every reward: else a group whose rewards are all this number would count as one with a spread.
        object.__setattr__(self, "on_failed_reward", rounded)


def _as_float32(value: float) -> float:
    """The nearest number that float32 has; inf beyond its range."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf

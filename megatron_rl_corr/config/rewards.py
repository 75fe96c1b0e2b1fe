"""Who computes rewards, how they add up, how long a call may take, and how many samples may fail."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_rl_corr.config.fields import Between, Options, Positive, option
from megatron_rl_corr.config.reward_specs import BUILTIN_REWARDS, as_float32, parse_rewards

ANY = "reward_function or reward_url"


@dataclass(frozen=True, kw_only=True)
class RewardsConfig(Options):
    """Rewards: who computes them, how they add up, how long a call may take, and how many
    samples may fail.
    """

    reward_function: tuple[str, ...] = option(
        (),
        metavar="[NAME=]SPEC",
        none="none",
        more="Built in: " + "; ".join(f"{name}: {one.doc}" for name, one in BUILTIN_REWARDS.items()) + ".",
    )
    """Functions whose weighted values add up to the reward: FILE.py:NAME, package.module:NAME, or a
    built-in one's name; none where the environment scores. NAME is what metrics call it. reward(sample) ->
    number or dict of numbers with "score"; rewards(samples) -> list of these scores a whole group;
    reward(prompt, output_ids, finish_reason) sees ids alone. Each may be async.
    """

    reward_url: tuple[str, ...] = option((), metavar="[NAME=]URL")
    """Addresses that samples are posted to in batches, for a list of numbers: rewards like
    those of functions.
    """

    reward_weights: tuple[float, ...] = option((), metavar="W", needs=ANY)
    """A weight for each reward, functions first (default: 1 each); 0 only logs it. The reward is the sum
    of weight x value.
    """

    reward_workers: Annotated[int | None, Between(0)] = option(None, metavar="N", needs="reward_function")
    """Processes of each data-parallel replica that compute plain reward functions, each with the
    functions' files and their setup() of its own (default: 4). 0 computes one reward at a time in a
    thread of the trainer, where a call that hangs can't be ended. An async function runs on the
    trainer's event loop.
    """

    reward_timeout_s: Annotated[float | None, Positive()] = option(None, metavar="S", needs=ANY, usual=120.0)
    """Longest call of a reward function, in seconds; its worker is then killed and replaced. Of an
    address: longest wait for an answer, with what is asked again.
    """

    reward_url_batch: Annotated[int | None, Positive()] = option(
        None, metavar="N", needs="reward_url", usual=32
    )
    """Samples that an address is sent at once, at most."""

    reward_api_key_env: str | None = option(None, metavar="NAME", needs="reward_url")
    """Environment variable that holds the key of the addresses, sent as a bearer token."""

    on_failed_reward: float | None = option(None, metavar="drop|VALUE", none="drop", needs=ANY)
    """A sample whose reward failed (an exception, no finite number, the time limit): drop drops its group
    and samples the next prompt instead, a number is taken as its reward (default: drop).
    """

    truncated_samples: Literal["train", "mask", "drop"] = "train"
    """Samples that were cut at `max_new_tokens` (or at `max_turns`): train takes them like others; mask
    keeps them out of the loss, while their rewards still count in their group's baseline; drop replaces
    their whole group. Of an agent's episode mask keeps only those branches out that end so; drop acts where
    any does.
    """

    max_failed_fraction: Annotated[float, Between(0, 1)] = option(0.05, metavar="X")
    """The run ends when more than this share of the samples of the last 20 batches failed for good:
    refused by the server, out of retries, or with a failed environment or reward. It is judged after 100
    samples; 1 never ends the run.
    """

    def reward_url_arguments(self) -> dict[str, Any]:
        """What the library needs for addresses. Reads the key, which is in no flag, no log and no file."""
        key = None if self.reward_api_key_env is None else os.environ[self.reward_api_key_env]
        return {"url_batch": self.reward_url_batch or 1, "api_key": key}

    def check(self) -> None:
        parse_rewards(self.reward_function, self.reward_url, self.reward_weights)

    def check_key(self) -> None:
        if self.reward_api_key_env is not None and not os.environ.get(self.reward_api_key_env):
            raise ValueError(
                f"`reward_api_key_env`: the environment variable {self.reward_api_key_env} is not set; "
                "export it"
            )

    def check_failed_reward(self) -> None:
        if self.on_failed_reward is None:
            return
        rounded = as_float32(self.on_failed_reward)
        if not math.isfinite(rounded):
            raise ValueError(
                "`on_failed_reward` must be drop or a number that is finite in float32, got "
                f"{self.on_failed_reward}"
            )
        # Like every reward: else a group whose rewards are all this number would count as one with a spread.
        object.__setattr__(self, "on_failed_reward", rounded)

"""Samples episodes of several turns: one request a turn, whose prompt is all tokens so far.

P prompt tokens, R response tokens so far.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import DONE, FLAG, Environment, EnvironmentFactory
from megatron_rl_corr.rollout.fan_out import all_or_first_failure
from megatron_rl_corr.rollout.prompts import Prompt
from megatron_rl_corr.rollout.requests import checked_prompt_ids
from megatron_rl_corr.rollout.rewards import checked_reward
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout.turns import first_turn, join_turn


async def generate_episodes(
    client: RolloutClient,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    environment: EnvironmentFactory,
    max_turns: int,
    samples_per_prompt: int = 1,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> list[Trajectory]:
    """samples_per_prompt episodes of each prompt, prompt-major: p0s0, p0s1, ..., p1s0, ...

    max_turns: of the policy. sampling.max_new_tokens bounds the whole response, what the environment says included.
    An episode's finish reason is its last turn's, but `length` where a bound ended it. on_progress(done, total,
    sampled tokens per second so far) is called after each. Requests fail and are repeated as in `generate`. A failure
    of an environment says whose it was, cancels the rest and is raised. Raises ValueError, before anything is sent,
    for a prompt that `generate` would refuse.
    """
    for name, value in (("samples_per_prompt", samples_per_prompt), ("max_turns", max_turns)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sampling.ignore_eos:
        raise ValueError("ignore_eos leaves no token for a second turn, got ignore_eos with an environment; drop it")
    for index, prompt in enumerate(prompts):
        checked_prompt_ids(prompt.input_ids, vocab_size=client.vocab_size, prompt_index=index)
    total, done, tokens, started = len(prompts) * samples_per_prompt, 0, 0, time.monotonic()

    async def sample(prompt: Prompt, prompt_index: int, index: int) -> Trajectory:
        nonlocal done, tokens
        episode = _Episode(client, prompt, sampling, f"prompt {prompt_index} sample {index}")
        try:
            trajectory = await episode.run(environment, max_turns)
        except Exception as error:
            error.add_note(f"it was {episode.doing} of {episode.label} (row {prompt.index} of the data set)")
            raise
        trajectory = replace(trajectory, prompt_index=prompt_index, sample_index=index)
        done, tokens = done + 1, tokens + int(trajectory.sampled.sum())
        if on_progress is not None:
            on_progress(done, total, tokens / max(time.monotonic() - started, 1e-9))
        return trajectory

    return await all_or_first_failure([
        sample(prompt, prompt_index, index)
        for prompt_index, prompt in enumerate(prompts) for index in range(samples_per_prompt)
    ])  # fmt: skip


class _Episode:
    """One episode under way."""

    def __init__(self, client: RolloutClient, prompt: Prompt, sampling: SamplingParams, label: str):
        self._client, self._prompt, self._sampling = client, prompt, sampling
        self.label, self.doing = label, "making the environment"

    async def run(self, factory: EnvironmentFactory, max_turns: int) -> Trajectory:
        """From the first request to the environment's reward and `close`."""
        environment = await _result(lambda: factory(self._prompt))
        if not isinstance(environment, Environment):
            raise TypeError(
                f"{FLAG} made {environment!r} for {self.label}; it must be an object of a subclass of "
                "megatron_rl_corr.rollout.Environment"
            )
        try:
            whole = await self._turns(environment, max_turns)
            self.doing = "the reward"
            reward = await _result(environment.reward)
            if reward is not None:
                reward = checked_reward(reward, "the environment's reward()", self.label)
            return replace(whole, environment_reward=reward)
        finally:
            await _result(environment.close)

    async def _turns(self, environment: Environment, max_turns: int) -> Trajectory:
        stop = (*self._sampling.stop_token_ids, *environment.stop_token_ids)
        sampling = replace(self._sampling, stop_token_ids=stop)
        self.doing = "turn 0"
        answer = await self._ask(self._prompt.input_ids, sampling)
        whole = first_turn(answer)
        for turn in range(1, max_turns + 1):
            reply = await _result(partial(environment.step, answer.output_ids.tolist(), answer.finish_reason))
            said = None if reply is DONE else self._checked(reply)
            if said is None or answer.finish_reason != "stop":
                return whole
            left = sampling.max_new_tokens - whole.output_ids.numel() - said.numel()
            if turn == max_turns or left < 1:
                break
            self.doing = f"turn {turn}"
            so_far = torch.cat([whole.prompt_ids, whole.output_ids, said])
            answer = await self._ask(so_far.tolist(), replace(sampling, max_new_tokens=left))
            if answer.output_ids.numel():
                whole = join_turn(whole, said, answer)
            else:  # what the environment said last answers nothing: a response ends with a sampled token
                whole = replace(whole, finish_reason=answer.finish_reason)
        return replace(whole, finish_reason="length")

    async def _ask(self, ids: list[int], sampling: SamplingParams) -> Trajectory:
        (answer,) = await self._client.generate([ids], sampling)
        return answer

    def _checked(self, reply: Any) -> torch.Tensor:
        """[B] int64. An id outside the vocabulary would end the server's process, with everybody's requests."""
        try:
            ids = np.asarray(reply)
        except ValueError:  # ragged
            ids = np.empty((0, 0))
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"the environment's step() must return DONE or a non-empty list of token ids, got {str(reply)[:100]!r} "
                f"in {self.doing} of {self.label}"
            )
        outside = np.flatnonzero((ids < 0) | (ids >= self._client.vocab_size))
        if outside.size:
            position = int(outside[0])
            raise ValueError(
                f"the environment's step() returned token id {int(ids[position])} at position {position} in "
                f"{self.doing} of {self.label}; ids must be in [0, {self._client.vocab_size}), the model's vocabulary: "
                "is its tokenizer the one of the model being served?"
            )
        return torch.from_numpy(ids.astype(np.int64))


async def _result(method: Callable[[], Any]) -> Any:
    """What a method of the environment returns, plain or async.

    A tool may try to end the program, or cancel what it waits for; asyncio would end the loop or the episode without a
    word, and the run would wait for ever.
    """
    try:
        value = method()
        return await value if inspect.isawaitable(value) else value
    except SystemExit as error:
        raise RuntimeError(f"the environment called exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():  # from outside: another episode failed
            raise
        raise RuntimeError("the environment waited for something that was cancelled") from error

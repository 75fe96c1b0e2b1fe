"""Samples episodes of several turns: one request a turn, whose prompt is all tokens so far.

B tokens that the environment adds between two turns.
"""

import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.reward_value import checked_reward
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.data.worker_pool import CallTimeout, UserCalls
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.errors import RolloutError, SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.engines.types import checked_prompt_ids
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.begun_groups import BegunGroup, EpisodeSoFar
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import (
    DONE,
    FLAG,
    Environment,
    EnvironmentFactory,
    load_environment,
)
from megatron_rl_corr.rollout.seeds import Draw
from megatron_rl_corr.rollout.trace import traced_episode
from megatron_rl_corr.rollout.turns import Turns


class SampleMaker(Protocol):
    """Makes samples of prompts, which may take several turns."""

    agent_branches: str | None
    """What means in the loss take as one, where a sample may have several sequences, one behind the other:
    episode or sequence. None: each sample is one.
    """

    async def start(self) -> None:
        """Get ready, on the loop that `generate` is called on.

        Raises:
            ValueError: what the user gave can't be used.
        """

    async def close(self) -> None:
        """Give up what is under way."""

    async def generate(
        self, client: RolloutClient, prompts: Sequence[Prompt], sampling: SamplingParams, **how: Any
    ) -> list[Trajectory]:
        """As `RolloutClient.generate`, of rows of the data set."""


def make_samples_with(
    options: RunConfig, tokenizer: Tokenizer | None, *, seq_length: int | None = None, replica: int = 0
) -> SampleMaker | None:
    """What a run's options ask for; None: each sample is one response.

    Args:
        options: the run's.
        tokenizer: of the checkpoint.
        seq_length: tokens of a sequence that is trained; None: nothing is.
        replica: that it is for.

    Raises:
        ValueError: it can't be made.
    """
    if options.maker is None:
        return None
    module, _, name = options.maker.make.partition(":")
    return getattr(import_module(module), name)(options, tokenizer, seq_length=seq_length, replica=replica)


async def generate_episodes(
    client: RolloutClient,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    environment: EnvironmentFactory,
    max_turns: int,
    calls: UserCalls | None = None,
    samples_per_prompt: int = 1,
    group_numbers: Sequence[int] | None = None,
    on_sample: Callable[[Trajectory], Awaitable[None]] | None = None,
    on_progress: Callable[[int, int, float], None] | None = None,
    begun: Mapping[int, BegunGroup] | None = None,
) -> list[Trajectory]:
    """samples_per_prompt episodes of each prompt, prompt-major: p0s0, p0s1, ..., p1s0, ...

    An episode's finish reason is that of its last turn, or `length` where max_turns or max_new_tokens ended
    it. Requests are retried as in `RolloutClient.generate`.

    Args:
        client: of the servers.
        prompts: rows of the data set; the environment gets the row, the server its input_ids.
        sampling: parameters of every turn; max_new_tokens bounds the whole response, the environment's
            tokens included.
        environment: makes one environment for each episode.
        max_turns: turns of the policy in an episode.
        calls: calls the environment's methods. Pass one object to several calls of this function, and they
            share its thread and time limit. None: an object of this call, without a limit.
        samples_per_prompt, group_numbers, on_sample: as in `RolloutClient.generate`.
        on_progress: called after each episode with (episodes done, all episodes, sampled tokens
            per second so far).
        begun: as in `RolloutClient.generate`. An episode that has made turns goes on behind them, if its
            environment is `replayable`: a new one is given the policy's turns again, and must say to them
            what it has said before. Otherwise it is begun anew, with an event.

    Raises:
        ValueError: before anything is sent, for an argument that is out of its range, and for ignore_eos.
        SampleFailure, RolloutError: as in `RolloutClient.generate`; a SampleFailure's cause is
            `environment` or `environment_timeout` where an environment failed.
    """
    for name, value in (("samples_per_prompt", samples_per_prompt), ("max_turns", max_turns)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if sampling.ignore_eos:
        raise ValueError(
            "ignore_eos leaves no token for a second turn, got ignore_eos with an environment; drop it"
        )
    for index, prompt in enumerate(prompts):
        checked_prompt_ids(prompt.input_ids, vocab_size=client.vocab_size, prompt_index=index)
    numbers = client.numbered(len(prompts), group_numbers)
    own_calls = UserCalls() if calls is None else calls
    total, done, tokens, started = len(prompts) * samples_per_prompt, 0, 0, time.monotonic()

    async def new_sample(
        prompt: Prompt, prompt_index: int, index: int, own: BegunGroup
    ) -> tuple[list[Trajectory], int]:
        draw, label = Draw(client.seed, own.number, index), f"prompt {prompt_index} sample {index}"
        episode = _Episode(client, prompt, sampling, draw, label, own_calls, own.episodes)
        try:
            with traced_episode(index, "environment"):
                trajectory = await episode.run(environment, max_turns)
        except RolloutError as error:
            error.add_note(f"it was {episode.doing} of {episode.label} (row {prompt.index} of the data set)")
            raise
        return [replace(trajectory, prompt_index=prompt_index, sample_index=index)], 0

    async def sample(prompt: Prompt, prompt_index: int, index: int) -> Trajectory:
        nonlocal done, tokens
        own = BegunGroup.at(numbers[prompt_index], begun)
        kept = await own.sample(index, partial(new_sample, prompt, prompt_index, index, own))
        [trajectory] = kept.branches
        if on_sample is not None:
            await on_sample(trajectory)
        done, tokens = done + 1, tokens + int(trajectory.sampled.sum())
        if on_progress is not None:
            on_progress(done, total, tokens / max(time.monotonic() - started, 1e-9))
        return trajectory

    try:
        return await all_or_first_failure(
            [
                sample(prompt, prompt_index, index)
                for prompt_index, prompt in enumerate(prompts)
                for index in range(samples_per_prompt)
            ]
        )
    finally:
        if calls is None:
            await own_calls.close()


@dataclass(frozen=True)
class Episodes:
    """The arguments of `generate_episodes` that stay the same for a whole run."""

    environment: EnvironmentFactory
    max_turns: int
    calls: UserCalls
    agent_branches: None = None

    async def start(self) -> None:
        """Nothing is to be started."""

    async def close(self) -> None:
        """End the thread of the environments' methods."""
        await self.calls.close()

    async def generate(
        self, client: RolloutClient, prompts: Sequence[Prompt], sampling: SamplingParams, **how: Any
    ) -> list[Trajectory]:
        """`generate_episodes` with these prompts; `how` holds its other keyword arguments."""
        return await generate_episodes(
            client,
            prompts,
            sampling,
            environment=self.environment,
            max_turns=self.max_turns,
            calls=self.calls,
            **how,
        )


def episodes_of(options: RunConfig, tokenizer: Tokenizer | None, **place: Any) -> Episodes:
    """The episodes of a run's environment.

    Raises:
        ValueError: as `load_environment`.
    """
    calls = UserCalls(options.environment_timeout_s)
    return Episodes(load_environment(options.environment), options.max_turns, calls)


class _OtherReply(Exception):
    """An environment that was made anew does not say what the first one said."""


class _Episode:
    """One episode under way. so_far: what was sampled of it before, by samples of its group."""

    def __init__(
        self,
        client: RolloutClient,
        prompt: Prompt,
        sampling: SamplingParams,
        draw: Draw,
        label: str,
        calls: UserCalls,
        so_far: dict[int, EpisodeSoFar],
    ):
        self._client, self._prompt, self._sampling, self._draw = client, prompt, sampling, draw
        self._calls, self._so_far = calls, so_far
        self.label, self.doing = label, "making the environment"

    async def run(self, factory: EnvironmentFactory, max_turns: int) -> Trajectory:
        """The whole episode, with the environment's reward; the environment is closed at the
        end in any case.
        """
        sample = self._draw.sample
        if sample in self._so_far:
            try:
                return await self._run(factory, max_turns)
            except _OtherReply as error:
                del self._so_far[sample]
                EVENTS.tell("episode_begun_anew", str(error), group=self._draw.group, sample=sample)
        return await self._run(factory, max_turns)

    async def _run(self, factory: EnvironmentFactory, max_turns: int) -> Trajectory:
        self.doing = "making the environment"
        environment = await self._call(factory, self._prompt.copied())
        if not isinstance(environment, Environment):
            raise SampleFailure(
                "environment",
                f"{FLAG} made {environment!r} for {self.label}; it must be an object of a subclass of "
                "megatron_rl_corr.rollout.Environment",
            )
        closing: AbstractContextManager = nullcontext()
        try:
            whole = await self._turns(environment, max_turns)
            self.doing = "the reward"
            reward = await self._call(environment.reward)
            if reward is not None:
                try:
                    reward = checked_reward(reward, "the environment's reward()")
                except ValueError as error:
                    raise SampleFailure("environment", str(error)) from None
            return replace(whole, environment_reward=reward)
        except _OtherReply:
            closing = suppress(SampleFailure)  # the sample goes on, with another environment
            raise
        finally:
            with closing:
                await self._call(environment.close)

    async def _call(self, method: Callable, *given: Any) -> Any:
        """The environment's answer; what it raises is a failure of this sample."""
        try:
            return await self._calls(method, *given)
        except CallTimeout as error:
            raise SampleFailure(
                "environment_timeout", f"{FLAG}: {self.doing} of {self.label}: {error}"
            ) from None
        except Exception as error:
            text = "".join(traceback.format_exception(error)).strip()
            raise SampleFailure(
                "environment", f"{FLAG} failed in {self.doing} of {self.label}:\n{text}"
            ) from error

    async def _turns(self, environment: Environment, max_turns: int) -> Trajectory:
        if isinstance(environment.stop, str):  # each of its letters would end a turn
            raise SampleFailure(
                "environment", f"{FLAG}: stop must be a list of texts, got {environment.stop!r}"
            )
        ids = (*self._sampling.stop_token_ids, *environment.stop_token_ids)
        sampling = replace(self._sampling, stop_token_ids=ids, stop=(*self._sampling.stop, *environment.stop))
        so_far = self._so_far.get(self._draw.sample)
        if so_far is not None:
            turns, output_ids = so_far.turns, await self._replay(environment, so_far)
        else:
            self.doing, turns = "turn 0", Turns(self._prompt.input_ids)
            answer = await self._client.turn(turns.ids, sampling, self._draw)
            turns.add(answer)
            so_far, output_ids = EpisodeSoFar(turns, answer.finish_reason), answer.output_ids.tolist()
            if environment.replayable:
                self._so_far[self._draw.sample] = so_far
        finish_reason = so_far.finish_reason
        for turn in range(turns.count, max_turns + 1):
            is_kept = turns.count == turn
            known = so_far.reply if is_kept else None
            reply = await self._reply(environment, output_ids, finish_reason, known)
            if is_kept:
                so_far.reply = _as_list(reply)
            if reply is None or finish_reason != "stop":
                return turns.whole(finish_reason)
            left = sampling.max_new_tokens - turns.response_tokens - reply.numel()
            if turn == max_turns or left < 1:
                break
            self.doing = f"turn {turn}"
            turns.say(reply)
            rest, draw = replace(sampling, max_new_tokens=left), replace(self._draw, turn=turn)
            answer = await self._client.turn(
                turns.ids, rest, draw, prefer=turns.server, routes_from=turns.routes_known
            )
            output_ids, finish_reason = answer.output_ids.tolist(), answer.finish_reason
            if output_ids:  # else the reply is left out: a response ends with a sampled token
                turns.add(answer)
                so_far.finish_reason, so_far.reply = finish_reason, None
        return turns.whole("length")

    async def _replay(self, environment: Environment, so_far: EpisodeSoFar) -> list[int]:
        """Give a new environment the turns but the last one again. Returns the ids of that."""
        if not environment.replayable:
            raise _OtherReply("the environment is not `replayable` any more")
        said = so_far.turns.said()
        for turn, (output_ids, reply) in enumerate(zip(said[:-1:2], said[1::2], strict=True)):
            self.doing = f"turn {turn}, played again,"
            await self._reply(environment, output_ids, "stop", reply)
        self.doing = f"turn {so_far.turns.count - 1}, played again,"
        return said[-1]

    async def _reply(
        self, environment: Environment, output_ids: list[int], finish_reason: str, known: list[int] | None
    ) -> torch.Tensor | None:
        """[B] int64 that follow a turn; None: the episode is over. known: what must follow."""
        try:
            step = await self._call(environment.step, output_ids, finish_reason)
            reply = None if step is DONE else self._checked(step)
        except SampleFailure as failure:
            if known is None:
                raise
            raise _OtherReply(f"the environment answered before, and fails now: {failure}") from failure
        if known is not None and _as_list(reply) != known:
            raise _OtherReply(
                f"{FLAG} says something else in {self.doing} than before the checkpoint, though it is "
                f"`replayable`: {_shown(reply)} now"
            )
        return reply

    def _checked(self, reply: Any) -> torch.Tensor:
        """[B] int64. An id outside the vocabulary would end the server's process, with
        everybody's requests.
        """
        try:
            ids = np.asarray(reply)
        except ValueError:  # ragged
            ids = np.empty((0, 0))
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise SampleFailure(
                "environment",
                "the environment's step() must return DONE or a non-empty list of token ids, got "
                f"{str(reply)[:100]!r} in {self.doing} of {self.label}",
            )
        outside = np.flatnonzero((ids < 0) | (ids >= self._client.vocab_size))
        if outside.size:
            position = int(outside[0])
            raise SampleFailure(
                "environment",
                f"the environment's step() returned token id {int(ids[position])} at position {position} in "
                f"{self.doing} of {self.label}; ids must be in [0, {self._client.vocab_size}), the model's "
                "vocabulary: is its tokenizer the one of the model being served?",
            )
        return torch.from_numpy(ids.astype(np.int64))


def _as_list(reply: torch.Tensor | None) -> list[int]:
    """As `EpisodeSoFar.reply`."""
    return [] if reply is None else reply.tolist()


def _shown(reply: torch.Tensor | None) -> str:
    return "DONE" if reply is None else f"{reply.numel()} ids, {str(reply.tolist())[:60]}"

"""Samples episodes of agents: a harness of the user's for each, which asks the policy through the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.errors import RolloutError, SampleFailure
from megatron_rl_corr.engines.local_faults import descriptors_needed, raise_descriptor_limit
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.rollout.agents.harnesses import CAUSE, Harnesses
from megatron_rl_corr.rollout.agents.outcome import NAME, REWARDS
from megatron_rl_corr.rollout.begun_groups import BegunGroup
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.gateway.episode import Episode, EpisodeCounts, EpisodeRules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.gateway.tree import TurnTree
from megatron_rl_corr.rollout.gateway.types import (
    ANSWER_ID,
    Answer,
    ChatRequest,
    GatewayError,
    TextRequest,
)
from megatron_rl_corr.rollout.seeds import Draw
from megatron_rl_corr.rollout.trace import traced_episode

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 40
"""Tokens of a sequence where neither the run nor a server bounds them."""


@dataclass
class AgentCounts(EpisodeCounts):
    """What has happened in all episodes that have ended, well or not, since the run's beginning."""

    episodes: int = 0
    seconds: float = 0.0
    """From the start of their harnesses to their ends."""

    def add(self, own: EpisodeCounts, seconds: float) -> None:
        """Count an episode."""
        self.episodes, self.seconds = self.episodes + 1, self.seconds + seconds
        for name, count in vars(own).items():
            setattr(self, name, getattr(self, name) + count)


class Agents:
    """Makes the samples of a run from episodes of the user's harness, in the place of `Episodes`.

    Use it on one event loop.

    Args:
        harnesses: run the user's code.
        gateway: what it asks.
        templates: of the checkpoint.
        rules: of all episodes; their sampling is that of `generate`.
        branches: what means in the loss take as one, where an episode has several sequences.
    """

    def __init__(
        self, harnesses: Harnesses, gateway: Gateway, templates: Templates, rules: EpisodeRules, branches: str
    ):
        self._harnesses, self._gateway, self._templates = harnesses, gateway, templates
        self._rules, self.agent_branches = rules, branches
        self._context: asyncio.Future[int] | None = None
        self._own_files, self._under_way = 0, 0
        self.counts = AgentCounts()

    async def start(self) -> None:
        """Import the user's file, and listen.

        Raises:
            ValueError: the file can't be loaded, or the port is taken.
        """
        await self._harnesses.start()
        self._own_files = descriptors_needed(0, 0)
        try:
            await self._gateway.start()
        except OSError as error:
            await self._harnesses.close()
            raise ValueError(
                f"`gateway_port`: the gateway can't listen: {error}; give another port, or 0 for a free one"
            ) from None

    async def close(self) -> None:
        """End all harnesses, and the gateway."""
        await self._harnesses.close()
        await self._gateway.close()

    async def generate(
        self,
        client: RolloutClient,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int = 1,
        group_numbers: Sequence[int] | None = None,
        on_sample: Callable[[Trajectory], Awaitable[None]] | None = None,
        on_progress: Callable[[int, int, float], None] | None = None,
        begun: Mapping[int, BegunGroup] | None = None,
    ) -> list[Trajectory]:
        """samples_per_prompt episodes of each prompt, prompt-major; the branches of one are neighbours.

        Args:
            client: of the servers.
            prompts: rows of the data set, of which harnesses get `task_of`. Their ids are asked by nobody.
            sampling: of every turn; max_new_tokens bounds each of them.
            samples_per_prompt, group_numbers: as in `RolloutClient.generate`.
            on_sample: awaited once for each episode, with the branch of its latest turn.
            on_progress: called after each episode with (episodes done, all episodes, sampled tokens
                per second so far).
            begun: as in `RolloutClient.generate`, of whole episodes: a harness can't be asked for its state.

        Raises:
            ValueError: samples_per_prompt or group_numbers are wrong, or this process may open too few files.
            SampleFailure, RolloutError: as in `RolloutClient.generate`; a SampleFailure's cause is `agent` or
                `agent_timeout` where a harness failed, or asked nothing.
        """
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, got {samples_per_prompt}")
        numbers = client.numbered(len(prompts), group_numbers)
        rules = replace(
            self._rules,
            sampling=sampling,
            max_tokens=min(self._rules.max_tokens, await self._context_of(client)),
        )
        total, done, tokens, started = len(prompts) * samples_per_prompt, 0, 0, time.monotonic()

        async def new_sample(prompt: Prompt, prompt_index: int, index: int) -> tuple[list[Trajectory], int]:
            episode = Episode(client, self._templates, rules, Draw(client.seed, numbers[prompt_index], index))
            try:
                with traced_episode(index, "harness"):
                    branches, latest = await self._run(episode, prompt, sampling)
            except RolloutError as error:
                error.add_note(
                    f"it was an agent's episode of prompt {prompt_index} sample {index} (row "
                    f"{prompt.index} of the data set)"
                )
                raise
            return [replace(one, prompt_index=prompt_index, sample_index=index) for one in branches], latest

        async def sample(prompt: Prompt, prompt_index: int, index: int) -> list[Trajectory]:
            nonlocal done, tokens
            kept = await BegunGroup.at(numbers[prompt_index], begun).sample(
                index, partial(new_sample, prompt, prompt_index, index)
            )
            branches = kept.branches
            if on_sample is not None:
                await on_sample(branches[kept.latest])
            done, tokens = done + 1, tokens + sum(int(one.sampled.sum()) for one in branches)
            if on_progress is not None:
                on_progress(done, total, tokens / max(time.monotonic() - started, 1e-9))
            return branches

        self._under_way += total
        try:
            self._raise_descriptor_limit(len(client.base_urls))
            found = await all_or_first_failure(
                [
                    sample(prompt, prompt_index, index)
                    for prompt_index, prompt in enumerate(prompts)
                    for index in range(samples_per_prompt)
                ]
            )
        finally:
            self._under_way -= total
        return [branch for branches in found for branch in branches]

    def _raise_descriptor_limit(self, servers: int) -> None:
        """For a connection of each harness, and one of its request to a server."""
        needed = self._own_files + 2 * (self._under_way + servers)
        if (
            told := raise_descriptor_limit(needed, f"{self._under_way} episodes of agents at once")
        ) is not None:
            logger.info(told)

    async def _run(
        self, episode: Episode, prompt: Prompt, sampling: SamplingParams
    ) -> tuple[list[Trajectory], int]:
        """The branches of an episode with its reward, and which of them has its latest turn."""
        session, gateway = _WatchedEpisode(episode), self._gateway
        key, begun = gateway.open_episode(session, sampling), time.monotonic()
        failure, outcome = None, None
        try:
            outcome = await session.until_failure(
                self._harnesses.run(task_of(prompt), gateway.base_url, gateway.root_url, key)
            )
        except SampleFailure as error:
            failure = error
        finally:
            try:
                gateway.close_episode(key)
            except Exception as error:  # as what the policy says may cause it, it costs this sample alone
                raise SampleFailure(CAUSE, f"the gateway could not go on with it: {error!r}") from error
            finally:
                await episode.end()  # also where it is cancelled: weights may change when its group is over
                self.counts.add(episode.counts, time.monotonic() - begun)
        # What failed at the servers goes before what its harness made of it.
        branches = await episode.finish()
        if failure is not None:
            raise failure
        if not branches:
            raise SampleFailure(
                CAUSE, f"{self._harnesses.name} ended without an answer of the policy; it asks it at base_url"
            )
        last_turns = [leaf.number for leaf, _ in episode.tree.leaves()]
        latest = last_turns.index(max(last_turns))
        if outcome is None:
            return branches, latest
        given = outcome.pop(REWARDS, {})
        parts = outcome if len(outcome) > 1 else None
        rewards = branch_rewards(episode.tree, outcome[NAME], given, self._harnesses.name)
        return [
            replace(one, environment_reward=reward, environment_parts=parts)
            for one, reward in zip(branches, rewards, strict=True)
        ], latest

    async def _context_of(self, client: RolloutClient) -> int:
        """Tokens that every server takes; asked once."""
        if self._context is None or (self._context.done() and self._context.exception() is not None):
            self._context = asyncio.ensure_future(longest_sequence(client))
        return await asyncio.shield(self._context)


def branch_rewards(tree: TurnTree, reward: float, given: Mapping[str, float], source: str) -> list[float]:
    """The reward of each branch: that given for an answer in it, or else the episode's.

    An answer that several branches have in common is in the first of them.

    Args:
        tree: of the episode.
        reward: the episode's.
        given: by the id of an answer, as `ANSWER_ID` has it.
        source: the harness, for errors.

    Raises:
        SampleFailure: no answer has such an id, or answers of one branch have different rewards.
    """
    branches = [leaf.path()[shared:] for leaf, shared in tree.leaves()]
    branch_of = {
        (turn.asked.first, turn.number - turn.asked.first): branch
        for branch, turns in enumerate(branches)
        for turn in turns
    }
    named: dict[int, str] = {}
    for name in given:
        found = ANSWER_ID.fullmatch(name)
        branch = None if found is None else branch_of.get((int(found[1]), int(found[2] or 0)))
        if branch is None:
            got = [f"chatcmpl-{first}" + f":{index}" * (index > 0) for first, index in sorted(branch_of)]
            raise SampleFailure(
                CAUSE,
                f'{source}: "{REWARDS}" has {name[:100]!r}, which is the id of no answer of this episode; '
                f"give one that the agent has got: {', '.join(got)}",
            )
        other = named.setdefault(branch, name)
        if given[other] != given[name]:
            raise SampleFailure(
                CAUSE,
                f'{source}: "{REWARDS}" gives one branch two rewards, {given[other]:g} by {other!r} and '
                f"{given[name]:g} by {name!r}; name one answer of each branch, such as its last one",
            )
    return [given[named[branch]] if branch in named else reward for branch in range(len(branches))]


class _WatchedEpisode:
    """An episode whose failure at the servers is known at once: its harness need not end by itself."""

    def __init__(self, episode: Episode):
        self._episode, self._has_failed = episode, asyncio.Event()
        self.variables, self.count = episode.variables, episode.count

    async def chat(self, request: ChatRequest) -> Sequence[Answer]:
        return await self._noted(self._episode.chat(request))

    async def text(self, request: TextRequest) -> Sequence[Answer]:
        return await self._noted(self._episode.text(request))

    def undelivered(self, answers: Sequence[Answer]) -> None:
        self._episode.undelivered(answers)

    async def until_failure(self, running: Awaitable[Any]) -> Any:
        """What the harness gives; None, with the harness ended, as soon as the servers have failed."""
        harness = asyncio.ensure_future(running)
        failing = asyncio.ensure_future(self._has_failed.wait())
        try:
            await asyncio.wait({harness, failing}, return_when=asyncio.FIRST_COMPLETED)
            return harness.result() if harness.done() else None
        finally:
            failing.cancel()
            harness.cancel()

    async def _noted(self, answers: Awaitable[Sequence[Answer]]) -> Sequence[Answer]:
        try:
            return await answers
        except GatewayError as error:
            if isinstance(error.__cause__, RolloutError):
                self._has_failed.set()
            raise


def task_of(prompt: Prompt) -> dict[str, Any]:
    """What a harness is given of a row, as JSON has it.

    All keys of the row (`messages`, `prompt` or whatever it calls them). Beside them, where the row has no
    key of that name: `index`, the row's number in the data, from 0; `label`, what `label_key` names; and
    `input_ids`, where the row's prompt is ids.

    Example: {"index": 3, "label": "4", "messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}.
    """
    task: dict[str, Any] = {"index": prompt.index, "label": prompt.label}
    if prompt.text is None:
        task["input_ids"] = prompt.input_ids
    return task | dict(prompt.metadata)


async def longest_sequence(client: RolloutClient) -> int:
    """The longest sequence that every server takes; NO_LIMIT where none tells its own."""
    lengths = [NO_LIMIT]
    for url in client.base_urls:
        engine = client.engine_of(url)
        try:
            lengths.append(engine.longest_sequence(url, await client.ask(url, engine.sequence_limit())))
        except UnsupportedByEngine:
            continue
    return min(lengths)

"""`megatron-rl-corr gateway`: the gateway before rollout servers, without a run; any key opens an episode.

An episode ends by DELETE /episodes/KEY, or with the command, and becomes a file of samples.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import AUTO
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.rollout.agents.agents import longest_sequence
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.episode import Episode, EpisodeRules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.gateway.types import EpisodeSession
from megatron_rl_corr.rollout.sample_file import Sample, SavedBatch, write_trajectories
from megatron_rl_corr.rollout.sample_folder import files_by_step
from megatron_rl_corr.rollout.seeds import Draw

WAIT_FOR_SERVERS_S = 60.0


@dataclass(frozen=True)
class EndedEpisodes:
    """Writes episodes as they end."""

    folder: Path | None
    hf_checkpoint: str
    sampling: SamplingParams
    max_turns: int
    say: Callable[[str], None]

    def __post_init__(self):
        if self.folder is None:
            return
        if self.folder.is_dir() and files_by_step(self.folder.iterdir()):
            raise ValueError(f"--out {self.folder} has sample files already; give a new folder")
        self.folder.mkdir(parents=True, exist_ok=True)

    async def write(self, number: int, episode: Episode) -> dict[str, Any]:
        """End an episode; what is told of it.

        Args:
            number: of the episode, from 1.
        """
        with suppress(RolloutError):  # its requests were answered so
            branches = await episode.finish()
            counts = episode.counts
            told = {
                "episode": number,
                "requests": counts.requests,
                "turns": counts.turns,
                "branches": counts.branches,
                "rerendered": counts.rerendered,
                "forks": {reason: count for reason, count in counts.forks.items() if count},
                "overridden": dict(counts.overridden),
                "problems": episode.tree.check(branches),
            }
            if self.folder is not None and branches:
                told["file"] = str(self._written(number, branches))
            self.say(", ".join(f"{name} {value}" for name, value in told.items()))
            return told
        return {"episode": number, "failed": True}

    def _written(self, number: int, branches: list) -> Path:
        batch = SavedBatch(
            step=number,
            updates=1,
            replica=0,
            replicas=1,
            group_size=1,
            packed=True,
            num_turns=self.max_turns,
            hf_checkpoint=str(Path(self.hf_checkpoint).resolve()),
            agent_branches="episode",
        )
        path = self.folder / batch.file_name
        samples = [Sample(replace(branch, prompt_index=0, sample_index=0)) for branch in branches]
        write_trajectories(path, samples, sampling=self.sampling, batch=batch)
        return path


async def serve(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Answer until SIGINT or SIGTERM; then end all episodes.

    Args:
        arguments: the command's.
        say: takes lines for the user.

    Raises:
        ValueError: something about the model or the servers is wrong.
        RolloutError: a server does not answer.
        OSError: the port is taken.
    """
    tokenizer = Tokenizer.from_folder(arguments.hf_checkpoint)
    if tokenizer is None:
        raise ValueError(f"--hf-checkpoint {arguments.hf_checkpoint} has no tokenizer; add its files")
    sampling = SamplingParams(
        arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.top_k
    )
    rules = answer_rules(
        tokenizer,
        sampling,
        max_tokens=arguments.seq_length + 1,
        max_turns=arguments.max_turns,
        tool_format=arguments.tool_parser,
        separate_thoughts=arguments.reasoning == "separate",
        warn=warn,
    )
    out = None if arguments.out is None else Path(arguments.out)
    ended = EndedEpisodes(out, arguments.hf_checkpoint, sampling, arguments.max_turns, say)
    async with RolloutClient(
        arguments.url,
        vocab_size=read_model(arguments.hf_checkpoint)["vocab_size"],
        engine=AUTO,
        api_key=_key(arguments.api_key_env),
        decode=tokenizer.decode_all,
    ) as client:
        await client.find_servers(WAIT_FOR_SERVERS_S)
        client.check_sampling(sampling)
        if (problem := await client.sampling_problem(sampling)) is not None:
            raise ValueError(problem)
        rules = replace(rules, max_tokens=min(rules.max_tokens, await longest_sequence(client)))
        await _serve_until_ended(arguments, client, Templates(tokenizer), rules, ended, say)


async def _serve_until_ended(
    arguments: argparse.Namespace,
    client: RolloutClient,
    templates: Templates,
    rules: EpisodeRules,
    ended: EndedEpisodes,
    say: Callable[[str], None],
) -> None:
    numbers: dict[EpisodeSession, int] = {}
    counted = itertools.count(1)

    def opened(key: str) -> Episode:
        number = next(counted)
        episode = Episode(client, templates, rules, Draw(client.seed, number, 0))
        numbers[episode] = number
        return episode

    async def deleted(key: str, session: EpisodeSession) -> dict[str, Any]:
        return await ended.write(numbers.pop(session), session)

    gateway = Gateway(
        rules.sampling,
        host=arguments.host,
        port=arguments.port,
        strict=arguments.strict,
        opens=opened,
        ended=deleted,
    )
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for sent in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sent, stop.set)
    async with gateway:
        say(f"OPENAI_BASE_URL={gateway.base_url}")
        say(f"ANTHROPIC_BASE_URL={gateway.root_url}")
        say("any API key opens an episode; DELETE /episodes/KEY ends it, and Ctrl-C all")
        await stop.wait()
    for episode, number in list(numbers.items()):
        await ended.write(number, episode)


def _key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise ValueError(f"--api-key-env: the environment variable {name} is not set; export it")
    return None if name is None else os.environ[name]

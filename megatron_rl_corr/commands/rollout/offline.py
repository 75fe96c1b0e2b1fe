"""`megatron-rl-corr rollout`: samples and scores prompts without a trainer, into the
sample files of a run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl_corr.commands.rollout.flags import named
from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.local_faults import descriptors_needed, raise_descriptor_limit
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers
from megatron_rl_corr.rollout.episodes import make_samples_with
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.sample_file import Origin, Sample, SavedBatch, write_trajectories
from megatron_rl_corr.rollout.sample_folder import files_by_step
from megatron_rl_corr.rollout.sampling import training_sampling

GROUPS_PER_FILE = 64
LOOKED_AT = 1000
"""First rows in which it is looked for what the model would not see."""
PROGRESS_EVERY_S = 10.0
WAIT_FOR_SERVERS_S = 60.0


@dataclass
class OfflineSummary:
    """What came of a run of the command."""

    groups: int = 0
    lost: int = 0
    """Groups of which a sample failed for good."""
    skipped: int = 0
    """Rows that no prompt could be made of, or a too long one."""
    samples: int = 0
    tokens: int = 0
    rewards: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Sum and number of each named reward."""
    reasons: Counter = field(default_factory=Counter)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    files: int = 0

    def add(self, group: Group) -> None:
        """Count a whole group."""
        self.groups += 1
        self.samples += len(group.episodes)
        self.rewards += sum(group.episode_rewards)
        for row in group.trajectories:
            self.tokens += int(row.sampled.sum())
            self.reasons[row.finish_reason] += 1
        for parts in group.episode_parts:
            for name, value in parts.items():
                own = self.parts.setdefault(name, [0.0, 0])
                own[0], own[1] = own[0] + value, own[1] + 1

    def lines(self) -> list[str]:
        """The summary as a person reads it."""
        if not self.samples:
            return [f"nothing was sampled; {self.lost} groups were lost, {self.skipped} rows were left out"]
        found = [
            f"{self.samples} samples of {self.groups} prompts in {self.seconds:.1f} s, "
            f"{self.tokens / max(self.seconds, 1e-9):.0f} tokens/s, {self.files} files"
        ]
        found.append(f"mean reward {self.rewards / self.samples:.4f}")
        found += [f"  {name} {total / count:.4f}" for name, (total, count) in sorted(self.parts.items())]
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.reasons.items()))
        found.append(f"mean response {self.tokens / self.samples:.1f} tokens; {reasons}")
        causes = ", ".join(f"{cause} {count}" for cause, count in self.failed.items() if count)
        found.append(f"failed: {causes or 'none'}; groups lost {self.lost}; rows left out {self.skipped}")
        return found


class OfflineRun:
    """Samples and scores each prompt once, and writes the samples as a run with
    --rollout-save-trajectories does.

    Args:
        options: of servers, prompts, samples, rewards, environment and the model.
        out: folder of the files; it must not have any yet.
        seed: of the order of prompts and of the samples.
        groups: prompts that are sampled; None: each row once.

    Raises:
        ValueError: the folder has files, or the prompts or the sampling can't be used.
    """

    def __init__(self, options: RunConfig, out: Path, *, seed: int = 0, groups: int | None = None):
        if out.is_dir() and files_by_step(out.iterdir()):
            raise ValueError(f"--out {out} has sample files already; give a new folder")
        self._options, self._out, self._sampling = options, out, training_sampling(options)
        self._vocab_size, self._seed = read_model(options.hf_checkpoint)["vocab_size"], seed
        self._tokenizer = Tokenizer.from_folder(options.hf_checkpoint)
        self._prompts = self._open_prompts()
        self._groups = len(self._prompts) if groups is None else groups
        self._rewards = Rewards.of(options, self._tokenizer)
        self._episodes = make_samples_with(options, self._tokenizer)
        self._rewards.check_labels(self._prompts, "--prompts")
        self._failures = Failures(options.max_failed_fraction, warn)
        self._summary, self._done = OfflineSummary(), []
        out.mkdir(parents=True, exist_ok=True)

    async def run(self, progress: Callable[[str], None]) -> OfflineSummary:
        """Sample all of them. What is done is written also where an error or Ctrl-C ends the run.

        Args:
            progress: takes a line now and then.

        Raises:
            ValueError: a server can't sample so, with the remedy.
            TooManyFailures, RolloutError: as `GroupSampler.sample`.
        """
        options, begun = self._options, time.monotonic()
        async with RolloutClient(
            options.urls,
            vocab_size=self._vocab_size,
            seed=self._seed,
            decode=self._tokenizer and self._tokenizer.decode_all,
            **options.client_arguments(),
        ) as client:
            progress(f"asking {', '.join(client.base_urls)}, then sampling {self._groups} prompts")
            await client.find_servers(WAIT_FOR_SERVERS_S)
            what = f"--max-concurrency {options.max_concurrency} with {len(client.base_urls)} servers"
            needed = descriptors_needed(options.max_concurrency, len(client.base_urls))
            if (told := raise_descriptor_limit(needed, what)) is not None:
                progress(told)
            client.check_sampling(self._sampling)
            await client.wait_healthy(WAIT_FOR_SERVERS_S)
            if (problem := await client.sampling_problem(self._sampling)) is not None:
                raise ValueError(problem)
            await self._rewards.start()
            if self._episodes is not None:
                await self._episodes.start()
            drop = options.unread_labels == "drop"
            await self._rewards.check_readable(self._prompts, "--prompts", drop=drop)
            # Enough that every place at the servers is taken while the last samples of a group run.
            at_once = 2 + 2 * options.max_concurrency // options.group_size
            sampler, numbers = self._sampler(client), iter(range(self._groups))
            telling = asyncio.create_task(self._tell(progress, begun))
            try:
                await all_or_first_failure([self._sample_next(sampler, numbers) for _ in range(at_once)])
            finally:
                telling.cancel()
                self._write()
                await self._rewards.close()
                if self._episodes is not None:
                    await self._episodes.close()
        self._summary.seconds = time.monotonic() - begun
        self._summary.failed = dict(self._failures.by_cause)
        return self._summary

    async def _sample_next(self, sampler: GroupSampler, numbers: Iterator[int]) -> None:
        """Sample one group after the other, until none is left."""
        for number in numbers:
            if not self._prompts.can_be_drawn(number):
                self._summary.skipped += 1
                continue
            group = await sampler.sample(number)
            if group is None:
                self._summary.lost += 1
                continue
            self._summary.add(group)
            self._done.append(group)
            if len(self._done) >= GROUPS_PER_FILE:
                self._write()

    async def _tell(self, progress: Callable[[str], None], begun: float) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            summary, seconds = self._summary, time.monotonic() - begun
            mean = summary.rewards / summary.samples if summary.samples else float("nan")
            progress(
                f"{summary.groups} of {self._groups} prompts, mean reward {mean:.4f}, "
                f"{summary.tokens / seconds:.0f} tokens/s"
            )

    def _write(self) -> None:
        """Write the groups that are done as one file, by their numbers."""
        if not self._done:
            return
        done, self._done = sorted(self._done, key=lambda group: group.number), []
        self._summary.files += 1
        batch = SavedBatch(
            step=self._summary.files,
            updates=1,
            replica=0,
            replicas=1,
            group_size=self._options.group_size,
            packed=True,
            num_turns=self._options.most_turns,
            hf_checkpoint=str(Path(self._options.hf_checkpoint).resolve()),
            agent_branches=self._episodes and self._episodes.agent_branches,
        )
        samples = [sample for place, group in enumerate(done) for sample in self._samples(place, group)]
        write_trajectories(self._out / batch.file_name, samples, sampling=self._sampling, batch=batch)

    def _samples(self, place: int, group: Group) -> list[Sample]:
        prompt = self._prompts.at(group.number)
        origin, parts = Origin(group.number, prompt.index, prompt.label), group.reward_parts
        return [
            Sample(
                replace(row, prompt_index=place),
                group.rewards[index],
                origin=origin,
                reward_parts=parts[index] if parts else None,
            )
            for index, row in enumerate(group.trajectories)
        ]

    def _open_prompts(self) -> PromptDataset:
        options = self._options
        limits = PromptLimits(
            self._vocab_size,
            options.max_prompt_tokens,
            f"`max_prompt_tokens` {options.max_prompt_tokens}",
            options.max_new_tokens,
            drop_long=options.long_prompts == "drop",
        )
        form = PromptFormat.of(options, self._tokenizer, limits)
        prompts = open_prompts(options.prompts, form, seed=self._seed, warn=warn)
        for row in range(min(LOOKED_AT, len(prompts))):
            with suppress(BadRow):  # it is named when it is drawn
                prompts.rows[row]
        for note in form.notes:
            warn(named(f"--prompts: {note}"))
        return prompts

    def _sampler(self, client: RolloutClient) -> GroupSampler:
        options = self._options
        return GroupSampler(
            client,
            self._prompts,
            GroupNumbers(Cursor(0), 0, 1),
            self._sampling,
            group_size=options.group_size,
            rewards=self._rewards,
            failures=self._failures,
            failed_prompts=FailedPrompts(len(self._prompts)),
            on_failed=options.on_failed_reward,
            episodes=self._episodes,
        )

"""Rollouts on held-out prompts, every --eval-interval steps; none of them is trained on.

The samples of all sets are dealt out over the replicas; each replica's leader requests its share and
scores it, while the other ranks, and with samples ahead of training the trainer itself, go on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.problems import Problems, check_each
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.features.evaluation.held_out import evaluation_sampling, held_out_prompts
from megatron_rl_corr.features.evaluation.options import EvaluationSet
from megatron_rl_corr.features.evaluation.pass_at_k import pass_at_k, powers_up_to
from megatron_rl_corr.mcore.batch.server_collector import PROGRESS_EVERY_S, SampleSource
from megatron_rl_corr.mcore.feature import RunSettings
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    MeetingTurns,
    all_reduce_results,
    communication_device,
    meeting_interval_s,
)
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.groups import mean_reward
from megatron_rl_corr.rollout.sampling import sampling_of_row
from megatron_rl_corr.rollout.seeds import evaluation_number

TOTALS = ("reward", "tokens", "cut", "samples", "failed", "prompt_means", "prompts")
"""What is summed of each set, beside two numbers for each pass@k: its sum over prompts, and those prompts."""


@dataclass(frozen=True)
class HeldOutSample:
    """What is kept of one sample. Example: HeldOutSample(reward=1.0, tokens=37, cut=False)."""

    reward: float
    tokens: int
    cut: bool
    """It ended with the length limit."""


@dataclass(frozen=True)
class HeldOut:
    """A set and its prompts, which are None on ranks that ask for no samples."""

    options: EvaluationSet
    prompts: PromptDataset | None


@dataclass(frozen=True)
class Evaluation:
    """Samples the prompts of every set after every `every`-th step, and averages what they get."""

    layout: Layout
    source: SampleSource
    sets: Sequence[HeldOut]
    sampling: SamplingParams
    every: int
    pass_reward: float
    """A sample passes with a reward of at least this."""
    at_once: int = 128
    """Samples that are under way at a time; the client's limit of requests is another one."""

    @classmethod
    def of(cls, settings: RunSettings, source: SampleSource) -> Evaluation:
        """The evaluation that a run's flags ask for.

        Args:
            settings: the run's.
            source: of the training's samples.

        Raises:
            ValueError: a set can't be read, or servers can't sample so.
        """
        options, args, layout = settings.options, settings.args, settings.layout
        sampling, given = evaluation_sampling(options), (options, args, layout, source.tokenizer)
        source.client.check_sampling(sampling)

        def opened(one: EvaluationSet) -> HeldOut:
            prompts = held_out_prompts(one.path, *given, source.client.vocab_size)
            source.rewards.check_labels(prompts, "--rollout-eval-prompts")
            if prompts is not None:
                source.loop.call(source.rewards.check_readable(prompts, "--rollout-eval-prompts"))
            return HeldOut(one, prompts)

        problems = Problems()
        sets = problems.check("sets", lambda: check_each(opened, options.evaluation_sets()))
        problems.check("rewards", lambda: source.rewards.check_alone("--rollout-eval-prompts"))
        problems.raise_all()
        return cls(
            layout,
            source,
            sets,
            sampling,
            every=args.eval_interval,
            pass_reward=options.eval_pass_reward,
            at_once=2 * options.max_concurrency,
        )

    def is_due(self, step: int) -> bool:
        """True if to evaluate after `step` steps."""
        return step % self.every == 0

    def start(self, step: int) -> RunningEvaluation:
        """Request this replica's share of all samples, of the weights that the servers have now;
        returns at once.
        """
        running = RunningEvaluation(self, step)
        if self.layout.is_data_leader:
            shares = [self._share(place) for place in range(len(self.sets))]
            running.total = sum(map(len, shares))
            running.future = self.source.loop.submit(self._sample(shares, running))
        return running

    def _share(self, place: int) -> list[tuple[int, int]]:
        """(number of the prompt, number of the draw) of this replica's samples of a set.

        All samples of a prompt are one replica's, as pass@k needs them together.
        """
        first = sum(len(one.prompts) * one.options.samples for one in self.sets[:place])
        one = self.sets[place]
        return [
            (number, evaluation_number(first + one.prompts.index_at(number) * one.options.samples + sample))
            for number in range(self.layout.dp_rank, len(one.prompts), self.layout.dp_size)
            for sample in range(one.options.samples)
        ]

    async def _sample(
        self, shares: Sequence[Sequence[tuple[int, int]]], running: RunningEvaluation
    ) -> torch.Tensor:
        """[totals of all sets], float64."""
        places = asyncio.Semaphore(self.at_once)

        async def placed(one: HeldOut, number: int, draw: int) -> HeldOutSample | None:
            async with places:
                return await self._scored(one, number, draw, running)

        calls = [
            placed(one, number, draw)
            for one, share in zip(self.sets, shares, strict=True)
            for number, draw in share
        ]
        scored = iter(await all_or_first_failure(calls))
        totals = []
        for one, share in zip(self.sets, shares, strict=True):
            of_prompts: dict[int, list[HeldOutSample | None]] = {}
            for number, _ in share:
                of_prompts.setdefault(number, []).append(next(scored))
            totals += totals_of_set(list(of_prompts.values()), one.options.samples, self.pass_reward)
        return torch.tensor(totals, dtype=torch.float64)

    async def _scored(
        self, one: HeldOut, number: int, draw: int, running: RunningEvaluation
    ) -> HeldOutSample | None:
        """One sample; None where it failed for good."""
        client, episodes, prompt = self.source.client, self.source.episodes, one.prompts.at(number)
        sampling, scores = sampling_of_row(self.sampling, prompt), []

        async def score(sample: Trajectory) -> None:
            scores.append(await self.source.rewards.score(prompt, sample))

        try:
            if episodes is None:
                branches = await client.generate([prompt.input_ids], sampling, group_numbers=[draw])
                await score(*branches)
            else:
                how = {"group_numbers": [draw], "on_sample": score}
                branches = await episodes.generate(client, [prompt], sampling, **how)
        except SampleFailure as failure:
            name = f" {one.options.name}" if one.options.name else ""
            what = f"row {prompt.index} of --rollout-eval-prompts{name}"
            warn(f"{what} failed for good ({failure.cause}): {failure}")
            EVENTS.tell("sample_failed", f"{what}: {failure}", cause=failure.cause)
            running.failed += 1
            return None
        running.done += 1
        [own] = scores
        reward = mean_reward(
            [own if one.environment_reward is None else one.environment_reward for one in branches]
        )
        tokens = sum(int(one.sampled.sum()) for one in branches)
        return HeldOutSample(reward, tokens, any(one.finish_reason == "length" for one in branches))

    def size(self) -> int:
        """Numbers that are summed over all ranks: the same on each."""
        return sum(len(TOTALS) + 2 * len(powers_up_to(one.options.samples)) for one in self.sets)


@dataclass
class RunningEvaluation:
    """An evaluation that was started, on every rank."""

    evaluation: Evaluation
    step: int
    """After which it was started."""
    future: Future[torch.Tensor] | None = None
    """On the ranks that ask for samples."""
    total: int = 0
    """Samples of this replica."""
    done: int = 0
    failed: int = 0
    begun: float = field(default_factory=time.monotonic)
    told_after_s: float = 0.0
    """When its progress was last printed."""

    @collective
    def all_reduce_metrics(self, turns: MeetingTurns | None = None) -> dict[str, float]:
        """Metrics of all sets, once every replica has its samples: on every rank, which all call.

        turns: of the ranks while they wait; None: they have none, as the servers must stay as they are.
        """
        ended = partial(self._has_ended, turns)
        own = all_reduce_results(self.future, lambda totals: totals, ended, turns)
        sums = torch.zeros(self.evaluation.size(), dtype=torch.float64) if own is None else own
        sums = sums.to(communication_device())
        dist.all_reduce(sums)
        left, metrics = iter(sums.tolist()), {}
        for one in self.evaluation.sets:
            metrics |= metrics_of_set(one.options, left)
        return metrics

    def close(self) -> None:
        """Ask for no more samples."""
        if self.future is not None:
            self.future.cancel()

    def _has_ended(self, turns: MeetingTurns | None, future: Future) -> bool:
        """True if it ends within `meeting_interval_s`; progress is printed every PROGRESS_EVERY_S."""
        end = time.monotonic() + meeting_interval_s(turns)
        while (left := end - time.monotonic()) > 0:
            if concurrent.futures.wait([future], min(left, PROGRESS_EVERY_S)).done:
                return True
            seconds = time.monotonic() - self.begun
            if seconds < self.told_after_s + PROGRESS_EVERY_S:
                continue
            self.told_after_s = seconds
            print(
                f"[rollout] evaluation after step {self.step}: {self.done} of {self.total} samples are done, "
                f"{self.failed} failed, {seconds:.0f} s",
                flush=True,
            )
        return False


def totals_of_set(
    prompts: Sequence[Sequence[HeldOutSample | None]], samples: int, pass_reward: float
) -> list[float]:
    """TOTALS of one set on one replica, and for each k of `powers_up_to(samples)` the sum of pass@k
    and its prompts.

    Args:
        prompts: of each prompt its samples, None for those that failed.
        samples: asked for of each prompt.
        pass_reward: a sample passes with at least this.
    """
    good = [[one for one in scored if one is not None] for scored in prompts]
    every = [one for scored in good for one in scored]
    means = [sum(one.reward for one in scored) / len(scored) for scored in good if scored]
    totals = [
        sum(one.reward for one in every),
        sum(one.tokens for one in every),
        sum(one.cut for one in every),
        len(every),
        sum(map(len, prompts)) - len(every),
        sum(means),
        len(means),
    ]
    for k in powers_up_to(samples):
        passed = [
            pass_at_k(len(scored), sum(one.reward >= pass_reward for one in scored), k)
            for scored in good
            if len(scored) >= k
        ]
        totals += [sum(passed), len(passed)]
    return [float(total) for total in totals]


def metrics_of_set(options: EvaluationSet, totals: Iterator[float]) -> dict[str, float]:
    """The metrics by name, from the set's totals over all replicas, which are taken from the iterator."""
    sums = {name: next(totals) for name in TOTALS}
    samples, prefix = options.samples, options.prefix
    metrics = {
        f"{prefix}reward": _ratio(sums["reward"], sums["samples"]),
        f"{prefix}response_length": _ratio(sums["tokens"], sums["samples"]),
        f"{prefix}length_fraction": _ratio(sums["cut"], sums["samples"]),
    }
    if samples > 1:
        metrics[f"{prefix}mean@{samples}"] = _ratio(sums["prompt_means"], sums["prompts"])
    for k in powers_up_to(samples):
        metrics[f"{prefix}pass@{k}"] = _ratio(next(totals), next(totals))
    return metrics | {f"{prefix}samples": sums["samples"], f"{prefix}failed": sums["failed"]}


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")

"""Samples of one step: the leader of each data-parallel replica asks the servers; the replica receives."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_rl_corr.mcore.arguments import RolloutOptions
from megatron_rl_corr.mcore.batch import RolloutBatch
from megatron_rl_corr.mcore.compat import Layout
from megatron_rl_corr.parallel.failure import all_reduce_failure, communication_device
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.prompts import PromptDataset
from megatron_rl_corr.rollout.rewards import RewardFunction, score
from megatron_rl_corr.rollout.trajectory import SamplingParams, Trajectory

PROGRESS_EVERY_S = 10.0


class Collector:
    """Collects a global batch of `samples` rows, group_size of each prompt."""

    def __init__(
        self, options: RolloutOptions, layout: Layout, *, samples: int, length: int,
        client: RolloutClient, loop: LoopThread, prompts: PromptDataset, reward: RewardFunction,
    ):
        share = samples // layout.dp_size
        if samples % layout.dp_size or share % options.group_size:
            raise ValueError(
                f"--global-batch-size {samples} must be a multiple of --rollout-group-size "
                f"{options.group_size} times the data-parallel size {layout.dp_size}: "
                "a prompt's samples stay on one replica"
            )
        longest = max(len(prompt.input_ids) for prompt in prompts.prompts)
        needed = longest + options.max_new_tokens - 1
        if needed > length:
            raise ValueError(
                f"--seq-length {length} is too short for the longest prompt of {longest} tokens and "
                f"--rollout-max-new-tokens {options.max_new_tokens}; use --seq-length {needed} or more"
            )
        self._options, self._layout, self._length = options, layout, length
        self._client, self._loop, self._prompts, self._reward = client, loop, prompts, reward
        self._rows, self._prompts_per_step = share, samples // options.group_size
        self.device = communication_device()
        self.trajectories: list[Trajectory] = []
        """The last step's samples of this replica, on its data leader."""
        self.sampling = SamplingParams(
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p,
            top_k=options.top_k,
        )

    def collect(self, step: int, version: int) -> RolloutBatch:
        """This rank's share of a step, sampled from weights `version` or older; every rank calls it.

        Rows of its replica, whole or, under context parallelism, their columns.
        """
        batch, error = RolloutBatch.empty(self._rows, self._length), None
        if self._layout.is_data_leader:
            try:
                batch = self._ask(step, version)
            except Exception as failure:  # noqa: BLE001  raised below, on this rank, once the others know
                error = failure
        all_reduce_failure(error)
        whole = batch.broadcast(self._layout, with_support=self.sampling.truncated)
        return whole.context_slice(self._layout.cp_group.rank(), self._layout.cp_group.size())

    def _ask(self, step: int, version: int) -> RolloutBatch:
        per_replica = self._prompts_per_step // self._layout.dp_size
        first = self._layout.dp_rank * per_replica
        prompts = self._prompts.batch(step, self._prompts_per_step)[first : first + per_replica]
        self.trajectories = self._loop.call(
            self._client.generate(
                [prompt.input_ids for prompt in prompts], self.sampling,
                samples_per_prompt=self._options.group_size, on_progress=_progress_printer(step),
            )
        )
        rewards = score(self.trajectories, prompts, self._reward)
        return RolloutBatch.from_trajectories(self.trajectories, rewards, length=self._length, version=version)


def _progress_printer(step: int) -> Callable[[int, int, float], None]:
    """Says how far a slow collection has come, every ten seconds; a fast one stays silent."""
    last = time.monotonic()

    def on_progress(done: int, total: int, tokens_per_s: float) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            print(f"[rollout] step {step + 1}: {done} of {total} samples, {tokens_per_s:.0f} tokens/s", flush=True)

    return on_progress

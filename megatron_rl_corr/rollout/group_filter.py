"""Which groups are trained: those whose rewards are not all equal, or those that the user's
function chooses.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_rl_corr.config.groups import SPREAD
from megatron_rl_corr.data.loading import load
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.worker_pool import CallTimeout, UserCalls
from megatron_rl_corr.engines.errors import SampleFailure, TooManyFailures
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout.failures import HOPELESS_GROUPS, Failures
from megatron_rl_corr.rollout.groups import Group

FLAG = "`group_filter`"
LIMIT_S = 60.0
"""Longest call of the user's function, which has only numbers to look at, in seconds."""


def has_spread(group: Group) -> bool:
    """True if the rewards of two of its samples differ, as float32, which is what they are trained as.

    Compared exactly: a standard deviation of equal numbers need not be 0.
    """
    return len(set(np.asarray(group.episode_rewards, dtype=np.float32).tolist())) > 1


def chosen_sample(trajectories: Sequence[Trajectory], number: int, longest: int) -> Trajectory | None:
    """The sample of a group that is measured, another place in each group; None where none can be.

    Args:
        trajectories: of the group.
        number: of the group.
        longest: tokens of a sample that the trainer takes, at most.
    """
    for place in range(len(trajectories)):
        sample = trajectories[(number + place) % len(trajectories)]
        if sample.sampled.any() and sample.prompt_ids.numel() + sample.output_ids.numel() <= longest:
            return sample
    return None


def measured_samples(share: float | None, rows: int) -> int:
    """Samples of groups that do not pass which a replica scores a step: the share of its batch's, rounded up.

    Args:
        share: --rollout-group-filter-measured; None: groups are not filtered.
        rows: samples of a batch on a replica.
    """
    return 0 if share is None else math.ceil(share * rows)


class GroupFilter:
    """Judges the groups of one replica, for one event loop.

    A call that fails counts as one failed sample, and its group is dropped and replaced as after
    a failed reward.

    Args:
        spec: spread, or the user's function, "path/to/file.py:name" or "package.module:name". The function
            gets the prompt and the Group, copies both, runs on the event loop where it is async, else in a
            thread, and returns True for a group that is trained.
        prompts: the data set.
        failures: counts calls that fail.

    Raises:
        ValueError: the function can't be loaded.
    """

    def __init__(self, spec: str, prompts: PromptDataset, failures: Failures):
        self._spec, self._prompts, self._failures = spec, prompts, failures
        self._function = None if spec == SPREAD else load(spec, FLAG)
        self._calls = UserCalls(LIMIT_S)
        self.failed_in_a_row = 0
        """Groups that could not be judged, up to now; a checkpoint keeps it."""

    async def passes(self, group: Group) -> bool | None:
        """Whether the group is trained; None: the user's function failed.

        Raises:
            TooManyFailures: it fails for every group.
        """
        if self._function is None:
            return has_spread(group)
        prompt = self._prompts.at(group.number)
        own = replace(
            group,
            trajectories=list(group.trajectories),
            rewards=list(group.rewards),
            reward_parts=[dict(parts) for parts in group.reward_parts],
        )
        why = None
        try:
            answer = await self._calls(self._function, prompt.copied(), own)
            if not isinstance(answer, bool | np.bool_):
                why = f"it must return True or False, got {answer!r}"
        except CallTimeout as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001  the user's own
            why = "".join(traceback.format_exception(error)).strip()
        if why is not None:
            failure = SampleFailure("group_filter", f"{FLAG} {self._spec} failed: {why}")
            what = f"the group of row {prompt.index} of the data set"
            self._failures.failed(failure, what, group=group.number, row=prompt.index)
            lengths = [sum(int(one.sampled.sum()) for one in episode) for episode in group.episodes]
            self._failures.dropped(prompt, group.number, lengths)
            self.failed_in_a_row += 1
            if self.failed_in_a_row >= HOPELESS_GROUPS:
                raise TooManyFailures(
                    f"{FLAG} {self._spec} failed for the last {HOPELESS_GROUPS} groups of a replica: "
                    f"{failure}"
                ) from None
            self._failures.check()
            return None
        self.failed_in_a_row = 0
        return bool(answer)

    async def close(self) -> None:
        """End the function's thread."""
        await self._calls.close()

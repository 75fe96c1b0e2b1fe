"""Means of the named rewards over a batch: names come from the user's functions, so ranks learn
them as they appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.metrics import Mean, Metric

MOST = 64
"""Names of a run, at most: a function that makes new ones for every sample would fill the log."""
PREFIX = "reward/parts/"


class RewardParts:
    """The names that all ranks know, and this leader's sums of the last batch.

    Example: after count([{"math": 1.0, "short": -0.5}, {"math": 0.0, "short": 0.0}]) the mean of math is 0.5.
    """

    def __init__(self):
        self.names: tuple[str, ...] = ()
        self._sums: dict[str, list[float]] = {}

    def count(self, samples: Iterable[Mapping[str, float]]) -> int:
        """Take a batch's samples on a leader. Returns how many names they have that not all ranks know."""
        self._sums = {}
        for parts in samples:
            for name, value in parts.items():
                own = self._sums.setdefault(name, [0.0, 0])
                own[0], own[1] = own[0] + value, own[1] + 1
        return len(self._sums.keys() - set(self.names))

    @collective
    def share_names(self) -> None:
        """Make the names of all leaders known to every rank, which all call it.

        Raises:
            ValueError: on all ranks, for more than MOST names.
        """
        every: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(every, sorted(self._sums))
        self.names = tuple(sorted({name for own in every for name in own} | set(self.names)))
        if len(self.names) > MOST:
            raise ValueError(
                f"`reward_function`: the dicts of its rewards have {len(self.names)} keys by now, among them "
                f"{', '.join(self.names[:5])}; at most {MOST} are logged: give the same keys for every sample"
            )

    def counts(self) -> torch.Tensor:
        """[2 * names] float64: sum and number of each, of this rank's last batch; 0 on ranks
        that are no leader.
        """
        return torch.tensor(
            [self._sums.get(name, [0.0, 0]) for name in self.names], dtype=torch.float64
        ).reshape(-1)

    def metrics(self, counts: torch.Tensor) -> dict[str, Metric]:
        """By logged name, from the `counts`. A single one is reward/mean itself, so that it has no other."""
        if len(self.names) < 2:
            return {}
        return {PREFIX + name: Mean(pair) for name, pair in zip(self.names, counts.view(-1, 2), strict=True)}


METRICS = in_group(
    "Rewards and responses",
    MetricSpec(
        PREFIX,
        "each reward by its name, before its weight, and further keys of its dict as NAME/KEY",
        "mean over the samples that have it",
        only_with="several rewards, or a reward that returns a dict",
    ),
)

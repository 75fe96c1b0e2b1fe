"""What is measured of agents' episodes, from the counts of all replicas since the batch before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.reduce.metrics import Mean, Metric, Sum
from megatron_rl_corr.rollout.agents.agents import AgentCounts

FORKS = ("edited", "template", "tools", "earlier")
PER_EPISODE = {
    "agent/harness_s": "seconds",
    "agent/requests": "requests",
    "agent/turns": "turns",
    "agent/branches": "branches",
}
SUMS = {"agent/episodes": "episodes"} | {
    f"agent/{name}": name for name in ("refused", "rerendered", "undelivered", "abandoned", "overridden")
}
COUNTED = (*PER_EPISODE.values(), *SUMS.values(), *(f"forks_{reason}" for reason in FORKS))


def counted(counts: AgentCounts) -> Tensor:
    """[len(COUNTED)] float64, since the run's beginning."""
    forks = {f"forks_{reason}": counts.forks[reason] for reason in FORKS}
    values = vars(counts) | forks | {"overridden": counts.overridden.total()}
    return torch.tensor([float(values[name]) for name in COUNTED], dtype=torch.float64)


def agent_metrics(values: Tensor) -> dict[str, Metric]:
    """By logged name.

    Args:
        values: [len(COUNTED)] float64, this rank's share of what all replicas have counted.
    """
    named = dict(zip(COUNTED, values, strict=True))
    means = {name: Mean(torch.stack([named[own], named["episodes"]])) for name, own in PER_EPISODE.items()}
    sums = SUMS | {f"agent/forks_{reason}": f"forks_{reason}" for reason in FORKS}
    return means | {name: Sum(named[own][None]) for name, own in sums.items()}


METRICS = in_group(
    "Sampling",
    *(
        replace(spec, only_with="--rollout-agent or --rollout-agent-command")
        for spec in (
            MetricSpec(
                "agent/episodes",
                "agents' episodes that ended since the batch before, well or not; evaluations' too",
                "count",
            ),
            MetricSpec("agent/harness_s", "seconds of an episode", "mean over these episodes"),
            MetricSpec(
                "agent/requests", "requests of an episode, refused ones too", "mean over these episodes"
            ),
            MetricSpec("agent/turns", "answers in an episode", "mean over these episodes"),
            MetricSpec("agent/branches", "sequences of an episode", "mean over these episodes"),
            MetricSpec(
                "agent/refused",
                "requests refused for what they ask: too long, too many, no template for it",
                "count",
            ),
            MetricSpec(
                "agent/rerendered",
                "turns that the template writes otherwise than they were sampled; they go on as sampled",
                "count",
            ),
            MetricSpec("agent/abandoned", "requests that the harness gave up as the policy sampled", "count"),
            MetricSpec("agent/undelivered", "answers that the harness did not wait for: no turns", "count"),
            MetricSpec(
                "agent/overridden",
                "fields of requests, such as temperature, that the run's own settings took the place of",
                "count",
            ),
            MetricSpec(
                "agent/forks_edited",
                "conversations begun anew as the agent had edited, compacted or left its history",
                "count",
            ),
            MetricSpec(
                "agent/forks_template",
                "conversations begun anew as the chat template rewrites history",
                "count",
            ),
            MetricSpec("agent/forks_tools", "conversations begun anew as the tools were others", "count"),
            MetricSpec(
                "agent/forks_earlier",
                "branches begun at an earlier answer, as the history left out the later ones",
                "count",
            ),
        )
    ),
)

"""Measures a run's agents. What runs them is in rollout/agents, and made by `making`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.features.agent.metrics import COUNTED, agent_metrics, counted
from megatron_rl_corr.mcore.feature import CorrectedBatch, Feature, RunParts
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.metrics import Metric


class AgentFeature(Feature):
    """--rollout-agent and --rollout-agent-command."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._before = torch.zeros(len(COUNTED), dtype=torch.float64)

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return bool(options.agent or options.agent_command)

    def open(self, run: RunParts) -> None:
        self._layout, self._agents = run.settings.layout, run.source.episodes

    @collective
    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """What all replicas' episodes did since the batch before; one rank contributes it."""
        layout, values = self._layout, torch.zeros(len(COUNTED), dtype=torch.float64)
        if layout.is_data_leader:
            now = counted(self._agents.counts)
            values, self._before = now - self._before, now
        values = values.to(communication_device())
        dist.all_reduce(values)
        if not layout.is_last_stage:
            return {}
        return agent_metrics(values if layout.dp_cp_group.rank() == 0 else torch.zeros_like(values))


FEATURE = AgentFeature

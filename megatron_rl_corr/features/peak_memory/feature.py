"""Logs the most memory that each rank has held, after each push."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.features.peak_memory.metrics import DEVICE, HOST
from megatron_rl_corr.mcore.feature import Feature
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.failure import communication_device

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.serving import WeightPush

GIB = 2**30
KIB_PER_GIB = 2**20


class PeakMemoryFeature(Feature):
    """--rollout-peak-memory."""

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.peak_memory

    @collective
    def after_push(self, push: WeightPush, version: str) -> dict[str, float]:
        """Each rank's peaks in GiB, by its number; of a device where there is one. One all-gather."""
        device = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_GIB  # Linux counts it in KiB
        peaks = torch.tensor([host, device], dtype=torch.float64, device=communication_device())
        found = {}
        for rank, (of_host, of_device) in enumerate(all_gather_stacked(peaks, dist.group.WORLD).tolist()):
            found[f"{HOST}rank_{rank}"] = of_host
            if of_device:
                found[f"{DEVICE}rank_{rank}"] = of_device
        return found


FEATURE = PeakMemoryFeature

"""When a run probes its servers: right after each push, and before the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.features.push_probe.probe import PushProbe, make_probe
from megatron_rl_corr.mcore.feature import Feature, RunParts
from megatron_rl_corr.mcore.serving import WeightPush
from megatron_rl_corr.weight_sync.servers import WeightServers


class PushProbeFeature(Feature):
    """--rollout-probe-push."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self.probe: PushProbe | None = None
        self._is_first = True
        self._run: RunParts | None = None

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.probe_push == "on"

    def start(self, run: RunParts) -> None:
        self._run, self.probe = run, make_probe(run)

    def before_push(self) -> None:
        self.probe.before_push()

    def after_join(self, servers: WeightServers, version: str) -> None:
        # what is known of the run's own servers stays as it is
        source = replace(self._run.source, client=servers.client)
        probe = make_probe(replace(self._run, source=source), joining=True)
        print_probe(probe.compare_servers(servers, version))

    def after_push(self, push: WeightPush, version: str) -> dict[str, float]:
        if not push.servers.urls:  # all have left the run; who joins is probed then
            return {}
        found = self.probe.compare_servers(push.servers, version)
        if push.colocation is not None:
            push.colocation.servers.free_cached()  # of the probe's forward pass
        if self._is_first:
            print_probe(found)
        self._is_first = False
        return found


def print_probe(found: Mapping[str, float]) -> None:
    """One line of the probe of the first push, or of servers that join, from rank 0."""
    if found and dist.get_rank() == 0:
        worst, mean = (found[f"rollout/probe_{name}_abs_log_ratio"] for name in ("max", "mean"))
        over = found["rollout/probe_over_rounding"]
        print(
            f"[rollout] probe of the pushed weights: max |log-ratio| {worst:.2g}, mean {mean:.2g}, "
            f"{over:.2g} times what rounding explains",
            flush=True,
        )


FEATURE = PushProbeFeature

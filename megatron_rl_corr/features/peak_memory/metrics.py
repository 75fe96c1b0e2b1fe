"""What a rank's memory is called."""

from __future__ import annotations

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group

HOST, DEVICE = "memory/host_gib/", "memory/device_gib/"
"""Before rank_N."""
_WITH = "--rollout-peak-memory"
METRICS = in_group(
    "Speed",
    MetricSpec(
        HOST, "most memory of a rank's process on the host so far", "peak RSS / 2^30", only_with=_WITH
    ),
    MetricSpec(
        DEVICE,
        "most memory of a rank's tensors on its GPU so far",
        "torch.cuda.max_memory_allocated() / 2^30",
        only_with=_WITH,
    ),
)
